"""Kernels and nothing else: tensors in, tensors out; no pool, no view, no model."""
