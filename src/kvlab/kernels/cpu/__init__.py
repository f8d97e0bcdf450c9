"""Native kernels for CPUs: C++ sources behind a plain C interface, compiled on first use."""
