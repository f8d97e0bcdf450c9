"""Build, drive, measure, track, report: what turns an engine into an experiment."""
