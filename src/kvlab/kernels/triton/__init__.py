"""Triton kernels, each beside the Python function that launches it.

On a GPU they are compiled; with `TRITON_INTERPRET=1`, set before this package is imported, they run interpreted on
CPU tensors, which is for tests. Importing this package imports triton; nothing else of kvlab does.
"""
