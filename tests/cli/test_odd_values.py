"""Odd values for every setting of the schema: each is taken, or refused in a sentence."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from kvlab.cli.compose import run_config, without_hydra
from kvlab.cli.mistakes import explained
from kvlab.config import RunConfig
from kvlab.errors import KvlabError
from kvlab.lab.run import plan as planning
from kvlab.paths import CONF
from tests.support.runs import FEW_STEPS

NUMBERS = (-1, 0, 2**31, 10**400)
FRACTIONS = (1e-320, 1e308, math.inf, math.nan)
TEXTS = ("~nobody-at-all/x", "[/red] a\nb\x1b[2J", "\udcff", "x" * 100_000, "${nope}")
OTHERS: tuple[str | list[object] | None, ...] = (None, "", [])


def leaves(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of the schema with their types; `X | None` counts as X."""
    for name, hint in get_type_hints(schema).items():
        kind = next((part for part in get_args(hint) if part is not type(None)), hint) if get_args(hint) else hint
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name, hint if "dict" in str(hint) or "list" in str(hint) else kind


LEAVES = dict(leaves())


@pytest.fixture(scope="module")
def base() -> bytes:
    """The configuration as bytes: OmegaConf reads a copy from them in a tenth of the time of `deepcopy`."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return pickle.dumps(without_hydra(compose("run", list(FEW_STEPS), return_hydra_config=True)))


def odd_values(kind: Any) -> tuple[Any, ...]:
    if kind is int:
        return NUMBERS + OTHERS
    if kind is float:
        return NUMBERS + FRACTIONS + OTHERS
    return TEXTS + OTHERS + (NUMBERS[-1],)


@pytest.mark.parametrize("key", LEAVES)
def test_every_odd_value_is_taken_or_refused_in_a_sentence(
    key: str, base: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda device: 2**29)  # what is taken is not large
    for value in odd_values(LEAVES[key]):
        config: DictConfig = pickle.loads(base)
        try:
            with explained([f"{key}=..."]):
                OmegaConf.update(config, key, value, force_add=True)
            taken = run_config(config)
            planning.plan_run(taken)
        except KvlabError as refused:
            text = str(refused)
            assert len(text) < 1000, (key, text)
            assert text.replace("\n", "").isprintable(), (key, text)


def test_the_walk_finds_every_kind_of_setting() -> None:
    assert len(LEAVES) > 60
    assert {LEAVES[key] for key in ("seed", "workload.rate", "run_name", "figures")} == {int, float, str, bool}
