"""Orders, victims, policies and proposers of a plugin that answer nothing of use: an error names them, and no run
goes on for ever.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest

from kvlab.config import PreemptionConfig, SchedulerConfig, SpeculationConfig
from kvlab.core import Request, SamplingParams
from kvlab.engine import service
from kvlab.engine.clock import Clock, WallClock
from kvlab.engine.scheduler import POLICIES, Scheduler, build_scheduler
from kvlab.engine.scheduler.orders import ORDERS, Order, Stage
from kvlab.engine.scheduler.victims import VICTIMS
from kvlab.engine.speculation import PROPOSERS, Proposer
from kvlab.errors import ConfigError, EngineStoppedError
from kvlab.lab.run import drive as drive_module
from kvlab.lab.run.drive import drive
from tests.support.table import TableExecutor, table_engine, table_pool


def serve(*, blocks: int = 40, clock: Clock | None = None, vocab_size: int = 10**6, **scheduler: Any) -> None:
    requests = [Request(f"r{n}", tuple(range(n, n + 8)), SamplingParams(max_tokens=30)) for n in range(4)]
    engine = table_engine(table_pool(blocks), TableExecutor(), admission_reserve=0.0, **scheduler)
    engine.clock, engine.scheduler.speculation.vocab_size = clock or engine.clock, vocab_size
    drive(engine, requests)


@pytest.fixture
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scheduler.order=mine`, a class with what the test is given."""
    monkeypatch.setitem(ORDERS._entries, "mine", type("Mine", (Order,), request.param))


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"rank": lambda self, sequence: float("nan")}, "request r0 has rank nan, no number"),
        ({"rank": lambda self, sequence: None}, "request r0 has rank None, no number"),
        ({"rank": lambda self, sequence: (1, "a")}, "request r0 has rank (1, 'a'), no number"),
        ({"choose": lambda self, waiting, state: "r0"}, "mine: chose r0, which does not wait"),
        (
            {
                "rank": lambda self, sequence: len(self.__dict__.setdefault("known", [sequence])),
                "choose": lambda self, waiting, state: self.known[0],
            },
            "mine: chose request r0, which does not wait",
        ),
        (
            {"decoding": lambda self, sequences, budget: None},
            "mine: decoding returned None; must be a list of those",
        ),
        (
            {"decoding": lambda self, sequences, budget: [sequences[0], sequences[0]] if sequences else []},
            "mine: decoding returned ['request r0', 'request r0']; must be a list of those given",
        ),
        ({"choose": lambda self, waiting, state: [*waiting]}, "mine: chose ['request r0', "),
        (
            {"decoding": lambda self, sequences, budget: [[each] for each in sequences]},
            "mine: decoding returned [\"['request r0']\"",
        ),
        (
            {"choose": lambda self, waiting, state: waiting.remove(waiting.head)},
            "mine: choose left 3 of 4 waiting; it may only read the queue that it is given",
        ),
    ],
    indirect=["order"],
)
def test_what_an_order_returns_is_checked(order: None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(order="mine")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("order", "stages"),
    [
        ({"stages": (Stage.DECODE, Stage.PREFILL)}, r"Stage\.DECODE.*must have each of"),
        ({"stages": ("decode", "prefill", "admit")}, "decode.*must have each of"),
        ({"stages": None}, "None; must have each of"),
    ],
    indirect=["order"],
)
def test_an_order_has_every_stage(order: None, stages: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.order=mine: has stages .*{stages}"):
        build_scheduler(SchedulerConfig(order="mine"))


@pytest.mark.parametrize(
    "order",
    [{"choose": lambda self, waiting, state: None}, {"decoding": lambda self, sequences, budget: []}],
    indirect=True,
)
def test_an_order_that_lets_nobody_go_on_ends_the_run(order: None) -> None:
    with pytest.raises(
        EngineStoppedError, match="steps do nothing any more, and 4 requests have not ended, the first"
    ):
        serve(order="mine")


@pytest.mark.parametrize("order", [{"choose": lambda self, waiting, state: None}], indirect=True)
def test_it_ends_a_run_on_this_machines_clock_too(order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive_module, "_MOST_IDLE_S", 0.05)
    with pytest.raises(EngineStoppedError, match="steps do nothing any more, and 4 requests have not ended"):
        serve(order="mine", clock=WallClock())


@pytest.mark.parametrize("order", [{"choose": lambda self, waiting, state: None}], indirect=True)
def test_a_server_logs_that_its_steps_do_nothing(
    order: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "_MOST_IDLE_S", 0.02)
    core = table_engine(table_pool(40), TableExecutor(), order="mine")
    core.clock = WallClock()
    engine = service.Engine(core)
    engine.call(Request("r0", (1, 2, 3), SamplingParams(max_tokens=2)), lambda output: None).start()
    for _ in range(500):
        if caplog.records:
            break
        time.sleep(0.01)
    engine.close()
    assert "steps have done nothing for 0.02 s, and 1 requests wait and 0 run; an order" in caplog.text
    assert len(caplog.records) == 1


def test_a_batch_that_waits_for_others_is_no_standstill(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever `max_wait_ms` is: the policy says when it goes on."""
    monkeypatch.setattr(drive_module, "_MOST_IDLE_S", 0.0)
    monkeypatch.setattr(drive_module, "_MOST_IDLE", 3)
    monkeypatch.setattr(drive_module, "_MAX_SLEEP_S", 0.001)
    serve(policy="static", max_wait_ms=50, max_batch_size=8, clock=WallClock())
    monkeypatch.setattr(service, "_MOST_IDLE_S", 0.02)
    core = table_engine(table_pool(40), TableExecutor(), policy="static", max_wait_ms=100, max_batch_size=8)
    core.clock = WallClock()
    engine, ended = service.Engine(core), threading.Event()
    engine.call(Request("r0", (1, 2, 3), SamplingParams(max_tokens=1)), lambda output: ended.set()).start()
    assert ended.wait(5)
    engine.close()
    assert not caplog.records


@pytest.mark.parametrize("wakeup", [0.0, math.nan, math.inf])
def test_a_policy_that_never_admits_ends_the_run_whenever_it_wakes(
    wakeup: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Mine", (Scheduler,), {"may_admit": lambda *_: False, "next_wakeup": lambda _: wakeup})
    monkeypatch.setitem(POLICIES._entries, "mine", kind)
    with pytest.raises(EngineStoppedError, match="steps do nothing any more, and 4 requests have not ended"):
        serve(policy="mine")


@pytest.mark.parametrize(
    ("method", "returns"), [("plan_prefill", "list[Chunk]"), ("headroom", "int"), ("retire", "list[Sequence]")]
)
def test_a_policy_that_returns_none_in_place_of_something_is_named(
    method: str, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Mine", (Scheduler,), {method: lambda *_, **others: None, "next_wakeup": lambda self: None})
    monkeypatch.setitem(POLICIES._entries, "mine", kind)
    with pytest.raises(ConfigError) as caught:
        serve(policy="mine")
    assert str(caught.value) == f"scheduler.policy=mine: Mine.{method} returned None; must be {returns}"


@pytest.mark.parametrize("order", [{"choose": lambda self, waiting, state: "r0"}], indirect=True)
def test_what_an_order_chooses_is_checked_where_chunks_are_whole_blocks_too(order: None) -> None:
    with pytest.raises(ConfigError, match="mine: chose r0, which does not wait"):
        serve(order="mine", chunk_unit=4)


@pytest.mark.parametrize(
    ("propose", "said"),
    [
        (lambda self, tokens, count: None, "returned None; must be a list of token ids"),
        (lambda self, tokens, count: [1.5], "returned [1.5]; must be a list of token ids"),
        (lambda self, tokens, count: [-1], "returned the token -1, which the vocabulary of 100 does not have"),
        (lambda self, tokens, count: [100], "returned the token 100, which"),
        (lambda self, tokens, count: tokens.append(1) or [1], "changed the tokens of the sequence, which it may"),
    ],
)
def test_what_a_proposer_returns_is_checked(propose: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS._entries, "mine", type("Mine", (Proposer,), {"propose": propose}))
    with pytest.raises(ConfigError) as caught:
        serve(speculation=SpeculationConfig("mine"), vocab_size=100)
    assert str(caught.value).startswith(f"scheduler.speculation.method=mine: Mine.propose {said}")


@pytest.mark.parametrize(
    "order", [{"decoding": lambda self, sequences, budget: tuple(sequences[:budget])}], indirect=True
)
def test_an_order_may_return_a_tuple(order: None) -> None:
    serve(order="mine")


@pytest.mark.parametrize("returned", [None, 3])
def test_what_a_victim_returns_is_checked(returned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VICTIMS._entries, "mine", lambda running: returned)
    with pytest.raises(ConfigError, match=rf"victim=mine: returned {returned}; must be one that runs"):
        serve(blocks=12, preemption=PreemptionConfig(victim="mine"))


def test_a_victim_may_change_the_list_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VICTIMS._entries, "mine", lambda running: running.pop())
    serve(blocks=12, preemption=PreemptionConfig(victim="mine"))
