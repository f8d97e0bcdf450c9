"""A command line of vLLM's or SGLang's server given to kvlab: what its options are here."""

import shlex
from collections.abc import Iterator, Sequence

from kvlab.cli.known import kind_of, meant
from kvlab.errors import shown

#: Hydra's own options, which kvlab run takes.
_HYDRAS = frozenset(
    ("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion", "info",
     "config-path", "config-name", "config-dir", "experimental-rerun")
)  # fmt: skip
_SHORT = ("-tp", "-dp")  # options of vLLM's
_SWITCHES = ("enable_", "disable_", "no_")  # how options without a value begin
_OTHERS = ("enforce_eager", "async_scheduling", "trust_remote_code")  # which have none either
_HERE = {  # options that are more, or less, than a setting with their value
    "disable_cuda_graph": "framework.cuda_graphs=false",
    "disable_radix_cache": "kv.prefix_sharing=false",
    "enforce_eager": "framework.cuda_graphs=false",
    "enable_expert_parallel": "executor.expert_parallel=N, as many as devices",
}
_VALUES = {("kv_cache_dtype", "fp8"): "fp8_e4m3"}
_NO_VALUES = {("chunked_prefill_size", "-1"): "prompts are always computed in chunks"}
_NOT_HERE = {  # why others are none
    "async_scheduling": "that of the framework's version is simulated",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "pipeline_parallel_size": "layers are not divided into stages",
    "speculative_config": "no simulation proposes tokens; engines that compute have scheduler.speculation.method",
}
_OF_SERVERS = ("host", "port", "api_key", "served_model_name")  # of kvlab serve, if at all
_GIB = ("swap_space",)  # their numbers are of GiB


def foreign(words: Sequence[str]) -> str | None:
    """The first of the `words` of a command line that is an option of another program."""
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.partition("=")[0] in _SHORT or (word.startswith("--") and name and name not in _HYDRAS):
            return word
    return None


def translated(words: Sequence[str]) -> str:
    """How such a command line is written here, in words; what has no setting behind it."""
    settings, nothing = list[str](), list[str]()
    for name, value in _options(words):
        here, why = _HERE.get(name), _NO_VALUES.get((name, value or ""), _NOT_HERE.get(name))
        if here is None and why is None and name not in _OF_SERVERS:
            here = _setting(name, value)
        if here is None:
            nothing.append(f"--{name.replace('_', '-')}" + (f" ({why})" if why else ""))
        else:
            settings.append(here)
    is_sglangs = any(word.startswith("sglang") for word in words)
    if is_sglangs:
        settings.append("framework=sglang")
    if (is_sglangs or "serve" in words) and not any(word.startswith("hardware=") for word in words):
        settings.append("hardware=NAME")
    said = f"write {' '.join(settings)}" if settings else ""
    lacking = f"there is no setting for {', '.join(nothing)}" if nothing else ""
    return "; ".join(filter(None, (said, lacking)))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Each option's name and value; of a server's command the model, which has no name, too."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "serve" and left and not left[0].startswith("-"):
            yield "model", left.pop(0)
        elif foreign([word]):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            is_switch = name.startswith(_SWITCHES) or name in _OTHERS
            if not equals and not is_switch and left and (left[0][:1] != "-" or left[0][1:].isdigit()):
                value = left.pop(0)
            yield name, value or None


def _setting(name: str, value: str | None) -> str | None:
    is_off = name.startswith("no_")
    key = meant(name.removeprefix("no_"))
    if key is None:
        return None
    if value is None:
        return f"{key}={str(not is_off).lower()}" if kind_of(key) is bool else f"{key}=..."
    value = _VALUES.get((name, value), value)
    return f"{key}={shlex.quote(shown(value))}{'GiB' if name in _GIB else ''}"
