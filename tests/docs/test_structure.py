"""What the layers of pyproject.toml do not say of the modules' imports."""

from __future__ import annotations

import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions and for type checkers included. A circle is named by the error."""
    graph = grimp.build_graph("kvlab", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(list(TopologicalSorter(imports).static_order())) > 300


def test_no_file_is_too_long_to_read_at_once() -> None:
    """Of Python: 350 lines; one that is longer holds more than one thing."""
    home = Path(__file__).parents[2]
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=home, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no clone of git")
    lines = {name: len((home / name).read_text().splitlines()) for name in listed.stdout.split()}
    assert len(lines) > 800
    assert {name: count for name, count in lines.items() if count > 350} == {}
