"""How many experts the tokens of a step meet, in measurements and in a server, and what a step takes by that."""

from __future__ import annotations

import numpy as np
import pytest

from kvlab.simulation import operations
from kvlab.simulation.expert_load import SPREAD, dealt, drawn
from tests.simulation.test_expert_kernels import timed
from tests.simulation.test_sparse import described

GPT_OSS, QWEN = (128, 4), (128, 8)  # experts, and those of a token


def sampled(tokens: int, experts: int, active: int, times: int = 200) -> float:
    """Experts that the tables' collector meets, in the mean: counts drawn and dealt as it does."""
    generator, found = np.random.default_rng(1), []
    least, most = (1.0, 0.8 * tokens) if tokens * active > experts else (0.01, 2.0)
    for _ in range(times):
        law = (least**-0.2 + (most**-0.2 - least**-0.2) * generator.random(experts)) ** -5
        counts = np.minimum(np.rint(law / law.sum() * tokens * active), tokens)
        while (left := tokens * active - counts.sum()) != 0:
            counts[counts.argmin() if left > 0 else counts.argmax()] += np.sign(left)
        found.append(np.count_nonzero(counts))
    return float(np.mean(found))


class TestExperts:
    @pytest.mark.parametrize("shape", [GPT_OSS, QWEN])
    @pytest.mark.parametrize("tokens", [1, 4, 16, 32, 48, 128, 1024])
    def test_are_dealt_as_the_collector_deals_them(self, shape: tuple[int, int], tokens: int) -> None:
        assert dealt(tokens, *shape) == pytest.approx(sampled(tokens, *shape), rel=0.03)

    def test_are_interpolated_between_measured_numbers_of_tokens(self) -> None:
        assert dealt(40, *GPT_OSS) == pytest.approx((dealt(32, *GPT_OSS) + dealt(48, *GPT_OSS)) / 2)
        assert dealt(5000, *GPT_OSS) == GPT_OSS[0]

    def test_are_drawn_by_their_popularity(self) -> None:
        for experts, active in (GPT_OSS, QWEN):
            met = [drawn(tokens, experts, active) for tokens in (1, 2, 8, 64, 512, 5000)]
            assert met == sorted(met)
            assert [met[0], met[-1]] == pytest.approx([active, experts], abs=0.1)
        # Two tokens share an expert as often as the squares of the chances come to.
        assert 8 - drawn(2, *GPT_OSS) == pytest.approx(1 / 128 * 16 * self.unevenness(), rel=1e-6)
        assert drawn(32, *GPT_OSS) < described("gpt_oss_120b").experts.met(32)

    def unevenness(self) -> float:
        """Mean square of popularities over the square of their mean."""
        places = (np.arange(128) + 0.5) / 128
        law = (1 + (SPREAD**-0.2 - 1) * places) ** -5
        return float(np.mean(law**2) / np.mean(law) ** 2)


@pytest.fixture
def tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")


@pytest.mark.usefixtures("tables")
class TestSteps:
    def step_s(self, tokens: int, *settings: str) -> float:
        return timed(*settings)[0].device_s(np.full(tokens, 1), np.full(tokens, 1500), tokens)

    @pytest.mark.parametrize(
        ("settings", "least", "most"),
        [
            ("gpt_oss_120b", 0.80, 0.90),
            ("qwen3_235b_a22b executor.weights=fp8 executor.tensor_parallel=4", 0.80, 0.95),
            (
                "gpt_oss_120b framework=trtllm executor.attention_data_parallel=2 executor.expert_parallel=2",
                0.75,
                0.95,
            ),
        ],
    )
    def test_take_less_by_the_experts_that_are_not_met(
        self, monkeypatch: pytest.MonkeyPatch, settings: str, least: float, most: float
    ) -> None:
        fewer = [self.step_s(tokens, *f"model={settings}".split()) for tokens in (1, 64, 1024)]
        monkeypatch.setattr(operations, "FEWEST", 1000)
        measured = [self.step_s(tokens, *f"model={settings}".split()) for tokens in (1, 64, 1024)]
        alone, many, all_met = (own / other for own, other in zip(fewer, measured, strict=True))
        assert alone == pytest.approx(1, abs=1e-6)
        assert least < many < most
        assert all_met == pytest.approx(1, abs=0.03)

    @pytest.mark.parametrize("model", ["mixtral_8x7b", "gpt_oss_20b", "minimax_m2 executor.tensor_parallel=4"])
    def test_of_few_experts_and_of_levelled_ones_are_as_measured(
        self, monkeypatch: pytest.MonkeyPatch, model: str
    ) -> None:
        settings = f"model={model}".split()
        before = self.step_s(32, *settings)
        monkeypatch.setattr(operations, "FEWEST", 1000)
        assert self.step_s(32, *settings) == before
