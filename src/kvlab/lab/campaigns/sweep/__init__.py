"""Many runs as one experiment: its plan, its history in the tracking store, its progress, its results."""
