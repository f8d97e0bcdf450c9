from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlab.config import KVConfig
from kvlab.errors import CapacityError, ConfigError, KvlabError
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.sizing import PoolSize, check_longest_sequence, longest_sequence, size_pool
from kvlab.kv.spec import KVSpec
from kvlab.kv.storage import KVStorage

SPEC = KVSpec(num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # Qwen3-0.6B: 112 KiB per token
TINY = KVSpec(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")  # 128 bytes per token


def test_bytes_per_token_count_k_and_v_of_kv_heads_on_every_layer() -> None:
    assert SPEC.bytes_per_token == 2 * 28 * 8 * 128 * 2 == 112 * 1024
    assert KVSpec(1, 1, 1, "float32").bytes_per_token == 8
    assert KVSpec(1, 1, 1, "float16").bytes_per_token == 4


def test_pool_size_is_what_the_tensors_take() -> None:
    size = PoolSize(num_blocks=5, block_size=4, bytes_per_token=TINY.bytes_per_token)
    storage = KVStorage(TINY, 5, 4)
    assert size.token_slots == 20
    assert size.num_bytes == storage.num_bytes == storage.keys.nbytes + storage.values.nbytes


@pytest.mark.parametrize("returned", [0, 2.0])
def test_a_backend_with_blocks_of_no_size_is_refused(returned: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContiguousKVCachePool, "block_size_for", lambda config, max_seq_len: returned)
    with pytest.raises(ConfigError, match=rf"kv\.backend=contiguous: block_size_for returned {returned}; must be"):
        size_pool(KVConfig(backend="contiguous", num_blocks=4), TINY, max_batch_size=2, max_seq_len=64)


def test_giving_both_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv\.memory=1GiB: kv\.num_blocks=4 is given too"):
        KVConfig(num_blocks=4, memory="1GiB")


kv_settings = st.one_of(
    st.builds(lambda blocks: {"num_blocks": blocks}, st.integers(1, 500)),
    st.builds(
        lambda count, unit: {"memory": f"{count}{unit}"}, st.integers(1, 900), st.sampled_from(["B", "KB", "KiB"])
    ),
    st.just({}),
)


@given(
    setting=kv_settings,
    block_size=st.integers(1, 40),
    max_batch_size=st.integers(1, 9),
    max_seq_len=st.integers(1, 100),
)
def test_never_more_bytes_than_asked_and_at_most_one_block_less(
    setting: dict[str, int | str], block_size: int, max_batch_size: int, max_seq_len: int
) -> None:
    if "num_blocks" in setting:
        asked = int(setting["num_blocks"]) * block_size * TINY.bytes_per_token
    elif "memory" in setting:
        count, unit = re.fullmatch(r"(\d+)(\w+)", str(setting["memory"])).groups()  # type: ignore[union-attr]
        asked = int(count) * {"B": 1, "KB": 1000, "KiB": 1024}[unit]
    else:
        asked = max_batch_size * max_seq_len * TINY.bytes_per_token
    for backend, tokens in (("paged", block_size), ("contiguous", max_seq_len)):
        kv = KVConfig(backend=backend, block_size=block_size, **setting)  # type: ignore[arg-type]
        block_bytes = tokens * TINY.bytes_per_token
        if asked < block_bytes:
            with pytest.raises(CapacityError):
                size_pool(kv, TINY, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
            continue
        size = size_pool(kv, TINY, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
        assert size.block_size == tokens
        assert asked - block_bytes < size.num_bytes <= asked


class TestTooSmall:
    @pytest.mark.parametrize(
        ("kv", "setting", "what"),
        [
            (KVConfig(memory="1MiB"), "kv.memory=1MiB holds 9 tokens at 112.0 KiB each", "one block of 16"),
            (KVConfig(backend="contiguous", num_blocks=3), "kv.num_blocks=3 holds 48 tokens", "one slot of 1024"),
            (KVConfig(block_size=9000), "scheduler.max_batch_size=8 holds 8192 tokens", "one block of 9000"),
        ],
        ids=["memory", "num_blocks", "neither"],
    )
    def test_names_the_setting_and_what_it_holds(self, kv: KVConfig, setting: str, what: str) -> None:
        with pytest.raises(CapacityError) as caught:
            size_pool(kv, SPEC, max_batch_size=8, max_seq_len=1024)
        assert setting in str(caught.value)
        assert f"less than {what}" in str(caught.value)

    @given(
        backend=st.sampled_from(["paged", "contiguous"]),
        block_size=st.integers(1, 300),
        max_seq_len=st.integers(1, 999),
    )
    @pytest.mark.parametrize("parts", [1, 2])
    def test_what_the_message_advises_fits_the_longest_sequence(
        self, backend: str, block_size: int, max_seq_len: int, parts: int
    ) -> None:
        kv = KVConfig(backend=backend, block_size=block_size, memory="100B")
        with pytest.raises(CapacityError) as caught:
            size_pool(kv, TINY, max_batch_size=1, max_seq_len=max_seq_len, parts=parts)
        advice = KVConfig(backend=backend, block_size=block_size, memory=_advised_memory(caught.value))
        size = size_pool(advice, TINY, max_batch_size=1, max_seq_len=max_seq_len, parts=parts)
        check_longest_sequence(size, max_seq_len)
        assert size.num_bytes < parts * (max_seq_len + size.block_size) * TINY.bytes_per_token + 1024


class TestLongestSequence:
    def test_one_token_more_is_refused_with_what_would_fit(self) -> None:
        with pytest.raises(CapacityError) as caught:
            check_longest_sequence(PoolSize(4, 16, 128), 65)
        message = str(caught.value)
        assert "4 blocks of 16 tokens (64 tokens, 8.0 KiB)" in message
        assert "65 tokens, which needs 5 blocks" in message
        assert "kv.num_blocks=5" in message

    def test_no_pool_is_advised_that_the_memory_has_no_room_for(self) -> None:
        needed = 5 * 16 * 128
        with pytest.raises(CapacityError, match=r"kv\.num_blocks=5"):
            check_longest_sequence(PoolSize(4, 16, 128), 65, needed)
        with pytest.raises(CapacityError, match=r"takes 10\.0 KiB, and weights and steps leave") as caught:
            check_longest_sequence(PoolSize(4, 16, 128), 65, needed - 1)
        assert "kv.num_blocks=" not in str(caught.value)

    def test_a_sequence_is_of_one_group_of_devices(self) -> None:
        check_longest_sequence(PoolSize(9, 16, 128, parts=2), 64)
        with pytest.raises(CapacityError, match="which 2 groups of devices divide") as caught:
            check_longest_sequence(PoolSize(9, 16, 128, parts=2), 65)
        assert "kv.num_blocks=10" in str(caught.value)

    @given(num_blocks=st.integers(0, 20), block_size=st.integers(1, 33), parts=st.integers(1, 3))
    def test_the_longest_that_fits_is_not_refused(self, num_blocks: int, block_size: int, parts: int) -> None:
        size = PoolSize(num_blocks, block_size, TINY.bytes_per_token, parts=parts)
        longest = longest_sequence(size, 500)
        check_longest_sequence(size, longest)
        if longest < 500:
            with pytest.raises(CapacityError):
                check_longest_sequence(size, longest + 1)

    @given(num_blocks=st.integers(1, 20), block_size=st.integers(1, 33), longest=st.integers(1, 900))
    def test_both_pieces_of_advice_fit(self, num_blocks: int, block_size: int, longest: int) -> None:
        size = PoolSize(num_blocks, block_size, TINY.bytes_per_token)
        assume(longest > size.token_slots)
        with pytest.raises(CapacityError) as caught:
            check_longest_sequence(size, longest)
        blocks = int(re.search(r"kv\.num_blocks=(\d+)", str(caught.value))[1])  # type: ignore[index]
        for kv in (
            KVConfig(block_size=block_size, num_blocks=blocks),
            KVConfig(block_size=block_size, memory=_advised_memory(caught.value)),
        ):
            check_longest_sequence(size_pool(kv, TINY, max_batch_size=1, max_seq_len=longest), longest)


class TestPoolsOfNoBlock:
    def test_contiguous_says_what_one_sequence_needs(self) -> None:
        with pytest.raises(
            CapacityError, match=r"0 blocks holds no sequence; one of 100 tokens needs 1 blocks of 100 tokens"
        ):
            ContiguousKVCachePool(0, 100)


def test_a_cache_larger_than_memory_is_a_capacity_error_with_its_size() -> None:
    with pytest.raises(
        CapacityError, match=r"KV cache of 1000000000000 blocks of 4096 tokens .* does not fit on cpu"
    ):
        KVStorage(SPEC, 10**12, 4096)


def _advised_memory(error: KvlabError) -> str:
    found = re.search(r"kv\.memory=(\d+KiB)", str(error))
    assert found is not None
    return found[1]
