"""kvlab.Engine: loops and coroutines over the engine."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvlab.core import FinishReason, Request, RequestRecord, StepOutput
from kvlab.engine.clock import LogicalClock
from kvlab.engine.service import Engine
from kvlab.errors import EngineStoppedError, RequestRefusedError
from tests.engine.service_loop import ASKED, HeldExecutor, SlowExecutor, idle, library, tokens, wait_until
from tests.support.engines import make_engine, request
from tests.support.executors import FailingExecutor
from tests.support.model import expected_tokens
from tests.support.pools import slotted_pool


class TestLoop:
    def test_gives_each_request_its_tokens(self) -> None:
        engine = library()
        outputs = list(engine.generate(ASKED))
        for asked in ASKED:
            assert tokens(outputs, asked.request_id) == expected_tokens(asked)
        assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH] * 3
        idle(engine)

    def test_gives_tokens_as_they_come(self) -> None:
        engine = library()
        steps = []
        for _ in engine.generate(request("a", 5, 6)):
            steps.append(engine.core._steps)
        assert steps == [1, 2, 3, 4, 5, 6]

    def test_one_request_or_several_samples(self) -> None:
        engine = library()
        outputs = list(engine.generate(request("a", 5, 6, n=3)))
        assert sorted(output.index for output in outputs) == [0] * 6 + [1] * 6 + [2] * 6
        assert list(engine.generate([])) == []

    def test_leaving_it_early_aborts_what_is_not_done(self) -> None:
        engine = library()
        for output in engine.generate(ASKED):
            if output.request_id == "c" and output.finish_reason:
                break
        idle(engine)

    def test_a_refused_request_takes_only_its_own_call_back(self) -> None:
        engine = library()
        other = request("other", 4, 5)
        ended: list[RequestRecord] = []
        engine.submit(other, on_finish=ended.append)
        with pytest.raises(RequestRefusedError, match="request 'wrong': temperature=-1"):
            list(engine.generate([ASKED[0], request("wrong", 3, 3, temperature=-1)]))
        while engine.has_work():
            engine.step()
        assert [list(record.output_token_ids) for record in ended] == [expected_tokens(other)]
        idle(engine)

    def test_a_name_in_use_keeps_its_entry(self) -> None:
        engine = library()
        ended: list[RequestRecord] = []
        engine.submit(request("a", 4, 5), on_finish=ended.append)
        with pytest.raises(RequestRefusedError, match="in the engine already"):
            next(engine.generate(ASKED))
        list(engine.generate(request("b", 3, 9)))
        assert [record.finish_reason for record in ended] == [FinishReason.LENGTH]

    def test_a_request_that_fails_says_why(self) -> None:
        engine = library(executor=FailingExecutor("b"))
        outputs = list(engine.generate([ASKED[1]]))
        assert [(o.finish_reason, o.error) for o in outputs] == [
            (FinishReason.FAILED, "ArithmeticError: the device fell over")
        ]
        idle(engine)

    def test_requests_wait_for_a_static_batch(self) -> None:
        engine = library(policy="static", max_wait_ms=20, max_batch_size=8)
        start = time.perf_counter()
        outputs = list(engine.generate(ASKED[:1]))
        assert time.perf_counter() - start >= 0.02
        assert tokens(outputs, "a") == expected_tokens(ASKED[0])

    def test_a_reader_may_abort_and_submit(self) -> None:
        engine, late = library(), request("late", 4, 3)
        ended: dict[str, RequestRecord] = {}

        def keep(record: RequestRecord) -> None:
            ended[record.request_id] = record

        def read(output: StepOutput) -> None:
            if output.finish_reason is None:
                assert engine.abort("a")
                engine.submit(late, on_finish=keep)

        engine.submit(ASKED[0], read, keep)
        while engine.has_work():
            engine.step()
        assert ended["a"].finish_reason is FinishReason.ABORTED
        assert list(ended["late"].output_token_ids) == expected_tokens(late)


class TestStreams:
    async def read(
        self, engine: Engine, asked: Request, *, after_each: asyncio.Event | None = None
    ) -> list[StepOutput]:
        outputs = []
        async for output in engine.stream(asked):
            outputs.append(output)
            if after_each is not None:
                await after_each.wait()
        return outputs

    def test_each_gets_its_tokens(self) -> None:
        engine = library()

        async def main() -> list[list[StepOutput]]:
            return await asyncio.gather(*(self.read(engine, asked) for asked in ASKED))

        for _ in range(2):  # the second time with a new thread
            for asked, outputs in zip(ASKED, asyncio.run(main()), strict=True):
                assert [output.token_id for output in outputs] == expected_tokens(asked)
                assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]
            idle(engine)

    def test_they_share_steps(self) -> None:
        executor = HeldExecutor("r0", passes=0)
        engine = library(executor=executor)

        async def main() -> None:
            readers = [asyncio.create_task(self.read(engine, request(f"r{n}", 4, 12))) for n in range(6)]
            await asyncio.sleep(0)  # each has asked
            executor.release.set()
            await asyncio.gather(*readers)

        asyncio.run(main())
        assert max(len(step) for step in executor.steps) == 6

    def test_a_loop_beside_one_lets_no_time_pass(self) -> None:
        executor, clock = HeldExecutor("b", passes=1), LogicalClock()
        engine = Engine(make_engine(clock=clock, executor=executor))
        engine.call(request("a", 5, 80), lambda output: None).start().result()
        loop = engine.generate(request("b", 4, 6))
        outputs = [next(loop)]
        threading.Timer(0.05, executor.release.set).start()  # until then it looks for the next output
        outputs += loop
        assert tokens(outputs, "b") == expected_tokens(request("b", 4, 6))
        idle(engine)
        assert clock.now() == 0

    def test_closing_one_aborts_its_request_alone(self) -> None:
        executor = HeldExecutor("long", passes=1)
        engine = library(executor=executor)

        async def main() -> list[StepOutput]:
            other = asyncio.create_task(self.read(engine, ASKED[1]))
            stream = engine.stream(request("long", 5, 80))
            await anext(stream)
            await stream.aclose()
            executor.release.set()
            return await other

        assert tokens(asyncio.run(main()), "b") == expected_tokens(ASKED[1])
        idle(engine)
        assert executor.passes_with_held() <= 2  # one may have begun before it was closed

    @pytest.mark.parametrize("after_s", [0.0, 0.02])
    def test_cancelling_a_waiting_task_aborts(self, after_s: float) -> None:
        engine = library(executor=SlowExecutor())

        async def main() -> None:
            task = asyncio.create_task(self.read(engine, request("long", 5, 80)))
            await asyncio.sleep(after_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        idle(engine)

    def test_a_loop_that_ends_leaves_nothing_behind(self) -> None:
        engine = library(executor=SlowExecutor())

        async def main() -> None:
            await anext(engine.stream(request("long", 5, 80)))

        asyncio.run(main())
        idle(engine)

    def test_a_refused_one_raises_and_the_others_go_on(self) -> None:
        engine = library()

        async def main() -> list[object]:
            wrong = request("wrong", 3, 3, top_p=2.0)
            readers = [self.read(engine, each) for each in (ASKED[0], wrong, ASKED[1])]
            return await asyncio.gather(*readers, return_exceptions=True)

        first, refused, second = asyncio.run(main())
        assert isinstance(refused, RequestRefusedError)
        assert tokens(first, "a") == expected_tokens(ASKED[0])  # type: ignore[arg-type]
        assert tokens(second, "b") == expected_tokens(ASKED[1])  # type: ignore[arg-type]
        idle(engine)

    def test_a_slow_reader_delays_no_other(self) -> None:
        engine = library()

        async def main() -> list[StepOutput]:
            quick_done = asyncio.Event()
            slow = asyncio.create_task(self.read(engine, ASKED[0], after_each=quick_done))
            assert len(await self.read(engine, ASKED[1])) == 14
            quick_done.set()
            return await slow

        assert tokens(asyncio.run(main()), "a") == expected_tokens(ASKED[0])
        idle(engine)

    def test_a_request_arrives_when_it_is_made_whatever_step_runs(self) -> None:
        engine, records = library(), list[RequestRecord]()
        call = engine.call(ASKED[2], lambda output: None, records.append)
        made = engine.clock.now()
        call.start().result()
        wait_until(lambda: bool(records))
        assert records[0].arrival_s <= made
        idle(engine)

    def test_loops_in_several_threads_and_a_generate_among_them(self) -> None:
        engine = library(executor=SlowExecutor())
        with ThreadPoolExecutor() as threads:
            streams = [threads.submit(asyncio.run, self.read(engine, asked)) for asked in ASKED]
            mine = list(engine.generate(request("mine", 6, 10)))
            outputs = [stream.result(timeout=60) for stream in streams]
        assert tokens(mine, "mine") == expected_tokens(request("mine", 6, 10))
        for asked, received in zip(ASKED, outputs, strict=True):
            assert tokens(received, asked.request_id) == expected_tokens(asked)
        idle(engine)

    def test_many_that_come_and_go_lose_nothing(self) -> None:
        engine = library(pool=slotted_pool(3))

        async def one(number: int) -> bool:
            asked = request(f"r{number}", 1 + number % 7, 1 + number % 5)
            await asyncio.sleep(0.001 * (number % 13))
            outputs = await self.read(engine, asked)
            return tokens(outputs, asked.request_id) == expected_tokens(asked)

        async def main() -> list[bool]:
            return await asyncio.gather(*map(one, range(60)))

        assert all(asyncio.run(main()))
        idle(engine)

    def test_what_others_ask_without_end_does_not_keep_it_from_stepping(self) -> None:
        engine, looks = library(), 0
        ended = threading.Event()

        def look(_core: object) -> None:
            nonlocal looks
            looks += 1
            time.sleep(0.001)

        def ask() -> None:
            while not ended.is_set() and looks < 5000:
                engine.inspect(look).result()

        with ThreadPoolExecutor() as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            wait_until(lambda: looks > 20)
            before = looks
            outputs = asyncio.run(self.read(engine, request("a", 3, 60)))
            during = looks - before
            ended.set()
            for each in asking:
                each.result(timeout=60)
        assert tokens(outputs, "a") == expected_tokens(request("a", 3, 60))
        assert during < 4 * 80  # one of each thread before a step
        idle(engine)


class TestCollapse:
    """A step of the engine itself that raises."""

    def broken(self) -> Engine:
        engine = library(executor=SlowExecutor())
        step, steps = engine.core.step, []

        def fails() -> object:
            steps.append(1)
            if len(steps) == 3:
                raise ZeroDivisionError("counters do not add up")
            return step()

        engine.core.step = fails  # type: ignore[method-assign,assignment]
        return engine

    def test_reaches_every_stream(self) -> None:
        engine = self.broken()

        async def main() -> list[object]:
            readers = [TestStreams().read(engine, asked) for asked in ASKED]
            return await asyncio.gather(*readers, return_exceptions=True)

        errors = asyncio.run(main())
        assert [str(error) for error in errors] == [
            "the engine stopped: a step raised ZeroDivisionError: counters do not add up"
        ] * 3
        assert all(isinstance(error, EngineStoppedError) for error in errors)
        wait_until(lambda: engine._worker is None)

    def test_reaches_the_loop_and_later_requests(self) -> None:
        engine = self.broken()
        with pytest.raises(EngineStoppedError, match="counters do not add up") as caught:
            list(engine.generate(ASKED))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        for again in (lambda: list(engine.generate(ASKED)), lambda: engine.submit(ASKED[0]), engine.step):
            with pytest.raises(EngineStoppedError):
                again()


class TestTwoEngines:
    def test_take_turns_in_one_process(self) -> None:
        """The same names, other pools, other settings; a token of one, then a token of the other."""
        first, second = library(), library(pool=slotted_pool(2), max_batched_tokens=8)
        pairs = list(zip(first.generate(ASKED), second.generate(list(reversed(ASKED))), strict=True))
        for outputs in zip(*pairs, strict=True):
            for asked in ASKED:
                assert tokens(list(outputs), asked.request_id) == expected_tokens(asked)
        assert not first.abort("a")

    def test_a_failure_of_one_is_not_the_others(self) -> None:
        broken, sound = TestCollapse().broken(), library()
        with pytest.raises(EngineStoppedError):
            list(broken.generate(ASKED))
        assert tokens(list(sound.generate(ASKED)), "a") == expected_tokens(ASKED[0])

    def test_each_has_a_thread_of_its_own(self) -> None:
        executors = [SlowExecutor() for _ in range(2)]
        engines = [library(executor=executor) for executor in executors]

        async def main() -> list[list[StepOutput]]:
            return await asyncio.gather(*(TestStreams().read(engine, ASKED[1]) for engine in engines))

        for outputs in asyncio.run(main()):
            assert tokens(outputs, "b") == expected_tokens(ASKED[1])
        names = [name for executor in executors for name in executor.threads]
        assert len(names) == len(set(names)) == 2
        assert all(name.startswith("kvlab-engine ") for name in names)
