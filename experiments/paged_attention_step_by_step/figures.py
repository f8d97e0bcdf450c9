"""Pictures of the block table in each version, drawn from a real pool and its views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlab.attention.base import AttentionSpec
from kvlab.attention.scores import SequenceInStep, weighted_values
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage
from kvlab.kv.view import CacheView

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 12, 4, 4
SPEC = AttentionSpec(1, 1, HEAD_DIM, 1.0, "float32", "cpu")
COMPUTED = {"A": 9, "B": 6, "C": 0}  # tokens in the pool ahead of the step
NEW = {"A": 1, "B": 1, "C": 6}  # A and B decode, C is in prefill
COLOURS = {"A": "#0072B2", "B": "#D55E00", "C": "#009E73"}
EMPTY = "#f2f2f2"
TABLE_AT = 4.6  # where the cells of a block table begin, behind the words


class Scene:
    """Three sequences in one pool of scattered blocks, and the view of their step. A and B begin alike."""

    def __init__(self) -> None:
        torch.manual_seed(10)
        storage = KVStorage(KVSpec(1, 1, HEAD_DIM, "float32"), NUM_BLOCKS, BLOCK_SIZE)
        pool = PagedKVCachePool(NUM_BLOCKS, BLOCK_SIZE, 32, storage, prefix_sharing=True)
        pool.allocator.allocate(NUM_BLOCKS)
        pool.allocator.free([3, 10, 0, 6, 9, 1, 11, 4, 2, 8, 5, 7])
        common = [1, 2, 3, 4]
        prompts = {"A": [*common, *range(10, 16)], "B": [*common, *range(20, 23)], "C": list(range(30, 36))}
        self.slots: dict[str, int] = {}
        for name, prompt in prompts.items():
            slot = self.slots[name] = pool.allocate_slot(token_ids=prompt)
            missing = COMPUTED[name] - pool.get_seq_len(slot)
            if missing > 0:
                self._store(pool.view([slot], [missing]))
        self.tables: dict[str, list[int]] = {}
        self.view = pool.view(list(self.slots.values()), list(NEW.values()))
        self._update(self.view)
        for number, name in enumerate(self.slots):
            self.tables[name] = self.view.blocks(number)
        self.q = torch.randn(self.view.num_tokens, 1, HEAD_DIM)

    def holders(self, block: int) -> list[str]:
        """The sequences whose block table has a block."""
        return [name for name, table in self.tables.items() if block in table]

    def label(self, block: int, offset: int) -> str:
        """The position of the token in a token slot; nothing where there is none."""
        name = self.holders(block)[0]
        position = self.tables[name].index(block) * BLOCK_SIZE + offset
        return str(position) if position < COMPUTED[name] + NEW[name] else ""

    def sequence(self, number: int) -> SequenceInStep:
        rows = slice(self.view.starts[number], self.view.starts[number + 1])
        return SequenceInStep(self.q[rows], self.view.positions[rows], self.view, number, 0, SPEC)

    @staticmethod
    def _update(view: CacheView) -> None:
        view.update(0, *(torch.randn(view.num_tokens, 1, HEAD_DIM) for _ in range(2)))

    def _store(self, view: CacheView) -> None:
        self._update(view)
        view.advance()


def draw(directory: Path) -> None:
    """Write v1.png to v4.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    scene = Scene()
    for version, paint in enumerate((_joined, _by_block, _one_pool, _ragged), 1):
        figure, axis = pyplot.subplots(figsize=(10, 7))
        canvas = Canvas(axis)
        paint(canvas, scene)
        axis.set(xlim=(-0.2, 26), ylim=(canvas.bottom + 0.3, -0.6), aspect="equal")
        axis.axis("off")
        figure.savefig(directory / f"v{version}.png", dpi=110, bbox_inches="tight")
        pyplot.close(figure)


class Canvas:
    """Cells, words and arrows, measured in token slots; y grows downwards."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.bottom = 0.0

    def cell(self, x: float, y: float, text: object = "", colours: Sequence[str] = (EMPTY,)) -> None:
        """A token slot, in several colours from top to bottom."""
        from matplotlib.patches import Rectangle

        part = 1 / len(colours)
        for index, colour in enumerate(colours):
            self._axis.add_patch(Rectangle((x, y + index * part), 1, part, facecolor=colour))
        self.frame(x, y, 1, width_of_line=0.6)
        self.words(x + 0.5, y + 0.5, text, colour="black" if EMPTY in colours else "white", align="center")

    def frame(self, x: float, y: float, width: float, *, width_of_line: float = 2.0) -> None:
        """The outline of a row of cells."""
        from matplotlib.patches import Rectangle

        self._axis.add_patch(Rectangle((x, y), width, 1, fill=False, edgecolor="black", linewidth=width_of_line))
        self.bottom = max(self.bottom, y + 1)

    def words(
        self, x: float, y: float, text: object, *, colour: str = "black", align: str = "left", size: float = 9
    ) -> None:
        """Text, its middle at the height y."""
        self._axis.text(x, y, str(text), ha=align, va="center", fontsize=size, color=colour)
        self.bottom = max(self.bottom, y + 0.3)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """From one point to another."""
        style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        self._axis.annotate("", end, start, arrowprops=style)

    def row(self, x: float, y: float, texts: Sequence[object], colours: Sequence[str]) -> None:
        """Cells side by side."""
        for index, (text, colour) in enumerate(zip(texts, colours, strict=True)):
            self.cell(x + index, y, text, (colour,))

    def table(self, scene: Scene, name: str, x: float, y: float) -> None:
        """A block table behind its name."""
        self.words(x, y + 0.5, f"block table of {name}")
        table = scene.tables[name]
        self.row(x + TABLE_AT, y, table, [COLOURS[name]] * len(table))

    def pool(self, scene: Scene, y: float, names: Sequence[str], framed: Sequence[int] = ()) -> None:
        """All blocks in the order of their ids, with the positions of the tokens of these sequences."""
        for block in range(NUM_BLOCKS):
            x, top = place(block, y)
            self.words(x, top - 0.35, f"block {block}", size=7.5)
            holders = [name for name in scene.holders(block) if name in names]
            for offset in range(BLOCK_SIZE):
                text = scene.label(block, offset) if holders else ""
                self.cell(x + offset, top, text, [COLOURS[name] for name in holders] if text else (EMPTY,))
            if block in framed:
                self.frame(x, top, BLOCK_SIZE)


def place(block: int, y: float) -> tuple[float, float]:
    """Where a block is in a pool that begins at y."""
    half = NUM_BLOCKS // 2
    return (block % half) * (BLOCK_SIZE + 0.35), y + 0.7 + 2.0 * (block // half)


def _joined(canvas: Canvas, scene: Scene) -> None:
    table, length = scene.tables["A"], scene.view.lengths[0]
    canvas.table(scene, "A", 0, 0)
    canvas.words(TABLE_AT + len(table) + 0.7, 0.5, f"{length} tokens, the last one is new")
    canvas.pool(scene, 1.5, ["A"])
    joined = 8.0
    for entry, block in enumerate(table):
        count = min(BLOCK_SIZE, length - entry * BLOCK_SIZE)
        x, y = place(block, 1.5)
        canvas.arrow((x + count / 2, y + 1), (TABLE_AT + entry * BLOCK_SIZE + count / 2, joined), COLOURS["A"])
    canvas.words(0, joined + 0.5, "K joined, a copy")
    canvas.row(TABLE_AT, joined, range(length), [COLOURS["A"]] * length)
    canvas.words(TABLE_AT + length + 0.4, joined + 0.5, "[kv_heads, 10, head_dim], and V likewise")
    sequence = scene.sequence(0)
    k = torch.cat([block.k for block in sequence.blocks()], dim=1)
    weights = torch.softmax(sequence.scores(k, 0), dim=-1).flatten().tolist()
    canvas.words(0, joined + 2.0, "softmax(q K)")
    for position, weight in enumerate(weights):
        canvas.words(TABLE_AT + position + 0.5, joined + 2.0, f"{weight:.2f}", align="center", size=8)
    canvas.words(TABLE_AT + length + 0.4, joined + 2.0, "one weight for each token, then their sum of V")


def _by_block(canvas: Canvas, scene: Scene) -> None:
    sequence, table = scene.sequence(0), scene.tables["A"]
    canvas.pool(scene, 0, ["A"], table)
    for entry, block in enumerate(table):
        x, y = place(block, 0)
        canvas.words(x + BLOCK_SIZE, y - 0.35, f"read {entry + 1}", align="right", colour=COLOURS["A"])
    top = 5.2
    at = (TABLE_AT, 9.8, 13.2, 17.0, 21.0)
    headings = ("scores of the block", "maximum", "correction", "sum of weights", "weighted sum of V")
    for x, heading in zip(at, headings, strict=True):
        canvas.words(x, top, heading, size=8.5)
    maximum, total, weighted = -math.inf, 0.0, torch.zeros(HEAD_DIM)
    for entry, (k, v, first) in enumerate(sequence.blocks()):
        y = top + 0.6 + 1.5 * entry
        scores = sequence.scores(k, first)
        raised = max(maximum, float(scores.max()))
        correction = math.exp(maximum - raised)
        weights = torch.exp(scores - raised)
        total = total * correction + float(weights.sum())
        weighted = weighted * correction + weighted_values(weights, v).flatten()
        maximum = raised
        canvas.words(0, y + 0.5, f"block {table[entry]}")
        texts = [f"{score:.1f}" for score in scores.flatten().tolist()]
        canvas.row(TABLE_AT, y, texts, [COLOURS["A"]] * len(texts))
        figures = (f"{maximum:.2f}", f"x {correction:.3f}" if entry else "-", f"{total:.3f}", _vector(weighted))
        for x, text in zip(at[1:], figures, strict=True):
            canvas.words(x, y + 0.5, text)
    y = top + 0.6 + 1.5 * len(table) + 0.4
    canvas.words(0, y, "weighted sum / sum of weights")
    canvas.words(at[-1], y, _vector(weighted / total))


def _one_pool(canvas: Canvas, scene: Scene) -> None:
    names = list(scene.tables)
    canvas.pool(scene, 0, names)
    view, slots = scene.view, scene.view.slot_mapping.tolist()
    for number, name in enumerate(names):
        y = 5.4 + 1.6 * number
        canvas.table(scene, name, 0, y)
        rows = slice(view.starts[number], view.starts[number + 1])
        positions = view.positions[rows].tolist()
        canvas.words(9.6, y + 0.5, f"pass {number + 1}, tokens")
        canvas.row(13.6, y, positions, [COLOURS[name]] * len(positions))
        canvas.words(13.9 + len(positions), y + 0.5, f"slots {slots[rows]}", size=8)
    shared = [block for block in scene.tables["A"] if len(scene.holders(block)) > 1]
    text = f"Block {shared[0]} is in two tables: A and B begin with the same {BLOCK_SIZE} tokens."
    canvas.words(0, 5.4 + 1.6 * len(names) + 0.3, text)


def _ragged(canvas: Canvas, scene: Scene) -> None:
    names, view = list(scene.tables), scene.view
    canvas.pool(scene, 0, names)
    owners = [name for number, name in enumerate(names) for _ in range(view.num_new[number])]
    colours = [COLOURS[name] for name in owners]
    y = 5.4
    rows: list[tuple[str, list[object]]] = [
        ("token of", list(owners)),
        ("positions", view.positions.tolist()),
        ("slot_mapping", view.slot_mapping.tolist()),
    ]
    for line, (text, cells) in enumerate(rows):
        canvas.words(0, y + 1.15 * line + 0.5, text)
        canvas.row(TABLE_AT, y + 1.15 * line, cells, colours)
    canvas.words(0, y + 4.0, f"query_start  {view.query_start.tolist()}")
    canvas.words(0, y + 4.8, f"seq_lens  {view.seq_lens.tolist()}")
    right = TABLE_AT + len(owners) + 2.5
    canvas.words(right, y - 0.2, "block_tables")
    tables = view.block_tables.tolist()
    for number, table in enumerate(tables):
        known = len(scene.tables[names[number]])
        for column, block in enumerate(table):
            colour = COLOURS[names[number]] if column < known else EMPTY
            canvas.cell(right + column, y + 0.3 + number, block if column < known else "-", (colour,))
    counts = [int((view.positions >= column * BLOCK_SIZE).sum()) for column in range(len(tables[0]))]
    for column, count in enumerate(counts):
        canvas.words(right, y + 4.0 + 0.8 * column, f"column {column} is read for {count} of {len(owners)} tokens")


def _vector(values: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value:.2f}" for value in values.tolist()) + "]"
