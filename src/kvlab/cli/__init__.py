"""The commands: the only place that knows Hydra."""
