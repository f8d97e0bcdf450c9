"""What the layers of pyproject.toml do not say of the modules' imports."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports within functions and for type checkers included. A circle is named by the error."""
    graph = grimp.build_graph("kvlab", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(list(TopologicalSorter(imports).static_order())) > 300
