"""The rows of the package's sample of measured deployments."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from csv import DictReader
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

_DATED = re.compile(r"source_file=(\d{4}-\d\d-\d\d|kimi|qwen3\.5)|db-dump")  # InferenceMAX's
_CLIENT = re.compile(r"silicon_concurrency=(\d+)")
_MEASURED = re.compile(r"measured=(\d{4}-\d\d-\d\d)")
_CONFIG = re.compile(r"config_id=(\d+)")
_REPLICATED = ("707", "727", "827")  # ids of MiniMax M2.5's configs with `dp-attn: true`
#: Days on which TensorRT-LLM's configs with `spec-decoding: mtp`, and no others of DeepSeek, were measured.
_SPECULATING = ("2026-01-14", "2026-02-05", "2026-02-06")
_BOTH = ("sglang", "b200_sxm", "fp8", "0.5.9", "8")  # measured on one day with and without: the dump has these


@dataclass(frozen=True)
class Row:
    """A deployment that was measured in a closed loop."""

    id: str
    model: str  # as the sample calls it, and the backend, its version and the system
    backend: str
    version: str
    system: str
    weights: str  # the type of the matrices; of experts where there are any
    experts: str
    prompt: int  # tokens
    output: int
    concurrency: int  # of the client
    tensor_parallel: int
    data_parallel: int  # replicas of the attention
    expert_parallel: int
    is_published: bool  # whether the procedure is InferenceMAX's
    measured: str  # on which day, as 2026-04-03; empty: not said
    is_speculative: bool  # whether it predicted several tokens at once
    ttft_ms: float
    tpot_ms: float

    @property
    def held_out(self) -> bool:
        """Whether errors are reported on it; coefficients are fitted on the others."""
        return self.crc % 2 == 1

    @cached_property
    def crc(self) -> int:
        """What chooses rows: a share of them by this is spread over all deployments."""
        return crc32(self.id.encode())

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.data_parallel


def rows() -> Iterator[Row]:
    """All that serve prompts and outputs on the same devices."""
    with sample().open(newline="") as file:
        every = [each for each in DictReader(file) if each["mode"] == "agg"]
        plain = {_figures(each) for each in every if each["silicon_data_source"].startswith("db-dump")}
        for each in every:
            source, replicas = each["silicon_data_source"], _count(each, "attention_dp_size")
            client, is_published = _CLIENT.search(source), _DATED.match(source) is not None
            row = Row(
                each["id"],
                each["model_path"],
                each["backend"],
                each["backend_version"],
                each["system"],
                each["gemm_quant_mode"] or "bfloat16",
                each["moe_quant_mode"],
                int(each["isl"]),
                int(each["osl"]),
                int(client[1]) if client else int(float(each["batch_size"])) * replicas,
                *_division(each, is_published),
                is_published,
                _found(_MEASURED, source),
                _is_speculative(each, plain),
                *_figures(each),
            )
            yield _as_scripted(row)


def _figures(each: Mapping[str, str]) -> tuple[float, float]:
    return float(each["silicon_ttft_ms"]), float(each["silicon_tpot_ms"])


def _found(pattern: re.Pattern[str], source: str) -> str:
    found = pattern.search(source)
    return found[1] if found else ""


def _is_speculative(each: Mapping[str, str], plain: Container[tuple[float, float]]) -> bool:
    """By the day, and what InferenceMAX's configs had changed then. `plain` are figures of rows that are none."""
    day = _found(_MEASURED, each["silicon_data_source"])
    if each["backend"] == "trtllm":
        return day in _SPECULATING and "DeepSeek" in each["model_path"]
    keys = ("backend", "system", "precision", "backend_version", "tp_size")
    is_both = tuple(each[key] for key in keys) == _BOTH and "DeepSeek" in each["model_path"]
    return is_both and _figures(each) not in plain


def _count(each: Mapping[str, str], key: str) -> int:
    return int(float(each[key] or 1)) or 1


def _division(each: Mapping[str, str], is_published: bool) -> tuple[int, int, int]:
    """Devices that share a sequence, groups of such, and devices that share experts by number.

    InferenceMAX's scripts divide experts among all devices or not at all (`--ep-size`), and with DP_ATTENTION
    nothing but sequences. The sample multiplies their TP by EP, once or twice: 64 for what ids call tp8_ep8; and it
    has TP as DP too where vLLM's divided experts alone.
    """
    tensor, data, experts = (_count(each, key) for key in ("tp_size", "attention_dp_size", "moe_ep_size"))
    if experts == 1 or not is_published:
        return tensor, data, experts
    if min(tensor, data) > 1:
        data = data if _found(_CONFIG, each["silicon_data_source"]) in _REPLICATED else 1
        return (tensor, 1, tensor) if data == 1 else (1, tensor, tensor)
    return (experts, 1, experts) if data == 1 else (1, experts, experts)


def sample() -> Path:
    """The package's file of measured deployments."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the measured deployments of aiconfigurator-core: pip install 'kvlab[silicon]'")
    return Path(spec.origin).parent / "systems" / "silicon_sample.csv"


def _as_scripted(row: Row) -> Row:
    """Until November 2025 InferenceMAX's scripts chose the division themselves, which its data do not say: experts
    among all devices, and sequences too where there are many.
    """
    devices, is_deepseek = row.tensor_parallel, "DeepSeek" in row.model
    if not row.measured.startswith("2025-11") or not row.is_published or devices == 1:
        return row
    if row.backend == "sglang":
        return replace(row, expert_parallel=devices) if row.experts == "nvfp4" and is_deepseek else row
    if row.backend != "trtllm" or not (is_deepseek or row.system == "h200_sxm"):
        return row
    is_long = row.prompt == 8192
    if not is_deepseek:
        return replace(row, expert_parallel=devices)
    if row.experts == "nvfp4":
        experts = 33 if is_long or devices == 4 else 9 if row.output == 1024 else 17
        spread = 33 if is_long else 256
    else:
        experts, spread = 1, 33 if (row.prompt, row.output) == (1024, 1024) else 65
        if row.system == "h200_sxm":
            spread = 33 if is_long else 65
    if row.concurrency >= spread:
        return replace(row, tensor_parallel=1, data_parallel=devices, expert_parallel=devices)
    return replace(row, expert_parallel=devices) if row.concurrency >= experts else row
