"""python -m src.capacity: how many sequences fit in a memory, with contiguous slots and with pages.

python -m src.capacity model=qwen3_4b memory=16GiB
python -m src.capacity model=qwen3_4b memory=16GiB kv.dtype=int8 executor.weights=int8 model.max_seq_len=8192
python -m src.capacity model=/models/llama memory=24GiB lengths=500,2000     a directory, or its config.json

Any setting of `python -m src.run` may follow. Nothing is built and nothing is allocated.

  model=NAME|DIR|FILE  a choice of conf/model, a directory with a config.json, or that file
  memory=SIZE          of the device, for weights, cache and working memory; without it, what this machine has free
  kv.memory=SIZE       of the cache alone, instead (or kv.num_blocks=N)
  lengths=N,N,...      mean lengths in tokens; 256, doubled up to model.max_seq_len, unless given
  --json, json=true    every figure, and what it was computed from, as JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.commands import run_command
from kvlab.config import RunConfig, parse_bytes
from kvlab.errors import ConfigError
from kvlab.paths import CONF

if TYPE_CHECKING:
    from kvlab.lab.capacity import CapacityPlan


@dataclass
class Question:
    """What the command line asks."""

    overrides: list[str] = field(default_factory=list)  # for Hydra
    memory: int | None = None
    lengths: list[int] | None = None
    as_json: bool = False


def read_arguments(arguments: Sequence[str]) -> Question:
    """Take the planner's own settings out, and make a model's path a choice. Raises ConfigError."""
    question = Question()
    for argument in arguments:
        key, _, value = argument.partition("=")
        if argument == "--json":
            question.as_json = True
        elif argument.startswith("-"):
            raise ConfigError("option", argument, "unknown; known: --json, --help, and settings as key=value")
        elif key == "json":
            question.as_json = _boolean(value)
        elif key == "memory":
            question.memory = parse_bytes(value, key="memory")
            if question.memory == 0:
                raise ConfigError("memory", value, "must be more than 0 bytes")
        elif key == "lengths":
            question.lengths = [_length(text) for text in value.strip("[]").split(",")]
        elif key == "model":
            question.overrides += _model(value)
        else:
            question.overrides.append(argument)
    return question


def _boolean(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError("json", value, "is true or false")
    return value.lower() == "true"


def _length(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError("lengths", text, "mean lengths are whole numbers of tokens from 1 on, such as 256,512")
    return int(text)


def _model(value: str) -> list[str]:
    """The overrides for a model's name or path."""
    known = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
    if value in known:
        return [f"model={value}"]
    path = Path(value).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = "has no config.json" if path.is_dir() else "unknown"
        raise ConfigError(
            "model", value, f"{missing}; known: {', '.join(known)}; or the path of a config.json or its directory"
        )
    if file.name != "config.json":
        raise ConfigError("model", value, "a model's configuration is called config.json; rename it")
    parent = file.resolve().parent
    return ["model=checkpoint", f"model.path={_quoted(str(parent))}", f"model.name={_quoted(parent.name)}"]


def _quoted(text: str) -> str:
    """Text that Hydra takes as it is."""
    return "'" + text.replace("'", "\\'") + "'"


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run with these settings. Raises ConfigError with Hydra's reason."""
    from kvlab.cli.compose import compose_run

    try:
        return compose_run(overrides).config
    except ConfigError as error:
        if "Ambiguous value" in str(error):
            text = "the planner does not sweep: give one value"
            raise ConfigError("settings", " ".join(overrides), text) from error
        raise


def plan(question: Question) -> CapacityPlan:
    """Answer the question. Raises a KvlabError."""
    from kvlab.engine.build import resolve_device
    from kvlab.lab.capacity import plan_capacity
    from kvlab.lab.machine import available_memory
    from kvlab.lab.model_file import check_model_file

    config = compose_config(question.overrides)
    if config.model.path is not None:
        file = Path(config.model.path).expanduser() / "config.json"
        if file.is_file():  # else the id of a hub, or an error with a name of its own
            check_model_file(file)
    # A GPU can be planned for where there is none.
    device = config.executor.device
    device = resolve_device("auto") if device == "auto" else device
    memory = question.memory
    if memory is None and config.kv.memory is None and config.kv.num_blocks is None:
        if device == "cuda" and resolve_device("auto") != "cuda":
            raise ConfigError("memory", None, "there is no CUDA device here; say how much one has: memory=80GiB")
        memory = available_memory(device)
    return plan_capacity(config, device=device, memory=memory, lengths=question.lengths)


def show(found: CapacityPlan) -> None:
    """Print the figures."""
    from rich.console import Console
    from rich.table import Table

    from kvlab.lab.capacity_text import capacity_lines, capacity_table, closing_notes

    console = Console()
    model = found.model
    console.print(
        f"[bold]{found.name}[/]: {model.num_layers} layers, {model.num_heads} query heads over "
        f"{model.num_kv_heads} KV heads of {model.head_dim}, {model.num_parameters / 1e6:,.0f} M parameters\n",
        highlight=False,
    )
    lines = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("left", "right", "left"):
        lines.add_column(justify=justify)
    for line in capacity_lines(found):
        lines.add_row(*line)
    console.print(lines)
    console.print()
    console.print(capacity_table(found))
    for note in closing_notes(found):
        console.print(f"[dim]{note}[/]", highlight=False)


def answer(arguments: list[str]) -> int:
    """Read the command line, plan, tell. Returns the exit code. Raises a KvlabError."""
    question = read_arguments(arguments)
    found = plan(question)
    if question.as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(found)
    return 0


def main() -> None:
    """Run the command line."""
    run_command(__doc__, answer)


if __name__ == "__main__":
    main()
