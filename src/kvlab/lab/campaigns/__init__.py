"""Many runs as one experiment: sweeps and searches."""
