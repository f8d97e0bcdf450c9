"""kvlab requirements: run every scenario and write docs/requirements.md, by features/requirements.py."""

from __future__ import annotations

import sys
from importlib import import_module

from kvlab.paths import SOURCE


def main() -> None:
    """Run the command line in the source tree, which a wheel does not have."""
    if SOURCE is None:
        sys.exit("error: requirements needs kvlab's source tree, with features/ and tests/: run it in a checkout")
    sys.path.insert(0, str(SOURCE))
    import_module("features.requirements").main()
