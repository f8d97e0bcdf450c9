"""What runs leave: records, metrics computed from them, and their tables."""
