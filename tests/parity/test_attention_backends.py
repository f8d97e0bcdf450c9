"""Every backend against plain attention, on the lengths where pages go wrong."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.attention.backends.concat import ConcatAttention
from kvlab.attention.backends.sdpa import SdpaAttention
from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.attention.registry import attention_backends, select_backend
from kvlab.errors import BackendError
from tests.parity.ragged import LAYER, RaggedBatch, make_batch, make_spec, naive_attention

BACKENDS = [name for name in attention_backends() if name != "concat"]
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}

backends = pytest.mark.parametrize("name", BACKENDS)
every_backend = pytest.mark.parametrize("name", attention_backends())
groups = pytest.mark.parametrize("group", [1, 2, 4])
# Each two of them once; the test on any batch below has all of them together.
shapes = pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "dtype"),
    [
        *((1, 16, 1, "float32"), (1, 64, 2, "bfloat16"), (1, 80, 4, "float32")),
        *((4, 16, 2, "float32"), (4, 64, 4, "bfloat16"), (4, 80, 1, "bfloat16")),
        *((16, 16, 4, "bfloat16"), (16, 64, 1, "float32"), (16, 80, 2, "bfloat16")),
    ],
)


def lengths_around_blocks(b: int) -> list[tuple[int, int]]:
    """(stored, new): prefills and decodes that end around block boundaries, and chunks after a stored prefix."""
    totals = sorted({max(1, total) for total in (1, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 3 * b)})
    prefills = [(0, total) for total in totals]
    decodes = [(total - 1, 1) for total in totals]
    chunks = [(b, b), (b, 2), (2 * b + 1, 3), (3, 2 * b), (1, b), (29, 2)]
    return [pair for pairs in zip(prefills, decodes, strict=True) for pair in pairs] + chunks


def backend_for(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend; a test that it cannot run is skipped with its own reason."""
    try:
        return select_backend(spec, name)
    except BackendError as error:
        pytest.skip(str(error))


def assert_agrees(name: str, spec: AttentionSpec, batch: RaggedBatch) -> None:
    expected = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
    found = backend_for(name, spec).forward(batch.q, batch.view, LAYER, spec)
    assert (found.shape, found.dtype) == (batch.q.shape, batch.q.dtype)
    tolerance = TOLERANCE[spec.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


class TestConcat:
    """The oracle, against attention that knows no pages."""

    @pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (5, None), (None, 0.5), (3, 0.5)])
    @groups
    def test_is_softmax_of_scores_over_values(self, group: int, window: int | None, soft_cap: float | None) -> None:
        spec = make_spec(group, 16, window=window, soft_cap=soft_cap)
        batch = make_batch(spec, 4, lengths_around_blocks(4))
        found = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
        torch.testing.assert_close(found.double(), naive_attention(batch, spec), atol=1e-5, rtol=1e-5)

    def test_without_causality_sees_the_whole_sequence(self) -> None:
        spec = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu", causal=False)
        batch = make_batch(spec, 4, [(0, 6)])
        found = ConcatAttention().forward(batch.q, batch.view, LAYER, spec)
        grouped = batch.q.view(6, 2, 2, 16)
        scores = torch.einsum("thgd,hsd->thgs", grouped, batch.keys[0]) * 0.25
        expected = torch.einsum("thgs,hsd->thgd", scores.softmax(-1), batch.values[0]).reshape(6, 4, 16)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@backends
@shapes
def test_agrees_with_concat(name: str, dtype: str, block_size: int, head_dim: int, group: int) -> None:
    spec = make_spec(group, head_dim, dtype)
    assert_agrees(name, spec, make_batch(spec, block_size, lengths_around_blocks(block_size)))


@backends
@pytest.mark.parametrize(
    ("window", "dtype"),
    [(1, "float32"), (2, "bfloat16"), (4, "float32"), (5, "bfloat16"), (16, "float32"), (1000, "bfloat16")],
)
def test_agrees_with_concat_inside_a_sliding_window(name: str, dtype: str, window: int) -> None:
    spec = make_spec(2, 16, dtype, window=window)
    assert_agrees(name, spec, make_batch(spec, 4, lengths_around_blocks(4)))


@backends
@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 20))), min_size=1, max_size=6
    ),
    block_size=st.integers(1, 17),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 80]),
    window=st.one_of(st.none(), st.integers(1, 30)),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_agrees_with_concat_on_any_batch(
    name: str,
    sequences: list[tuple[int, int]],
    block_size: int,
    group: int,
    head_dim: int,
    window: int | None,
    seed: int,
) -> None:
    spec = make_spec(group, head_dim, window=window)
    assert_agrees(name, spec, make_batch(spec, block_size, sequences, seed))


@every_backend
def test_a_sequence_gets_in_a_batch_what_it_gets_alone(name: str) -> None:
    """Padding, masks and metadata of the others must not reach it."""
    spec = make_spec(2, 16)
    backend = backend_for(name, spec)
    batch = make_batch(spec, 4, lengths_around_blocks(4))
    together = backend.forward(batch.q, batch.view, LAYER, spec)
    for sequence, (slot, new) in enumerate(zip(batch.slots, batch.view.num_new, strict=True)):
        rows = slice(batch.view.starts[sequence], batch.view.starts[sequence + 1])
        alone = backend.forward(batch.q[rows], batch.pool.view([slot], [new]), LAYER, spec)
        torch.testing.assert_close(alone, together[rows], atol=1e-5, rtol=1e-5)


@every_backend
def test_pages_anywhere_in_the_pool_give_what_one_block_gives(name: str) -> None:
    spec = make_spec(2, 16)
    backend = backend_for(name, spec)
    paged, contiguous = (make_batch(spec, size, lengths_around_blocks(4)) for size in (4, 64))
    assert torch.equal(paged.q, contiguous.q)
    found, expected = (backend.forward(batch.q, batch.view, LAYER, spec) for batch in (paged, contiguous))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_backend
def test_a_soft_cap_is_computed_or_refused_with_a_reason(name: str) -> None:
    spec = make_spec(2, 16, soft_cap=0.5)
    backend = backend_for(name, make_spec(2, 16))
    support = backend.supports(spec)
    if not support.ok:
        assert "soft cap" in support.reason
        return
    batch = make_batch(spec, 4, lengths_around_blocks(4))
    found = backend.forward(batch.q, batch.view, LAYER, spec)
    torch.testing.assert_close(found.double(), naive_attention(batch, spec), atol=1e-5, rtol=1e-5)


class TestSdpaRefuses:
    def test_a_soft_cap(self) -> None:
        spec = make_spec(1, 16, soft_cap=30.0)
        assert not SdpaAttention().supports(spec).ok
        with pytest.raises(BackendError, match=r"attention=sdpa cannot run here: .*soft cap"):
            select_backend(spec, "sdpa")
        assert select_backend(spec, "auto").name != "sdpa"

    def test_attention_that_is_not_causal(self) -> None:
        spec = AttentionSpec(4, 2, 16, 0.25, "float32", "cpu", causal=False)
        assert SdpaAttention().supports(spec).reason == "only causal attention"
