"""The files of conf/ that name more than one run, and the points of each."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvlab.paths import CONF

SWEEPS = sorted(
    f"{group}={file.stem}" for group in ("sweep", "experiment") for file in CONF.glob(f"{group}/*.yaml")
)


def smaller_grid(values: list[list[str]]) -> list[list[str]]:
    """Of several settings with three values or more, those that are numbers have their least and their largest."""
    if sum(len(each) > 2 for each in values) < 2:
        return values
    return [each if not each[0].rpartition("=")[2].isdecimal() else [each[0], each[-1]] for each in values]


def swept_values(name: str) -> list[list[str]]:
    """The overrides of each setting that a file sweeps, as Hydra reads them; none for an experiment of one run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        params = compose("run", [name], return_hydra_config=True).hydra.sweeper.get("params") or {}
    overrides = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
    return [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [f"{each.get_key_element()}={each.get_value_element_as_str()}"]
        for each in overrides
    ]
