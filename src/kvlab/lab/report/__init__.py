"""Reports on runs: what is compared, what came of it, and its three forms (terminal, Markdown, one HTML file)."""
