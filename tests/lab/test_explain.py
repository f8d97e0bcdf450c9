"""Terms sum to latencies, tokens to prompts, whatever a run has; a change is what a run of it gives."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.core.step_log import StepLog
from kvlab.engine.clock import LogicalClock
from kvlab.errors import ConfigError
from kvlab.lab.calibrate import RealRun
from kvlab.lab.explain.changes import counterfactuals
from kvlab.lab.explain.fitted import resimulate
from kvlab.lab.explain.life_observer import DecodeTimes, LifeObserver
from kvlab.lab.explain.lives import Cause
from kvlab.lab.explain.recorded import RecordedExplanation, explain_trace
from kvlab.lab.explain.replayed import Explanation, observe, served_from
from kvlab.lab.explain.text import show_terms
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run
from kvlab.lab.run.prompt_tokens import PromptObserver, Reason
from kvlab.lab.terminal import Terminal
from kvlab.simulation.calibration import Subject
from kvlab.workloads.trace_format import Header, TracedRequest, write_trace
from tests.support.plans import composed
from tests.support.table import TableExecutor, table_engine, table_pool

SIMULATED = ("executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", "figures=false")


@pytest.fixture(autouse=True)
def _tables_of_contents_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every run, and at any of its calls."""
    monkeypatch.setattr("kvlab.lab.run.content_numbers._PLACES", 2)


def plan_of(*overrides: str) -> RunPlan:
    return plan_run(composed(*SIMULATED, *overrides))


def served(plan: RunPlan) -> RunLog:
    with served_from(plan) as (engine, _):
        return drive(engine, plan.requests, concurrency=plan.config.workload.concurrency)


def explained(plan: RunPlan, *detail: str) -> tuple[RunLog, Explanation]:
    log = served(plan)
    return log, observe(plan, log.steps, detail)


def watched(plan: RunPlan) -> Counter[Reason]:
    """What became of prompts' tokens, counted while steps are taken at once."""
    with served_from(plan) as (engine, (core,)):
        core.observer = prompts = PromptObserver(core, has_salts=False)
        drive(
            engine,
            plan.requests,
            concurrency=plan.config.workload.concurrency,
            on_step=lambda log, record: prompts.catch_up(record.start_s) if record else None,
        )
    return prompts.counts()


def drawn(seed: int) -> list[str]:
    """The settings of a run: small pools that preempt, batches that are full, prefixes that are evicted."""
    chance = random.Random(seed)
    workload = chance.choice(["shared_prefix", "multi_turn", "mixed32", "heavy_tail", "parallel_sampling"])
    model, blocks = chance.choice(["llama3_1_8b", "gemma3_1b"]), chance.choice([66, 100, 240])
    is_static, shares = chance.random() < 0.2, chance.random() < 0.8
    settings = [
        f"seed={seed}",
        f"model={model}",
        "model.max_seq_len=1024",
        f"kv.num_blocks={blocks}",
        f"workload={workload}",
        "workload.num_requests=12",
        "workload.output_len={min: 4, max: 60}",
        f"scheduler.max_batch_size={chance.choice([3, 8, 24])}",
        f"scheduler.max_batched_tokens={chance.choice([128, 512, 2048])}",
        f"scheduler={'static' if is_static else 'continuous'}",
        *([] if is_static else [f"scheduler.admission_reserve={chance.choice([0, 0.2])}", "scheduler.watermark=0"]),
        f"scheduler.mixed={chance.choice(['true', 'false'])}",
        f"framework.request_us={chance.choice([0, 300])}",
        f"framework.output_token_us={chance.choice([0, 20])}",
    ]
    settings.append(f"kv.prefix_sharing={str(shares).lower()}")
    if workload in ("multi_turn", "mixed32", "heavy_tail"):
        settings.append(f"workload.rate={chance.choice([4, 80])}")
    if not is_static:
        order = chance.choice(["fcfs", "prefill_first", "shortest_first", "decode_round_robin"])
        settings.append(f"scheduler.order={order}")
    if shares and chance.random() < 0.6:
        can_swap = model == "llama3_1_8b" and not is_static
        mode = chance.choice(["recompute", "swap", "auto"]) if can_swap else "recompute"
        settings += ["kv.offload=64MiB", f"scheduler.preemption.mode={mode}"]
    return settings


@pytest.mark.parametrize("seed", range(12))
def test_terms_sum_to_latencies_and_tokens_to_prompts(seed: int) -> None:
    plan = plan_of(*drawn(seed))
    log, found = explained(plan)
    assert watched(plan) == found.prompt_tokens()
    assert {record.key: record.finished_s for record in log.records} == {
        key: record.finished_s for key, record in found.records.items()
    }  # to look changes nothing
    for key, record in found.records.items():
        life = found.lives[key]
        ends = [record.arrival_s, *(interval.end_s for interval in life.intervals)]
        assert [interval.start_s for interval in life.intervals] == ends[:-1]
        assert ends[-1] == pytest.approx(record.finished_s, abs=1e-9)
        assert sum(life.terms_ms().values()) == pytest.approx(record.e2el_ms, abs=1e-6)
        if record.first_token_s is not None:
            to_first = sum(life.terms_ms(record.first_token_s).values())
            assert to_first == pytest.approx(record.ttft_ms, abs=1e-6)
        if not record.sample:
            prompt = found.prompts[key]
            assert sum(prompt.tokens.values()) == record.prompt_tokens
            assert prompt.tokens.get(Reason.FOUND, 0) == record.cached_tokens
        again = {Cause.RETURN, Cause.AGAIN} & life.terms_ms().keys()
        assert not again or record.preemptions or record.sample


@pytest.mark.parametrize("seed", range(6))
def test_a_trace_of_the_simulation_itself_has_nothing_that_it_does_not_explain(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), tmp_path / "trace.jsonl"
    rows = [
        TracedRequest(chance.randint(20, 300), number / 9, chance.randint(1, 40), session="a")
        for number in range(20)
    ]
    for row in rows:
        shared = chance.randint(0, 5)
        row.hashes = [
            *range(shared),
            *(chance.getrandbits(60) for _ in range(-(-row.prompt_tokens // 16) - shared)),
        ]
        row.hashes = row.hashes[: -(-row.prompt_tokens // 16)]
        row.ttft_ms = row.e2el_ms = 1.0  # not known yet
    settings = ["model=llama3_1_8b", "workload=recorded", f"workload.path={path}", "kv.num_blocks=60"]
    settings += ["model.max_seq_len=512", "framework.request_us=300", "framework.output_token_us=20"]

    def compared() -> RecordedExplanation:
        write_trace(path, Header(), rows)
        return explain_trace(composed(*SIMULATED, *settings))

    for (name, _), record in compared().records.items():
        row = rows[int(name[1:])]
        row.ttft_ms, row.e2el_ms = record.ttft_ms, record.e2el_ms
    rows[3].e2el_ms, rows[4].e2el_ms, rows[5].finish_reason = (rows[3].e2el_ms or 0) + 7, 0.5, "abort"
    found = compared()
    assert ("r5", 0) not in found.lives
    for key in found.lives:
        row, terms = rows[int(key[0][1:])], found.terms_of(key)
        assert sum(terms.values()) == pytest.approx(row.e2el_ms, abs=1e-9)
        first = found.terms_of(key, found.records[key].first_token_s)
        assert sum(first.values()) == pytest.approx(row.ttft_ms, abs=1e-9)
        assert first[Cause.UNEXPLAINED] == pytest.approx(0, abs=1e-6)
        if key[0] not in ("r3", "r4"):
            assert terms[Cause.UNEXPLAINED] == pytest.approx(0, abs=1e-6)
    assert found.terms_of(("r3", 0))[Cause.UNEXPLAINED] == pytest.approx(7, abs=1e-6)
    assert found.terms_of(("r4", 0))[Cause.UNEXPLAINED] < 0
    assert found.intervals_of(("r3", 0))[-1].cause is Cause.UNEXPLAINED
    assert found.intervals_of(("r4", 0))[-1].cause is not Cause.UNEXPLAINED


def test_the_causes_are_those_of_the_run() -> None:
    burst = ("model=llama3_1_8b", "workload=burst48", "workload.num_requests=12", "kv.num_blocks=4000")
    _, small = explained(plan_of(*burst, "scheduler.max_batch_size=2"))
    assert Cause.SEQUENCES in small.terms_ms()
    assert Cause.BLOCKS not in small.terms_ms()
    _, narrow = explained(plan_of(*burst, "scheduler.max_batched_tokens=256", "scheduler.max_batch_size=12"))
    assert Cause.TOKENS in narrow.terms_ms()
    _, tight = explained(plan_of(*burst, "kv.num_blocks=60", "model.max_seq_len=900"), "r9")
    terms = tight.lives["r9", 0].terms_ms()
    assert next(iter(terms)) is Cause.BLOCKS
    assert 0 < tight.lives["r9", 0].holders.total() <= 60 * terms[Cause.BLOCKS] / 1000 + 1e-9


def test_a_step_that_was_decided_before_a_request_came_was_under_way() -> None:
    _, explanation = explained(plan_of("model=llama3_1_8b", "workload.arrival=poisson", "workload.rate=20"))
    terms = explanation.terms_ms()
    assert Cause.POLICY not in terms
    assert terms[Cause.STEP] > 0


def test_of_a_prompt_that_was_cached_it_is_said_what_evicted_it() -> None:
    two = ("model=llama3_1_8b", "model.max_seq_len=1024", "workload=shared_prefix", "workload.num_requests=30")
    _, roomy = explained(plan_of(*two, "kv.num_blocks=2000", "workload.concurrency=1"))
    assert Reason.EVICTED not in roomy.prompt_tokens()
    assert Reason.DIVERGED in roomy.prompt_tokens()
    turns = ("model=llama3_1_8b", "model.max_seq_len=2048", "workload=multi_turn", "kv.num_blocks=128")
    _, tight = explained(plan_of(*turns))
    evicted = [prompt for prompt in tight.prompts.values() if Reason.EVICTED in prompt.tokens]
    assert evicted
    for prompt in evicted:
        assert prompt.eviction is not None
        assert prompt.eviction.at_s <= prompt.at_s


def test_what_another_tenant_cached_is_not_found() -> None:
    plan = plan_of("model=llama3_1_8b", "model.max_seq_len=1024", "workload=mixed32", "workload.num_requests=1")
    (request,) = plan.requests
    twice = [replace(request, request_id=f"r{at}", salt=salt, arrival_s=at) for at, salt in enumerate([1, 2, 2])]
    _, found = explained(replace(plan, requests=twice))
    whole = len(request.prompt_token_ids) // 16 * 16
    assert [found.prompts[f"r{at}", 0].tokens.get(Reason.OTHER_SALT, 0) for at in range(3)] == [0, whole, 0]
    assert found.prompts["r2", 0].tokens[Reason.FOUND]


def test_a_change_is_what_a_run_with_its_settings_gives() -> None:
    settings = ["model=llama3_1_8b", "model.max_seq_len=1024", "workload=heavy_tail", "workload.num_requests=30"]
    _, found = explained(plan_of(*settings, "kv.num_blocks=120", "scheduler.max_batch_size=6"))
    (slowest,) = found.slowest(1)
    changes = counterfactuals(found, [slowest])
    assert changes[0].asked_ms == found.records[slowest].e2el_ms
    named = [change for change in changes if change.settings]
    assert len(named) >= 3
    for change in named:
        kept = [
            text
            for text in ("kv.num_blocks=120", "scheduler.max_batch_size=6")
            if text[:12] != change.settings[:12]
        ]
        records = served(plan_of(*settings, *kept, change.settings)).records
        assert change.asked_ms == next(record.e2el_ms for record in records if record.key == slowest)


class TestRunsThatComputedTheirSteps:
    """Such a run is stood in for by one whose steps take what the roofline says."""

    SETTINGS = ("model=llama3_1_8b", "model.max_seq_len=1024", "workload=heavy_tail", "workload.num_requests=40")
    SMALL = ("kv.num_blocks=150", "scheduler.max_batch_size=6", "framework.sequence_us=900")

    @pytest.fixture(scope="class")
    @classmethod
    def a_run(cls) -> tuple[Explanation, RealRun]:
        plan = plan_of(*cls.SETTINGS, *cls.SMALL)
        log, found = explained(plan)
        subject = Subject("llama3_1_8b", plan.model.num_parameters, "bfloat16", 2.0, plan.pool.bytes_per_token)
        return found, RealRun("here", subject, plan.model, "a machine", 1, "", list(log.steps))

    def test_a_change_is_what_a_run_with_its_settings_gives(self, a_run: tuple[Explanation, RealRun]) -> None:
        found, run = a_run
        keys = found.slowest(1)
        again = resimulate(found, run, keys)
        assert again.agrees
        assert re.search(r"takes [\d,.]+ ms for all where it took [\d,.]+ \([+-]\d\.\d %\)", again.error)
        base, *changes = counterfactuals(again.explanation, keys)
        assert base.asked_ms == pytest.approx(found.latency_ms(keys[0]), rel=0.1)
        (blocks,) = (each for each in changes if each.settings == "kv.num_blocks=300")
        records = served(plan_of(*self.SETTINGS, *self.SMALL, "kv.num_blocks=300")).records
        (record,) = (each for each in records if each.key == keys[0])
        assert blocks.asked_ms == pytest.approx(record.e2el_ms, rel=0.1)
        assert blocks.asked_ms < base.asked_ms

    def test_a_simulation_that_is_far_off_is_not_believed(self, a_run: tuple[Explanation, RealRun]) -> None:
        found, run = a_run
        late = {
            key: replace(record, finished_s=record.finished_s + 0.5 * (record.finished_s - record.arrival_s))
            for key, record in found.records.items()
        }
        again = resimulate(replace(found, records=late), run, found.slowest(1))
        assert not again.agrees
        assert "(-3" in again.error

    def test_outputs_are_as_long_as_they_were(self, a_run: tuple[Explanation, RealRun]) -> None:
        found, run = a_run
        cut = {
            key: replace(each, output_token_ids=each.output_token_ids[:1]) for key, each in found.records.items()
        }
        again = resimulate(replace(found, records=cut), run, found.slowest(1))
        assert {len(each.output_token_ids) for each in again.explanation.records.values()} == {1}

    def test_one_that_guesses_tokens_ahead_is_refused(self, a_run: tuple[Explanation, RealRun]) -> None:
        found, run = a_run
        config = found.plan.config
        speculation = replace(config.scheduler.speculation, method="ngram")
        config = replace(config, scheduler=replace(config.scheduler, speculation=speculation))
        with pytest.raises(ConfigError, match="guesses tokens ahead"):
            resimulate(replace(found, plan=replace(found.plan, config=config)), run, found.slowest(1))


def test_rows_sum_to_the_whole_although_short_terms_have_none() -> None:
    console = Terminal(file=(shown := io.StringIO()), width=200)
    show_terms({Cause.DECODE: 997.0, Cause.FRONT_END: 2.0, Cause.BETWEEN: 1.0}, console, "r1")
    rows = re.findall(r"(\S+) +│ +([\d.,]+) │", shown.getvalue())
    assert rows == [("decoding", "997.0"), ("others", "3.0"), ("together", "1,000.0")]


def test_without_a_step_that_only_decodes_a_step_is_shared_by_tokens() -> None:
    assert DecodeTimes(StepLog()).of(3) is None


def test_a_second_replica_leaves_half_of_the_requests_and_those_asked_about() -> None:
    plan = plan_of("model=llama3_1_8b", "workload=burst48", "workload.num_requests=11")
    _, found = explained(plan)
    (change,) = [
        each for each in counterfactuals(found, [("r3", 0)]) if not each.settings and each.what != "as it was"
    ]
    kept = [request for number, request in enumerate(plan.requests) if number % 2 == 0 or number == 3]
    records = served(replace(plan, requests=kept)).records
    assert change.asked_ms == next(record.e2el_ms for record in records if record.request_id == "r3")


def test_one_that_decodes_in_vain_hides_no_preemption() -> None:
    """`a` has ended, and decodes once more in the step for which `b` finds no block: as many decode as before."""
    executor, clock = TableExecutor(1.0), LogicalClock()
    core = table_engine(table_pool(5), executor, clock, ahead=True, admission_reserve=0, order="priority")
    core.observer = observer = LifeObserver(core, DecodeTimes(StepLog()))
    records: list[RequestRecord] = []
    for name, output in (("a", 5), ("b", 8)):
        prompt = tuple(range(100 * ord(name), 100 * ord(name) + 4))
        core.submit(Request(name, prompt, SamplingParams(8), output_tokens=output), on_finish=records.append)
    while core.has_work():
        core.step()
    (record,) = (each for each in records if each.request_id == "b")
    (preempted_s,), (resumed_s,) = record.preempted_s, record.resumed_s
    life = observer.ended(("b", 0), record.finished_s)
    assert life is not None
    causes = {each.cause for each in life.intervals if each.start_s < resumed_s and each.end_s > preempted_s}
    assert Cause.RETURN in causes
    assert Cause.DECODE not in causes
