"""Reads batches of KV events with vLLM's own decoder; runs in vLLM's environment, which has no kvlab.

Takes lines of hexadecimal digits, a batch each, on its standard input; prints what is left when all were applied.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

from msgspec.msgpack import Decoder
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def main() -> None:
    decoder, known, heard = Decoder(type=KVEventBatch), set[int](), Counter[str]()
    tokens: dict[int, list[int]] = {}
    for line in sys.stdin:
        for event in decoder.decode(bytes.fromhex(line)).events:
            heard[type(event).__name__] += 1
            if isinstance(event, AllBlocksCleared):
                known.clear()
            elif isinstance(event, BlockRemoved):
                known.difference_update(event.block_hashes)
            elif isinstance(event, BlockStored):
                size, before = event.block_size, event.parent_block_hash
                prefix = [] if before is None else tokens[before]
                for number, block in enumerate(event.block_hashes):
                    prefix = tokens[block] = prefix + event.token_ids[number * size : (number + 1) * size]
                    known.add(block)
    print(json.dumps({"heard": heard, "known": {block: tokens[block] for block in known}}))


if __name__ == "__main__":
    main()
