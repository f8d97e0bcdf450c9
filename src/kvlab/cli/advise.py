"""kvlab advise: what to change, from traffic to a plan: what each change gains and costs, and how sure that is.

kvlab advise workload=recorded workload.path=monday.jsonl model=llama3_1_8b hardware=l40s
kvlab advise workload=mooncake workload.path=conversation.jsonl model=llama3_1_8b hardware=h100_sxm devices=8
kvlab advise ... slo.ttft_ms=500 slo.tpot_ms=50 devices=8 price_per_hour=2.5
kvlab advise ... current=today.yaml                           settings of kvlab run, as a file

Settings of `kvlab run` say what is served today: those of the framework's server unless given; with devices= and
without fleet.replicas= and executor.tensor_parallel= as many replicas as they hold. Service levels decide what is
better; without them the mean time of a request, or output tokens per second where all come at once.

Changes are chosen on one half of the traffic and reported on the other; of drawn workloads on another draw. Changes
within the error are no difference. The same command goes on where it was stopped, and comes to the same.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.known import known_keys
from kvlab.cli.launchers import check_installed, launched
from kvlab.cli.settings import command
from kvlab.errors import CapacityError, ConfigError, OutputError
from kvlab.lab.advice_line import REFUSED
from kvlab.lab.advise.settings import AdviseSettings
from kvlab.lab.settings import as_word, flatten, key_of

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.lab.advise.advice import Advice
    from kvlab.lab.terminal import Terminal

_LAYOUT = ("fleet.replicas", "executor.tensor_parallel")


def words_of(settings: AdviseSettings, words: list[str]) -> list[str]:
    """The words of the run that advice is about. Raises ConfigError."""
    if settings.current is not None:
        given = {key_of(word) for word in words}
        words = [word for word in current_words(settings.current) if key_of(word) not in given] + words
    keys = {key_of(word) for word in words}
    for word in words:
        if key_of(word) in REFUSED:
            text = "has no place in advice, which makes its own runs"
            raise ConfigError(key_of(word), word.partition("=")[2], text)
    _check_kept(settings.keep)
    if not {"hardware", "fleet.groups"} & keys:  # groups may name theirs
        text = "advice is simulated: name a device, as hardware=h100_sxm (kvlab run --help lists them)"
        raise ConfigError("hardware", None, text)
    if "executor" not in keys:
        words = ["executor=simulated", *words]
    return words


def _check_kept(keys: list[str]) -> None:
    """Raise ConfigError for a setting that there is none of."""
    settings, sections, is_open = known_keys()
    for key in keys:
        if key not in (*settings, *sections) and not key.startswith((*is_open, "fleet.groups.")):
            text = "is none of the settings that advice changes; write keys as kv.dtype, or kv for all of its"
            raise ConfigError("keep", key, text)


def current_words(file: str) -> list[str]:
    """The settings of a YAML file. Raises ConfigError."""
    import yaml

    path = Path(file)
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = f"{path.name} cannot be read: {error.strerror}; name a YAML file of settings of kvlab run"
        raise ConfigError("current", file, text) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("current", file, f"is no YAML: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        return [as_word(key, value) for key, value in flatten(found).items()]
    if isinstance(found, list) and all(isinstance(word, str) and "=" in word for word in found):
        return found
    raise ConfigError("current", file, "has no settings; write them as scheduler.max_batched_tokens: 8192")


def compose_today(settings: AdviseSettings, words: list[str]) -> tuple[RunConfig, list[str], str]:
    """Today's configuration, its words, and what was taken where nothing was said. Raises a KvlabError."""
    from kvlab.cli.compose import compose_run
    from kvlab.lab.run.plan import plan_run
    from kvlab.peers.engines import is_peer

    config = compose_run(words).config
    if is_peer(config.engine.kind):
        raise ConfigError("engine", config.engine.kind, "advice has kvlab's own engine; leave engine= out")
    if config.fleet.groups:
        return *_with_counts(settings, config, words), ""
    most = settings.most_devices
    if most is None or {key_of(word) for word in words} & set(_LAYOUT):
        return config, words, ""
    problem, requests = None, None
    for parallel in (number for number in (1, 2, 4, 8, 16) if number <= most):
        layout = [f"fleet.replicas={most // parallel}", f"executor.tensor_parallel={parallel}"]
        config = compose_run([*words, *layout]).config
        try:
            requests = plan_run(config, requests).requests  # with room for the longest
        except CapacityError as error:
            problem = error
            continue
        replicas = config.fleet.replicas
        behind = f" behind fleet.router={config.fleet.router}" if replicas > 1 else ""
        text = f"no layout was given: {replicas} replica{'s' * (replicas != 1)} of {parallel} device(s){behind}"
        return config, [*words, *layout], text
    raise ConfigError("devices", most, f"are too few: {problem}")


def _with_counts(settings: AdviseSettings, config: RunConfig, words: list[str]) -> tuple[RunConfig, list[str]]:
    """The configuration of groups, and its words, where each group has a count of its own, so that one can be
    changed and nothing contradicts it. Raises ConfigError for a price of unlike devices.
    """
    from kvlab.cli.compose import compose_run
    from kvlab.lab.advise.parts import parts_of

    groups, parts = config.fleet.groups, config.fleet.parts
    in_order = sorted(range(len(groups)), key=lambda number: groups[number].get("role") == "decode")
    counts = {number: part.replicas for number, part in zip(in_order, parts, strict=True) if part.grows}
    follow = ("fleet.replicas", "fleet.prefill") if parts[0].role else ("fleet.replicas",)
    kept = [word for word in words if key_of(word) not in follow]
    words = [*kept, *(f"fleet.groups.{number}.count={count}" for number, count in counts.items())]
    config = compose_run(words).config
    kinds = sorted({part.hardware for part in parts_of(config)})
    if settings.price_per_hour is not None and len(kinds) > 1:
        text = f"is of one device, and fleet.groups has {' and '.join(kinds)}; leave it out"
        raise ConfigError("price_per_hour", settings.price_per_hour, text)
    return config, words


def _advice(
    settings: AdviseSettings, words: list[str], console: Terminal
) -> tuple[Advice, RunConfig, Path, list[OutputError]]:
    """Advice, of which configuration, where its files go, and which of them cannot be written."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from kvlab import __version__
    from kvlab.lab.advise.adviser import Adviser
    from kvlab.lab.files import check_directory
    from kvlab.lab.results.provenance import config_digest, digest_of

    launcher = [word for word in words if key_of(word).startswith(("hydra/launcher", "hydra.launcher"))]
    check_installed(launcher)
    config, words, layout = compose_today(settings, [word for word in words if word not in launcher])
    kept = (settings.minutes, settings.most_devices, sorted(settings.keep), __version__)
    parts = (config_digest(config), *kept)
    name = f"{config.model.name}-{config.workload.name}-{digest_of(str(parts))[:8]}"
    directory = Path(settings.output).expanduser() / name
    check_directory("output", directory)
    columns = (*Progress.get_default_columns()[:1], TextColumn("{task.fields[state]}"), TimeElapsedColumn())
    # No thread may draw while processes are made, which would have its locks.
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_interactive
    ) as progress:
        bar = progress.add_task("reading the traffic", total=None, state="")

        def told(stage: str, done: int, best: str) -> None:
            state = f"{done} simulations" + (f"; best so far {best}" if best else "")
            progress.update(bar, description=stage, state=state, refresh=True)

        progress.refresh()
        spread = partial(launched, words=launcher, directory=directory / "launched") if launcher else None
        noted = [layout] if layout else []
        file = directory / "simulations.jsonl"
        adviser = Adviser(config, words, settings, file, told, spread, noted)
        return adviser.advise(), config, directory, adviser.simulations.unwritten


@command(__doc__, AdviseSettings, bare=False)
def main(settings: AdviseSettings, words: list[str]) -> int:
    words = words_of(settings, words)
    from kvlab.lab.advise.page import write_page
    from kvlab.lab.advise.text import show
    from kvlab.lab.advise.tracked import track
    from kvlab.lab.files import attempt, sentences, write_text
    from kvlab.lab.terminal import Terminal, warn

    console = Terminal(stderr=settings.json)
    try:
        advice, config, directory, errors = _advice(settings, words, console)
    except KeyboardInterrupt:
        console.print("interrupted: what was simulated is kept; the same command goes on from there")
        return 130
    text, page = json.dumps(advice.as_dict(), indent=2), directory / "advice.html"
    if settings.json:
        print(text)
    else:
        show(advice, console)
    with attempt(errors):
        write_text(directory / "advice.json", text + "\n")
    with attempt(errors):
        write_page(advice, page)
        if not settings.json:
            console.print(f"page: {page}", soft_wrap=True)
    track(advice, config.tracking, directory)
    warn(*sentences(errors))
    return 1 if errors else 0
