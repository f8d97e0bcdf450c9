"""A workload's prefixes replayed through the ledger alone: what each eviction policy keeps of a pool."""
