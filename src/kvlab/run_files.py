"""Names of the files in a run's directory."""

SUMMARY, CONFIG, TRACE = "summary.json", "config.yaml", "trace.json"
REQUESTS, STEPS, BLOCKS = "requests.parquet", "steps.parquet", "blocks.parquet"
ROUTES = "routes.parquet"  # of a fleet: what its router chose
SCALED = "scaling.parquet"  # of a fleet: which replicas started, drained and stopped, and when
PREFIXES = "prefixes.parquet"  # of a fleet: which replicas had the hottest prefixes, and when
SERIES = "series.parquet"  # of an engine without steps that says something of itself
SEARCH, ADVICE = "search", "advice.txt"  # of a search: its pictures, and among them how to go on from its answer
