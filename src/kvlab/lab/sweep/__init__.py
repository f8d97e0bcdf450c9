"""Many runs as one experiment: what is planned, what was done before, how far it is, what came of it."""
