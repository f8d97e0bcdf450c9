"""Requests of a fleet, explained: whatever becomes of their replicas, their time is intervals that meet."""

from __future__ import annotations

import random

import pytest

from kvlab.fleet.routers import ROUTERS
from kvlab.lab.explain.changes import counterfactuals
from kvlab.lab.explain.lives import Cause
from kvlab.lab.explain.replayed import Explanation, observe, served_from
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.run.prompt_tokens import Reason
from tests.support.plans import composed

SIMULATED = (
    "executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", "figures=false", "model=llama3_1_8b",
    "model.max_seq_len=1024", "workload.num_requests=10", "workload.output_len={min: 4, max: 20}",
    "workload.prompt_len={min: 20, max: 200}",
)  # fmt: skip


def drawn(seed: int) -> list[str]:
    """The settings of a fleet that is split, whose replicas die, or that is of unequal ones."""
    chance = random.Random(seed)
    kind, shape = chance.choice(["open", "closed"]), ("split", "lives", "groups", "plain")[seed % 4]
    settings = [
        f"seed={seed}",
        f"workload={chance.choice(['shared_prefix', 'multi_turn', 'parallel_sampling'])}",
        "workload.concurrency=6" if kind == "closed" else "workload.arrival=poisson",
        "workload.rate=60" if kind == "open" else "workload.arrival=burst",
        f"framework.request_us={chance.choice([0, 900])}",
        f"framework.output_token_us={chance.choice([0, 20])}",
        f"scheduler.max_batch_size={chance.choice([2, 8])}",
        f"kv.num_blocks={chance.choice([70, 120])}",
        f"fleet.router={chance.choice(ROUTERS.names())}",
    ]
    if shape == "split":
        settings += ["fleet.replicas=4", f"fleet.prefill={chance.choice([1, 2])}", "fleet.link.setup_us=20000"]
        if seed >= 24:  # and they die
            settings[-2] = "fleet.prefill=2"
            settings += ["fleet.life=[0.05:die:0,0.07:return:0,0.1:die:3,0.12:die:1,0.15:return:3,0.15:die:2]"]
        if 8 <= seed < 32:
            settings += ["fleet.handshake=decode_first", f"fleet.link.send={chance.choice(['chunk', 'layer'])}"]
    elif shape == "lives":
        settings += ["fleet.replicas=3", "fleet.life=[0.1:die:1,0.2:drain:2,0.25:return:1,0.3:die:1,0.3:return:2]"]
    elif shape == "groups":
        settings += ["fleet.groups=[{count:2},{count:1,hardware:l4,scheduler.max_batch_size:2}]"]
    else:
        settings += [f"fleet.replicas={chance.choice([2, 5])}", "fleet.store=1GiB"]
        settings += ["fleet.neighbours=true"] * (seed >= 8)
    return settings


def explained(settings: list[str]) -> tuple[RunPlan, RunLog, Explanation]:
    plan = plan_run(composed(*SIMULATED, *settings))
    with served_from(plan) as (engine, _):
        log = drive(engine, plan.requests, concurrency=plan.config.workload.concurrency)
    return plan, log, observe(plan, log.steps)


@pytest.mark.parametrize("seed", [*range(8), 8, 11, 12, 15, 16, 20, 24, 28, 32, 36])
def test_intervals_meet_from_arrival_to_end(seed: int) -> None:
    plan, log, found = explained(drawn(seed))
    assert {record.key: record for record in log.records} == found.records  # to look changes nothing
    assert found.lives.keys() == found.records.keys()
    for key, record in found.records.items():
        life = found.lives[key]
        ends = [record.arrival_s, *(interval.end_s for interval in life.intervals)]
        assert [interval.start_s for interval in life.intervals] == ends[:-1]
        assert ends[-1] == pytest.approx(record.finished_s, abs=1e-9)
        assert sum(found.terms_of(key).values()) == pytest.approx(record.e2el_ms, abs=1e-6)
        assert record.replica in {hop.choice.replica for hop in found.hops[key[0]] if hop.stage != "prefill"}
        if not record.sample:
            assert sum(found.prompts[key].tokens.values()) == record.prompt_tokens
            assert found.prompts[key].tokens.get(Reason.FOUND, 0) == record.cached_tokens
            diverged = found.prompts[key].diverged_at
            assert diverged is None or diverged >= record.cached_tokens // plan.config.kv.block_size


def test_a_change_is_what_a_fleet_with_it_gives() -> None:
    settings = ["kv.num_blocks=70", "workload=shared_prefix", "scheduler.max_batch_size=2", "fleet.replicas=2"]
    settings += ["workload.arrival=burst", "fleet.router=random"]
    changes = {each.settings: each for each in counterfactuals(explained(settings)[2], [("r7", 0)])}
    for change in ("fleet.replicas=3", "fleet.router=precise", "scheduler.max_batch_size=4"):
        records = explained([*settings, change])[1].records
        assert changes[change].asked_ms == next(record.e2el_ms for record in records if record.key == ("r7", 0))


def test_a_change_of_groups_is_one_of_each() -> None:
    groups = "fleet.groups=[{count:1},{count:1,scheduler.max_batch_size:1}]"
    settings = ["kv.num_blocks=200", "workload=shared_prefix", "workload.arrival=burst", groups]
    (*_, found), key = explained(settings), ("r7", 0)
    assert found.records[key].replica == 1
    changes = {each.settings: each for each in counterfactuals(found, [key])}
    assert "fleet.router=least_requests" in changes
    assert "fleet.replicas=3" not in changes


def test_while_blocks_are_reserved_the_prompt_is_computed_elsewhere() -> None:
    _, log, found = explained([*drawn(0), "fleet.handshake=decode_first", "fleet.link.setup_us=0"])
    for record in log.records:
        terms, (first, *rest) = found.terms_of(record.key), found.hops[record.request_id]
        assert first.stage == "decode"
        assert (Cause.PROMPT in terms) == bool(rest)
    assert any(rest for _, *rest in found.hops.values())


def test_what_a_split_and_a_death_take_has_causes_of_its_own() -> None:
    split, lost = (explained(drawn(seed))[2] for seed in (0, 1))
    transfers = split.terms_ms()[Cause.TRANSFER]
    assert transfers >= 20 * sum(len(hops) > 1 for hops in split.hops.values())  # each at least its set-up
    for name, hops in lost.hops.items():
        life = lost.lives[name, 0]
        first = life.intervals[0]
        assert (first.cause is Cause.LOST) == (len(hops) > 1)
        assert len(hops) == 1 or first.end_s in [hop.at_s for hop in hops[1:]]
    assert any(len(hops) > 1 for hops in lost.hops.values())
