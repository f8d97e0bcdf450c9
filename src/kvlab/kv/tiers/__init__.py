"""Slower memory behind the pool: tiers of pages that hold what the pool has evicted."""
