"""Steps of a whole model with weights in int8 beside bfloat16, in turns in one process.

    python -m experiments.cpu_paths.int8_model [--rounds 7]

Qwen3 0.6B, random weights, one thread: a step of prompts of 256 tokens, whose last tokens' logits are wanted, and a
decode step of 16 sequences behind prompts of that length. Attention, norms and the greedy choice are part of it.
Printed are the median of the thread's times with `executor.weights=auto`, and how many times as fast the other
formats are: the median of the rounds' ratios, and their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from experiments.cpu_paths.int8 import ratio
from kvlab.attention.registry import select_backend
from kvlab.cli.compose import compose_run
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.storage import KVStorage
from kvlab.models.config import attention_specs
from kvlab.models.decoder import Decoder
from kvlab.models.families import decoder_config
from kvlab.models.ops.cpu_ops import CpuOps
from kvlab.models.weights import DummyWeights

WEIGHTS = ("auto", "int8", "int8_w8a8")
PROMPT, BLOCK = 256, 16
STEPS = {"prompts, 256 tokens": 1, "prompts, 2,048 tokens": 8, "decode, 16 sequences": 16}


def model(weights: str) -> Decoder:
    config = decoder_config(compose_run(["model=qwen3_0_6b"]).config.model)
    specs = attention_specs(config, "bfloat16", "cpu")
    source = DummyWeights(torch.bfloat16, "cpu")
    return Decoder(config, source, select_backend(specs), specs, 2 * PROMPT, CpuOps(weights=weights))


def seconds(decoder: Decoder, sequences: int, *, decode: bool) -> float:
    """CPU time of one step."""
    blocks = sequences * (PROMPT // BLOCK + 1)
    storage = KVStorage(decoder.config.kv_spec("bfloat16", None), blocks, BLOCK)
    pool = PagedKVCachePool(blocks, BLOCK, 2 * PROMPT, storage)
    slots = [pool.allocate_slot() for _ in range(sequences)]
    taken = 0.0
    for count in (PROMPT, 1) if decode else (PROMPT,):
        tokens = torch.randint(decoder.config.vocab_size, (sequences * count,))
        view = pool.view(slots, [count] * sequences)
        start = time.thread_time()
        decoder.forward_top1(tokens, view, torch.arange(count - 1, len(tokens), count))
        taken = time.thread_time() - start
        view.advance()
    return taken


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)  # so that a thread's CPU time is that of the step, whatever else runs
    models = {weights: model(weights) for weights in WEIGHTS}
    print(
        f"| step | {models['auto'].ops.name}, ms | {' | '.join(f'{name}, times as fast' for name in WEIGHTS[1:])} |"
    )
    print(f"|---|---|{'---|' * len(WEIGHTS[1:])}")
    for name, sequences in STEPS.items():
        times: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
        for turn in range(rounds + 1):
            for weights, decoder in models.items():
                taken = seconds(decoder, sequences, decode=name.startswith("decode"))
                if turn:  # the first one touches memory
                    times[weights].append(taken)
        first = f"| {name} | {1e3 * statistics.median(times['auto']):.0f} |"
        print(first, " | ".join(ratio(times["auto"], times[other]) for other in WEIGHTS[1:]), "|", flush=True)


if __name__ == "__main__":
    main()
