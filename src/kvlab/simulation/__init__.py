"""How long a device that is not here would take for a step."""
