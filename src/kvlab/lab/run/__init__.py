"""One run, from configuration to result: prepared, served, measured, recorded."""
