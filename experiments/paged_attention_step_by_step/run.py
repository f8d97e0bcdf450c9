"""Paged attention in four versions, each a setting of the same engine, beside `generate` of transformers.

    python -m experiments.paged_attention_step_by_step.run [--requests 8] [--rounds 3] [--figures DIRECTORY]

All of them run the same random float32 weights on one CPU thread and have to produce the same tokens; if one does
not, the exit code is 1. Times are CPU times of the process, which other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml

from experiments.paged_attention_step_by_step.figures import draw
from experiments.runs import configure
from kvlab.core import PoolStats, Request, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.lab.machine import processor
from kvlab.lab.run.drive import drive
from kvlab.paths import CONF

Tokens = list[list[int]]
ONE_AT_A_TIME = "scheduler.max_batch_size=1"


@dataclass(frozen=True)
class Version:
    """One version: what it adds to the one before, the file to read, and the settings that run it."""

    name: str
    adds: str
    file: str = ""
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The tokens of each request, the forward passes that they took, the most sequences in one step, and the pool
    when most of it was in use.
    """

    tokens: Tokens
    passes: int
    together: int
    fullest: PoolStats | None = None


ALONE = Version("generate", "transformers, one request after another")
PADDED = Version("generate, batched", "transformers, all prompts padded to one length")
VERSIONS = (
    Version(
        "v1",
        "pages, joined before attention",
        "src/kvlab/attention/backends/concat.py",
        ("attention=concat", ONE_AT_A_TIME),
    ),
    Version(
        "v2, safe softmax",
        "block by block, each read twice",
        "src/kvlab/attention/backends/safe_softmax.py",
        ("attention=safe_softmax", ONE_AT_A_TIME),
    ),
    Version(
        "v2, online softmax",
        "block by block, each read once",
        "src/kvlab/attention/backends/online_softmax.py",
        ("attention=online_softmax", ONE_AT_A_TIME),
    ),
    Version(
        "v3",
        "many sequences over one pool, a call for each",
        "src/kvlab/engine/per_sequence.py",
        ("attention=online_softmax", "executor.batching=per_sequence"),
    ),
    Version(
        "v4",
        "one ragged call for all",
        "experiments/paged_attention_step_by_step/ragged.py",
        ("plugins=[experiments.paged_attention_step_by_step.ragged]", "attention.backend=ragged"),
    ),
    Version(
        "v4, native",
        "the same in C++, and the rest of a layer too",
        "src/kvlab/attention/backends/cpu.py",
        ("attention=cpu", "executor.kernels=true"),
    ),
)


def make_requests(count: int, vocabulary: int, prompt_len: tuple[int, int], output_len: int) -> list[Request]:
    """Random prompts, evenly from the shortest to the longest, in random order."""
    draws = random.Random(0)
    shortest, longest = prompt_len
    lengths = [shortest + (longest - shortest) * index // max(1, count - 1) for index in range(count)]
    draws.shuffle(lengths)
    sampling = SamplingParams(output_len, ignore_eos=True)
    return [
        Request(f"r{index}", tuple(draws.choices(range(vocabulary), k=length)), sampling)
        for index, length in enumerate(lengths)
    ]


def make_model(name: str, directory: Path) -> Any:
    """A model of conf/model with random weights, as transformers runs it; its checkpoint is in the directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    described = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(described["family"], **described["architecture"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # larger than usual: with less, a random model hardly looks at its context
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return model


def generate(model: Any, requests: Sequence[Request]) -> Tokens:
    """transformers' greedy tokens for a batch, padded on the left to its longest prompt."""
    prompts = [list(request.prompt_token_ids) for request in requests]
    width, count = max(map(len, prompts)), requests[0].sampling.max_tokens
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, **options)
    tokens: Tokens = found[:, width:].tolist()
    return tokens


def alone(model: Any, requests: Sequence[Request]) -> Answer:
    tokens = [generate(model, [request])[0] for request in requests]
    return Answer(tokens, sum(map(len, tokens)), 1)


def padded(model: Any, requests: Sequence[Request]) -> Answer:
    tokens = generate(model, requests)
    return Answer(tokens, len(tokens[0]), len(requests))


def engine_of(version: Version, *model: str) -> Callable[[Sequence[Request]], Answer]:
    """An engine that runs a version with a model, given as settings, ready to serve."""
    settings = [
        *("executor.device=cpu", "executor.dtype=float32", "executor.threads=1", "executor.kernels=false"),
        *("model.max_seq_len=1024", "kv=paged_unshared"),
        "scheduler.max_batched_tokens=4096",  # all prompts in the first step
    ]
    config = configure([*model, *settings, *version.settings])
    engine = build_engine(plan_engine(config, random_sampling=False))
    per_sequence = config.executor.batching == "per_sequence"

    def serve(requests: Sequence[Request]) -> Answer:
        log = drive(engine, list(requests))
        steps = [step for step in log.steps if step.batch_seqs]
        return Answer(
            [list(record.output_token_ids) for record in log.records],
            sum(step.batch_seqs if per_sequence else 1 for step in steps),
            max(step.batch_seqs for step in steps),
            max((step.pool for step in steps if step.pool is not None), key=lambda pool: pool.blocks_in_use),
        )

    return serve


def compare(
    model: str, requests: Sequence[Request], rounds: int, versions: Sequence[Version] = VERSIONS
) -> dict[Version, tuple[Answer, list[float]]]:
    """What each version answers, `generate` first, and the seconds of CPU time that it took in each round."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        reference = make_model(model, Path(directory))
        servers: dict[Version, Callable[[Sequence[Request]], Answer]] = {
            ALONE: lambda asked: alone(reference, asked),
            PADDED: lambda asked: padded(reference, asked),
        }
        checkpoint = "model=checkpoint", f"model.path={directory}"
        servers |= {version: engine_of(version, *checkpoint) for version in versions}
    warm_up = make_requests(2, 100, (20, 20), 2)
    for serve in servers.values():
        serve(warm_up)
    answers: dict[Version, Answer] = {}
    seconds: dict[Version, list[float]] = {version: [] for version in servers}
    for _ in range(rounds):  # in turn, so that a drift of the machine strikes all alike
        for version, serve in servers.items():
            start = time.process_time()
            answers[version] = serve(requests)
            seconds[version].append(time.process_time() - start)
    return {version: (answers[version], seconds[version]) for version in servers}


def table(found: dict[Version, tuple[Answer, list[float]]]) -> str:
    """The versions as Markdown, their times relative to `generate` of one request after another."""
    expected, base = found[ALONE][0].tokens, statistics.median(found[ALONE][1])
    columns = ("version", "what is new", "forward passes", "sequences at once", "CPU s", "times generate", "tokens")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for version, (answer, seconds) in found.items():
        median = statistics.median(seconds)
        same = "the same" if answer.tokens == expected else "**differ**"
        lines.append(
            f"| {version.name} | {version.adds} | {answer.passes:,} | {answer.together} "
            f"| {median:.2f} | {base / median:.2f} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_mini", help="a file of conf/model")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs=2, default=(64, 320), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--outputs", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--figures", type=Path, help="draw the block tables of each version into this directory")
    options = parser.parse_args()

    requests = make_requests(options.requests, 512, tuple(options.prompts), options.outputs)
    found = compare(options.model, requests, options.rounds)
    shortest, longest = options.prompts
    print(
        f"{options.model}, float32, one thread of {processor()}: {options.requests} prompts of {shortest} to "
        f"{longest} tokens, {options.outputs} tokens each; medians of {options.rounds}\n"
    )
    print(table(found))
    print("\nFiles to read:")
    for version in VERSIONS:
        print(f"  {version.name:20} {version.file}")
    if options.figures:
        draw(options.figures)
    wrong = [version.name for version, (answer, _) in found.items() if answer.tokens != found[ALONE][0].tokens]
    if wrong:
        sys.exit(f"other tokens than generate's: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
