"""KV-cache memory: who owns which block, and what a model step sees of it."""
