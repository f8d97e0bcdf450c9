"""What an engine takes of a memory, computed before a byte of it is allocated: weights, cache, the largest step."""
