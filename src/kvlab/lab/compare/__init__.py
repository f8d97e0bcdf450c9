"""Whether runs differ: groups of repeats, intervals, verdicts, outputs and the regression gate."""
