from __future__ import annotations

import torch

from kvlab.kv.storage import KVStorage
from tests.support.pools import SPEC


class TestStorage:
    def test_contiguous_and_paged_of_the_same_tokens_take_the_same_bytes(self) -> None:
        assert KVStorage(SPEC, 40, 16).num_bytes == KVStorage(SPEC, 10, 64).num_bytes

    def test_copy_blocks_copies_them_on_every_layer_and_touches_no_other(self) -> None:
        storage = KVStorage(SPEC, 5, 4)
        storage.keys.copy_(torch.rand_like(storage.keys))
        storage.values.copy_(torch.rand_like(storage.values))
        keys, values = storage.keys.clone(), storage.values.clone()
        storage.copy_blocks([4, 1], [0, 2])
        expected = [4, 1, 1, 3, 4]
        assert torch.equal(storage.keys, keys[:, expected])
        assert torch.equal(storage.values, values[:, expected])
