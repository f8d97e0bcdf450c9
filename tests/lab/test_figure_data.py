"""The numbers behind the figures."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from kvlab.kv.allocator import BlockAllocator
from kvlab.kv.journal import BlockEvent, BlockEvents, BlockJournal
from kvlab.lab.figures import blocks, style
from kvlab.lab.figures.memory import memory_series
from kvlab.lab.figures.pareto import Measured, measured_points, pareto_front
from kvlab.lab.figures.points import THROUGHPUT, Point, Points
from kvlab.lab.figures.pool_map import pool_image
from kvlab.lab.figures.service_levels import attainment_windows
from kvlab.lab.figures.timeline import Span, phase_spans, shown_requests
from kvlab.lab.results.columns import blocks_table
from kvlab.lab.results.records import read_run
from kvlab.lab.results.requests import latencies_ms, request_phases
from tests.support.drawn import A, C, D, F, S, events, request, step
from tests.support.pools import content, fill


def pool_grid(recorded: BlockEvents, count: int, starts: Any, end_s: float, size: blocks.GridSize) -> Any:
    """A run on a grid of one size."""
    (grid,) = blocks.pool_grids(recorded, count, starts, end_s, [size])
    return grid


def followed_by_hand(recorded: BlockEvents, num_steps: int) -> list[tuple[int, int, int, int]]:
    """(block, holder, start, end), event by event."""
    found = []
    for block in set(recorded.block.tolist()):
        held: list[int] = []
        now, since = blocks.FREE, 0
        of_block = np.flatnonzero(recorded.block == block)
        for row in [*of_block.tolist(), -1]:
            event, step = recorded.event[row], int(recorded.step[row]) if row >= 0 else num_steps
            if row >= 0 and event in (A, S):
                held.append(int(recorded.sequence[row]))
            elif row >= 0 and event == F:
                held.remove(int(recorded.sequence[row]))
            cached = blocks.CACHED if event == C else blocks.FREE
            holder = (held[0] if len(held) == 1 else blocks.SHARED) if held else cached
            if holder != now or row < 0:
                if now != blocks.FREE and (step > since or now >= 0):
                    found.append((block, now, since, step))
                now, since = holder, step
    return found


class TestNumbers:
    def test_a_requests_phases_have_no_gaps(self) -> None:
        assert request_phases(request()) == [("queued", 1, 2), ("prefill", 2, 3), ("decode", 3, 6)]

    def test_a_preempted_request_waits_and_is_computed_again(self) -> None:
        preempted = request(token_times_s=[3.0, 5.5, 6.0], preempted_s=[3.5], resumed_s=[5.0])
        assert request_phases(preempted)[2:] == [
            ("decode", 3, 3.5),
            ("preempted", 3.5, 5),
            ("prefill", 5, 5.5),
            ("decode", 5.5, 6),
        ]

    def test_a_request_preempted_before_its_first_token_is_in_prefill_until_then(self) -> None:
        preempted = request(preempted_s=[2.5], resumed_s=[2.75])
        assert request_phases(preempted)[1:4] == [
            ("prefill", 2, 2.5),
            ("preempted", 2.5, 2.75),
            ("prefill", 2.75, 3),
        ]

    def test_a_request_that_never_came_back_is_preempted_to_its_end(self) -> None:
        gone = request(token_times_s=[3.0], preempted_s=[4.0], finish_reason="aborted")
        assert request_phases(gone)[-1] == ("preempted", 4, 6)

    def test_a_request_that_was_never_admitted_is_queued_to_its_end(self) -> None:
        waiting = request(scheduled_s=None, token_times_s=None, finish_reason="aborted")
        assert request_phases(waiting) == [("queued", 1, 6)]

    def test_of_many_requests_one_in_so_many_is_shown_in_order_of_arrival(self) -> None:
        shown, every = shown_requests([request(request_id=str(n), arrival_s=float(-n)) for n in range(1000)])
        assert every == 3
        assert [each.name for each in shown][:3] == ["999", "996", "993"]
        assert len(shown) == 334

    def test_short_requests_of_a_long_run_are_drawn_from_their_arrivals_on(self) -> None:
        def spans(gap: float) -> Span:
            times = [{"arrival_s": n * gap, "scheduled_s": n * gap, "end_s": n * gap + 5} for n in range(100)]
            shown = [request(first_token_s=None, token_times_s=[], **each) for each in times]
            return phase_spans(shown, 1)["prefill"][-1]

        assert spans(100.0)[1:3] == (9900, 9905)
        assert spans(100.0).origin_s == 9900
        assert spans(0.1).origin_s == 0

    def test_latencies_are_those_of_the_metrics(self) -> None:
        found = latencies_ms([request(), request(finish_reason="failed"), request(token_times_s=[3.0], end_s=3.0)])
        assert {name: each.tolist() for name, each in found.items()} == {
            "ttft": [2000, 2000],
            "e2el": [5000, 2000],
            "tpot": [1500],
            "itl": [1000, 2000],
            "queue": [1000, 1000],
        }

    def test_attainment_is_counted_in_windows_of_arrival(self) -> None:
        at = np.repeat([0.0, 4.0, 11.0], [20, 20, 10])
        windows = attainment_windows(at, np.arange(50) < 25)
        assert windows.edges.tolist() == [0, 2, 4, 6, 8, 10, 12]
        assert windows.requests.tolist() == [20, 0, 20, 0, 0, 10]
        assert windows.within.tolist() == [20, 0, 5, 0, 0, 0]
        assert str(windows.attainment.tolist()) == "[100.0, nan, 25.0, nan, nan, 0.0]"

    @pytest.mark.parametrize(("requests", "most"), [(3, 1), (40, 6), (100_000, 61)])
    def test_windows_are_few_and_hold_every_request(self, requests: int, most: int) -> None:
        windows = attainment_windows(np.linspace(0.0, 3600.0, requests), np.ones(requests, bool))
        assert len(windows.requests) <= most
        assert windows.requests.sum() == requests

    def test_memory_is_a_step_function_in_blocks(self) -> None:
        steps = [
            step(0, blocks_in_use=1, tokens_in_use=8, running=1),
            step(1, blocks_in_use=3, blocks_cached=1, tokens_in_use=40, waiting=2, preempted=2),
        ]
        series = memory_series(steps)
        assert series.at.tolist() == [0, 1, 2]
        assert series.in_use.tolist() == [1, 3, 3]
        assert series.tokens.tolist() == [0.5, 2.5, 2.5]
        assert series.preempted_at.tolist() == [1, 1]
        assert (series.capacity, series.block_tokens) == (4, 16)

    def test_thinning_keeps_peaks_and_gaps(self) -> None:
        values = np.full(100_000, 5.0)
        values[77_777], values[22_222] = 9.0, 1.0
        at, kept = style.thin(np.arange(100_000.0), values)
        assert len(at) == len(kept) <= 2000
        assert (kept.max(), kept.min()) == (9, 1)
        assert (np.diff(at) >= 0).all()

    def test_a_block_is_followed_from_holder_to_holder(self) -> None:
        recorded = events(
            (0, A, 0, 5), (1, S, 0, 6), (2, F, 0, 5), (3, F, 0, 6), (3, C, 0, -1), (5, D, 0, -1), (5, A, 0, 7)
        )
        found = blocks.stretches(recorded, 8)
        assert list(zip(found.holder.tolist(), found.start.tolist(), found.end.tolist(), strict=True)) == [
            (5, 0, 1),
            (blocks.SHARED, 1, 2),
            (6, 2, 3),
            (blocks.CACHED, 3, 5),
            (7, 5, 8),
        ]

    def test_pinned_blocks_are_told_from_cached_ones_and_tenants_from_each_other(self) -> None:
        pinned = BlockEvent.PINNED
        recorded = events(
            *((0, A, 0, 5), (1, F, 0, 5), (1, C, 0, -1), (1, pinned, 0, -1), (3, C, 0, -1), (4, D, 0, -1)),
            *((4, A, 0, 6), (5, S, 0, 4), (6, F, 0, 4), (7, F, 0, 6), (7, C, 0, -1)),
        )
        found = blocks.stretches(recorded, 8)
        assert list(zip(found.holder.tolist(), found.start.tolist(), found.end.tolist(), strict=True)) == [
            (5, 0, 1),
            (blocks.PINNED, 1, 3),
            (blocks.CACHED, 3, 4),
            (6, 4, 5),
            (blocks.SHARED, 5, 6),
            (6, 6, 7),
            (blocks.CACHED, 7, 8),
        ]
        grid = pool_grid(recorded, 2, range(8), 8.0, blocks.GridSize(400, 8))
        assert grid.cells[0].tolist() == [
            5,
            *[blocks.PINNED] * 2,
            blocks.CACHED,
            6,
            blocks.SHARED,
            6,
            blocks.CACHED,
        ]
        owners = np.array([9, 9, 9, 9, 1, 0, 1])  # sequences 4 and 6 are of one tenant, 5 of another
        found = blocks.stretches(recorded, 8, owners)
        in_use, cached, kept = range(blocks.TENANT_STATES)
        held = [
            (holder, start, end)
            for holder, start, end in zip(
                found.holder.tolist(), found.start.tolist(), found.end.tolist(), strict=True
            )
            if end > start
        ]
        assert held == [
            (in_use, 0, 1),
            (kept, 1, 3),
            (cached, 3, 4),
            (blocks.TENANT_STATES + in_use, 4, 7),
            (blocks.TENANT_STATES + cached, 7, 8),
        ]

    def test_blocks_of_many_sequences_are_followed_as_one_would_by_hand(self) -> None:
        journal, rng = BlockJournal(), random.Random(0)
        allocator = BlockAllocator(40, journal=journal)
        held: dict[int, list[int]] = {}
        for slot in range(300):
            journal.assign(slot, (f"r{slot}", 0))
            mine = held[slot] = allocator.allocate(min(rng.randrange(1, 6), allocator.num_free()), slot)
            for block in mine[: rng.randrange(len(mine) + 1)]:
                fill(allocator, block, content(1000 * slot + block))
            others = [block for blocks in held.values() for block in blocks if block not in mine]
            allocator.share(rng.sample(others, min(len(others), rng.randrange(3))), slot)
            held[slot] = list(allocator.owners.blocks_of(slot).elements())
            while len(held) > rng.randrange(1, 8) or allocator.num_free() < 6:
                gone = rng.choice(list(held))
                allocator.free(held.pop(gone), gone)
            if slot % 3 == 0:
                journal.end_step()
        for slot, blocks_held in held.items():
            allocator.free(blocks_held[1:], slot)
        recorded = journal.columns()
        found = blocks.stretches(recorded, 101)
        followed = sorted(followed_by_hand(recorded, 101))
        assert sorted(zip(*(column.tolist() for column in found), strict=True)) == followed
        assert {blocks.SHARED, blocks.CACHED} < {holder for _, holder, _, _ in followed}

    def test_grids_of_blocks_followed_in_parts_are_those_of_all_at_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rng = random.Random(0)
        taken = events(*((n // 4, rng.choice((A, F, C)), rng.randrange(90), n % 40) for n in range(2000)))
        sizes = [blocks.GridSize(9, 25), blocks.GridSize(20, 70)]
        starts = np.arange(500.0)
        expected = [pool_grid(taken, 90, starts, 500.0, size) for size in sizes]
        monkeypatch.setattr(blocks, "_TOGETHER", 160)
        for found, alone in zip(blocks.pool_grids(taken, 90, starts, 500.0, sizes), expected, strict=True):
            assert found[3:] == alone[3:]
            for one, other in zip(found[:3], alone[:3], strict=True):
                assert np.array_equal(one, other)

    def test_what_was_taken_from_a_leak_has_no_known_holder(self) -> None:
        recorded = events((0, A, 0, 5), (1, S, 0, 6), (2, F, 0, -1), (2, F, 0, -1), (3, A, 0, 7))
        found = blocks.stretches(recorded, 4)
        assert found.holder.tolist() == [5, blocks.SHARED, 7]

    def test_a_sequence_that_came_and_went_within_a_step_is_not_lost(self) -> None:
        grid = pool_grid(events((2, A, 1, 3), (2, F, 1, 3)), 2, [0, 1, 2, 3], 4.0, blocks.GridSize(400, 4))
        assert grid.cells.tolist() == [[-1] * 4, [-1, -1, 3, -1]]

    def test_no_used_block_is_lost_in_a_pool_of_ten_thousand(self) -> None:
        recorded = events((0, A, 5003, 1), (1, F, 5003, 1), (1, A, 9999, 2), (2, F, 9999, 2), (2, C, 9999, -1))
        grid = pool_grid(recorded, 10_000, np.arange(100_000.0).tolist(), 100_000.0, blocks.GridSize(400, 800))
        assert grid.blocks_per_row == 25
        assert grid.cells.shape == (400, 800)
        assert grid.cells[5003 // 25, 0] == 1
        assert grid.cells[399, 0] == 2  # used beats cached within a cell
        assert grid.cells[399, 1] == blocks.CACHED
        assert grid.in_use[5003 // 25, 0] == pytest.approx(1 / 25)
        assert grid.cached[399, 1] == pytest.approx(1 / 25)

    def test_where_a_row_is_many_blocks_few_in_use_are_pale_but_not_white(self) -> None:
        one = events((0, A, 0, 0))
        few = pool_image(pool_grid(one, 100, [0], 1.0, blocks.GridSize(1, 1)))[0, 0]
        alone = pool_image(pool_grid(one, 1, [0], 1.0, blocks.GridSize(400, 1)))[0, 0]
        assert alone.sum() < few.sum() < 3 * 255 - 60

    def test_more_sequences_than_columns_have_one_colour(self) -> None:
        ones = np.ones((2, 3))
        few, many = (blocks.PoolGrid(np.arange(6).reshape(2, 3) % n, ones, 0 * ones, 1, 2, 1.0) for n in (3, 4))
        colours = [len(np.unique(pool_image(grid).reshape(-1, 3), axis=0)) for grid in (few, many)]
        assert colours == [3, 1]

    def test_neighbours_get_different_colours(self) -> None:
        cells = np.arange(70).reshape(70, 1).repeat(3, axis=1)
        chosen = blocks.colour_numbers(cells, 7)
        assert all(chosen[n] != chosen[n + 1] for n in range(69))
        assert set(chosen.values()) == set(range(7))

    def test_block_events_are_written_and_read_back(self, tmp_path: Path) -> None:
        recorded = events((0, A, 3, 1), (0, S, 3, 0), (4, C, 3, -1))
        pq.write_table(blocks_table(recorded), tmp_path / "blocks.parquet")
        (tmp_path / "summary.json").write_text("{}")
        back = read_run(tmp_path).blocks()
        assert back is not None
        for name in ("step", "event", "block", "sequence"):
            assert getattr(back, name).tolist() == getattr(recorded, name).tolist()
        assert pq.read_table(tmp_path / "blocks.parquet")["event"].to_pylist() == ["allocated", "shared", "cached"]
        (tmp_path / "blocks.parquet").unlink()
        assert read_run(tmp_path).blocks() is None

    def test_a_grid_takes_the_median_of_repeats_and_knows_what_failed(self) -> None:
        points = [
            Point({"a": a, "b": b}, {THROUGHPUT: a * b + extra}, status)
            for a, b, extra, status in (
                (2, 10, 0.0, "finished"),
                (2, 10, 4.0, "finished"),
                (1, 10, 0.0, "finished"),
                (1, 5, 0.0, "failed"),
            )
        ]
        grid = Points(points).grid(("a", "b"), THROUGHPUT)
        assert (grid.rows, grid.columns) == ([1, 2], [5, 10])
        np.testing.assert_equal(grid.values, [[math.nan, 10], [math.nan, 22]])
        np.testing.assert_equal(grid.failed, [[1, 0], [math.nan, 0]])

    def test_bookkeeping_is_not_what_was_varied(self) -> None:
        points = [Point({"kv.num_blocks": n, "seed": n, "repeat": n, "tags.x": n, "same": 1}, {}) for n in (1, 2)]
        assert Points(points).varied_keys() == ["kv.num_blocks"]

    def test_the_front_is_what_no_other_beats(self) -> None:
        a, b, c, d = (Measured(name, x, y) for name, x, y in (("a", 1, 1), ("b", 2, 3), ("c", 3, 2), ("d", 2, 2)))
        assert pareto_front([d, c, b, a]) == [a, b]

    def test_repeats_are_one_point_of_the_front(self) -> None:
        points = [
            Point({"a": a, "repeat": repeat}, {"latency/tpot_ms_p50": x, THROUGHPUT: y})
            for a, repeat, x, y in ((1, 0, 10, 100), (1, 1, 30, 300), (2, 0, 5, 50))
        ]
        assert measured_points(Points(points)) == [Measured("a=1", 20, 200), Measured("a=2", 5, 50)]
