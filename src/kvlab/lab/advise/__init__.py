"""What to change: from traffic and today's settings to a ranked list of changes, each simulated, with its error."""
