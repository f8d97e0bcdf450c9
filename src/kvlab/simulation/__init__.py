"""How long a simulated device takes for a step."""
