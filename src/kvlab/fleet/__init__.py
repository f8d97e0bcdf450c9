"""Replicas of an engine behind a router, on one clock."""
