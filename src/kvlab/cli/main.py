"""`kvlab`: one name for all commands. It imports none of them before one is chosen."""

import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import NamedTuple

from kvlab.cli.output import lasting_output
from kvlab.cli.settings import fail
from kvlab.errors import nearest


class Command(NamedTuple):
    """What the help page says of a command. Its code is `main` of `module_of` its name."""

    purpose: str
    example: str


COMMANDS = {
    "run": Command("serve a workload once, or with -m, sweep= or repeats= many times", "kv=paged workload=burst16"),
    "generate": Command("one answer of a model, word by word", 'model=smollm2_135m "Why is the sky blue?"'),
    "chat": Command("talk to a model; the conversation stays in the KV cache", "model=smollm2_135m"),
    "fetch": Command("bring a published model to this machine, once", "smollm2"),
    "advise": Command("what to change: from traffic to a plan", "workload=azure model=llama3_1_8b hardware=l40s"),
    "tune": Command("search the best batch and pool within a memory", "optimize=latency/e2el_ms_p99 memory=2GiB"),
    "import": Command("traffic of your own as a workload: logs, tables, results", "requests.csv to=mine.jsonl"),
    "record": Command("pass a server's traffic through, and write a trace of it", "upstream=http://127.0.0.1:8000"),
    "watch": Command("what a running server's prefix cache has and loses", "events=tcp://127.0.0.1:5557"),
    "explain": Command("why requests took so long, and what would have helped", "run=outputs/... slowest=10"),
    "report": Command("compare runs, with intervals and verdicts", "outputs/a outputs/b"),
    "export": Command("a run as a benchmark report of llm-d", "outputs/... to=report.yaml"),
    "capacity": Command("how many sequences fit in a memory", "model=qwen3_4b memory=16GiB"),
    "replay": Command("what each eviction policy finds again, and the optimum", "workload=multi_turn"),
    "calibrate": Command("fit the time of a step to recorded runs, to simulate with", "outputs/a outputs/b"),
    "roofline": Command("what this machine sustains, and how much of it a run reached", "run=outputs/a"),
    "serve": Command("answer OpenAI's protocol over HTTP", "model=smollm2_135m server.port=8000"),
    "route": Command(
        "one address for several servers, and a router among them", "'upstreams=[http://a:8000,http://b:8000]'"
    ),
    "peers": Command("make an environment for another engine", "install vllm"),
    "ui": Command("open the tracked runs in the browser", "--port 5000"),
}
#: What other programs call commands, and what these are here.
_MEANT = {
    **dict.fromkeys(("bench", "benchmark", "simulate", "sweep"), "run"),
    **dict.fromkeys(("compare", "diff"), "report"),
    **dict.fromkeys(("download", "pull"), "fetch"),
    **dict.fromkeys(("optimize", "search"), "tune"),
    "complete": "generate",
    "router": "route",
}
_COMPLETED = ("run", "tune", "capacity")  # those that take the settings of a run


def module_of(command: str) -> str:
    """The module of a command: its name, with an underscore behind a keyword."""
    return f"kvlab.cli.{command}{'_' * iskeyword(command)}"


def help_page() -> str:
    """Every command with its purpose and an example."""
    lines = [
        "kvlab: a laboratory for KV-cache memory in LLM serving",
        "",
        "usage: kvlab COMMAND [SETTING=VALUE ...]",
        "",
    ]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<14}{command.purpose}", f"  {'':<14}  kvlab {name} {command.example}"]
    lines += [
        "",
        "kvlab COMMAND --help lists its settings. Results and the tracking store go to the working directory.",
        'Completion in bash: eval "$(kvlab run -sc install=bash)"',
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command that the first argument names, with the others as its command line."""
    program, *arguments = sys.argv
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        with lasting_output():  # also for `kvlab --help | head`
            print(help_page())
    elif name == "--version":
        import kvlab

        print(f"kvlab {kvlab.__version__}")
    elif name in ("-sc", "--shell-completion") or name.startswith("--shell-completion="):
        _complete()
    elif name in COMMANDS:
        sys.argv = [program, *arguments[1:]]
        try:
            import_module(module_of(name)).main()
        except KeyboardInterrupt:  # while it was imported: a command that has begun says what it leaves
            sys.exit(130)
    else:
        question = "did you mean {}? "
        hint = question.format(_MEANT[name]) if name in _MEANT else nearest(name, COMMANDS, question)
        fail(f"{name}: no such command; {hint}there are: {', '.join(COMMANDS)}")


def _complete() -> None:
    """Answer Hydra's completion script, which calls `kvlab` without the command that the line names."""
    program, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    command, space, settings = rest.lstrip().partition(" ")
    asks = any("query=" in argument for argument in sys.argv)
    if asks and not space:
        print(" ".join(COMMANDS))
    elif not asks or command in _COMPLETED:
        os.environ["COMP_LINE"] = f"{program} {settings}"
        import_module("kvlab.cli.run").main()
