"""A file of requests through another engine, in that engine's own environment: needs nothing of kvlab.

    python experiments/cpu_speed/peers.py {vllm-compiled,vllm-eager,transformers} REQUESTS.jsonl MODEL_DIRECTORY

The model is made of random bfloat16 weights in the shapes of MODEL_DIRECTORY/config.json. Every request is greedy
and runs to its `max_tokens`. Prints one JSON line: output tokens, the seconds they took, and those before the first
request.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Requests = list[dict[str, Any]]
PADDED_BATCH = 8  # sequences that transformers pads to one length


def vllm(directory: str, requests: Requests, *, eager: bool) -> Callable[[], int]:
    """Ready to serve: compiled, and warm."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process between the engine and the clock
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=directory,
        trust_remote_code=False,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=48,
        enforce_eager=eager,
        enable_prefix_caching=False,
    )

    def ask(prompts: list[list[int]], lengths: list[int]) -> int:
        sampling = [
            SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        done = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in done)

    ask([[1, 2, 3]], [4])
    return lambda: ask([r["prompt_token_ids"] for r in requests], [r["max_tokens"] for r in requests])


def transformers(directory: str, requests: Requests) -> Callable[[], int]:
    """`generate` on batches padded to the longest prompt, run to the longest output; what was asked for counts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options).eval()

    def run() -> int:
        for first in range(0, len(requests), PADDED_BATCH):
            batch = requests[first : first + PADDED_BATCH]
            prompts, longest = [r["prompt_token_ids"] for r in batch], max(r["max_tokens"] for r in batch)
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=longest,
                    min_new_tokens=longest,
                    pad_token_id=0,
                    eos_token_id=None,
                )
        return sum(r["max_tokens"] for r in requests)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("vllm-compiled", "vllm-eager", "transformers"))
    parser.add_argument("requests", type=Path)
    parser.add_argument("model")
    arguments = parser.parse_args()
    requests = [json.loads(line) for line in arguments.requests.read_text().splitlines()]
    began = time.perf_counter()
    if arguments.peer == "transformers":
        run = transformers(arguments.model, requests)
    else:
        run = vllm(arguments.model, requests, eager=arguments.peer == "vllm-eager")
    ready = time.perf_counter()
    tokens = run()
    seconds = time.perf_counter() - ready
    print(json.dumps({"output_tokens": tokens, "seconds": seconds, "seconds_to_be_ready": ready - began}))


if __name__ == "__main__":
    main()
