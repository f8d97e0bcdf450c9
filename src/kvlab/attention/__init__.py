"""Attention over the cache: a contract, a registry, one file per backend."""
