"""Steps without CUDA graphs: what the host needs to launch a layer, and what published cases say of it."""

from __future__ import annotations

from statistics import median

import pytest

from experiments.eager_steps.run import between_hosts, firsts, on_one_host
from kvlab.config import FrameworkConfig
from kvlab.errors import ConfigError
from kvlab.simulation.eager import PUBLISHED, Published, eager_note


def test_what_a_run_says_of_published_cases_is_what_they_say() -> None:
    layers, transfers = (
        [case.layer_us for case in firsts()],
        [row for row in on_one_host() if _is_alike(row.case.kind)],
    )
    errors = [row.error for row in transfers]
    assert (
        Published(
            len(layers),
            round(min(layers)),
            round(max(layers)),
            round(median(abs(row.error) for row in between_hosts()), 2),
            len(errors),
            round(min(errors), 2),
            round(max(errors), 2),
        )
        == PUBLISHED
    )
    assert sum(abs(error) <= 0.25 for error in errors) == 18


def _is_alike(kind: str) -> bool:
    return kind != "hybrid"  # whose layers are of another kind than those of the case that says them


def test_a_step_takes_what_the_host_needs_for_its_layers_or_longer() -> None:
    eager = FrameworkConfig(step_us=100, sequence_us=0, cuda_graphs=False, eager_layer_us=300)
    assert eager.step_s(0.001, sequences=1, tokens=1, layers=36) == pytest.approx(0.0108)
    assert eager.step_s(0.001, sequences=1, tokens=900, layers=36) == pytest.approx(0.0108)  # with prompts too
    assert eager.step_s(0.020, sequences=1, tokens=1, layers=36) == pytest.approx(0.0201)
    for graphs in (FrameworkConfig(eager_layer_us=300), FrameworkConfig(cuda_graphs=False)):
        assert graphs.step_s(0.001, sequences=1, tokens=1, layers=36) < 0.002


def test_a_layer_takes_no_negative_time() -> None:
    with pytest.raises(ConfigError, match=r"framework\.eager_layer_us"):
        FrameworkConfig(eager_layer_us=-1)


def test_a_fit_has_the_host_in_it() -> None:
    eager = FrameworkConfig(cuda_graphs=False, eager_layer_us=300)
    assert eager_note(eager, 36, includes_host=True) is None
    assert eager_note(FrameworkConfig(), 36, includes_host=False) is None
