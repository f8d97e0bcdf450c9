"""What a router remembers of the prompts that it sent to each replica."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import takewhile

import pytest

from kvlab.config.fleet import FleetConfig
from kvlab.core import Request, SamplingParams
from kvlab.fleet.prefixes import RoutedPrompt, SentPrefixes
from kvlab.fleet.routers import ROUTERS
from tests.fleet.test_fleet import fleet_of, serve, traffic
from tests.support.model import prompt_for


def test_what_is_left_of_a_prompt_counts_for_llm_d_while_another_replica_has_its_beginning() -> None:
    router = ROUTERS.get("estimated")(FleetConfig(memory_blocks=3))
    views = [SentPrefixes.of(router) for _ in range(2)]
    first, second = (
        RoutedPrompt(Request(name, prompt_for(name, 32), SamplingParams(max_tokens=1)), name) for name in "ab"
    )
    views[0].sent(first)
    views[1].sent(first)
    views[0].sent(second)  # which forgets the first block of the other
    assert [view.cached_tokens(first, 0.0) for view in views] == [16, 32]
    views[1].restarted()
    assert views[0].cached_tokens(first, 0.0) == 0


@pytest.mark.parametrize(("router", "blocks"), [("cache_aware", [1, 2]), ("estimated", [0, 2])])
def test_what_is_forgotten_of_a_prompt_is_its_end_or_all_of_it(router: str, blocks: list[int]) -> None:
    view = SentPrefixes.of(ROUTERS.get(router)(FleetConfig(memory_blocks=3)))
    sent = [RoutedPrompt(Request(name, prompt_for(name, 32), SamplingParams(max_tokens=1)), name) for name in "ab"]
    for request in sent:
        view.sent(request)
    assert [view.cached_tokens(request, 0.0) // 16 for request in sent] == blocks


def test_what_was_sent_to_a_replica_that_died_is_forgotten() -> None:
    fleet = fleet_of(FleetConfig(replicas=2, router="estimated", life=["0.1:die:1", "0.12:return:1"]))
    requests = traffic(10, gap_s=0.01)
    served = {
        record.replica
        for record in serve(fleet, [*requests, replace(requests[0], request_id="late", arrival_s=0.11)]).records
    }
    assert served == {0, 1}
    assert [view.remembered > 0 for view in fleet.views] == [True, False]


def test_one_walk_over_a_prompt_counts_for_each_memory_what_a_look_at_all_of_them_would() -> None:
    draw, router = random.Random(0), ROUTERS.get("estimated")(FleetConfig(memory_blocks=6))
    views = [SentPrefixes.of(router) for _ in range(4)]
    for number in range(200):
        prompt = [prompt_for(f"{place} {draw.randrange(2)}", 16) for place in range(draw.randrange(1, 5))]
        request = RoutedPrompt(Request(f"r{number}", sum(prompt, ()), SamplingParams(max_tokens=1)), "")
        known = list(takewhile(lambda key: any(key in view._sent for view in views), request.keys(16)))
        expected = [16 * sum(key in view._sent for key in known) for view in views]
        assert [view.cached_tokens(request, 0.0) for view in views] == expected
        view = draw.choice(views)
        if draw.random() < 0.1:
            view.restarted()
        else:
            view.sent(request)
