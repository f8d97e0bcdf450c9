"""What runs in the process of an engine that a run starts. Nothing here needs kvlab: it is run as a file, in the
engine's own environment.
"""
