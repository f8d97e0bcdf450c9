"""The configuration reference comes from the schema, and leaves nothing out."""

from __future__ import annotations

import ast
import dataclasses
import runpy
from pathlib import Path

from kvlab.config import HardwareConfig, RunConfig
from kvlab.lab.settings import flatten

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "docs/_site/configuration.py"))


def test_every_setting_has_a_type_and_a_description() -> None:
    found = {setting.key: setting for setting in REFERENCE["settings"]()}
    config = RunConfig(hardware=HardwareConfig(name="a device", memory="1GiB", bandwidth_gb_s=1.0))
    assert set(flatten(dataclasses.asdict(config))) <= set(found)
    assert [key for key, setting in found.items() if len(setting.description) < 8 or not setting.type] == []


def test_a_setting_has_its_default_its_unit_and_what_can_be_chosen() -> None:
    found = {setting.key: setting for setting in REFERENCE["settings"]()}
    assert found["kv.block_size"].default == 16
    assert found["scheduler.max_wait_ms"].type == "float"
    assert "milliseconds" in found["scheduler.max_wait_ms"].description
    assert "lru" in found["kv.eviction"].choices
    assert found["seed"].choices == ()


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    assert page == REFERENCE["page"](), "run python docs/_site/configuration.py"


def test_no_file_but_a_pool_s_own_names_a_kv_backend() -> None:
    """What depends on the kind of pool asks the pool, so that another kind needs no change elsewhere."""
    package = ROOT / "src/kvlab"
    default = {"config/kv.py": 1}  # KVConfig.backend
    found = {}
    for file in package.rglob("*.py"):
        name = file.relative_to(package).as_posix()
        if not name.startswith("kv/pools/"):
            nodes = ast.walk(ast.parse(file.read_text()))
            count = sum(isinstance(node, ast.Constant) and node.value in ("paged", "contiguous") for node in nodes)
            if count:
                found[name] = count
    assert found == default
