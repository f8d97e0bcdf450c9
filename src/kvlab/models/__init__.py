"""The decoder: options that describe a family, layers, weights."""
