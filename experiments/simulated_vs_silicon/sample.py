"""The rows of the package's sample of measured deployments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from csv import DictReader
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

_DATED = re.compile(r"source_file=(\d{4}-\d\d-\d\d|kimi|qwen3\.5)|db-dump")  # InferenceMAX's
_CLIENT = re.compile(r"silicon_concurrency=(\d+)")


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
        for each in DictReader(file):
            if each["mode"] != "agg":
                continue
            source, replicas = each["silicon_data_source"], _count(each, "attention_dp_size")
            client, is_published = _CLIENT.search(source), _DATED.match(source) is not None
            yield Row(
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
                float(each["silicon_ttft_ms"]),
                float(each["silicon_tpot_ms"]),
            )


def _count(each: Mapping[str, str], key: str) -> int:
    return int(float(each[key] or 1)) or 1


def _division(each: Mapping[str, str], is_published: bool) -> tuple[int, int, int]:
    """Devices that share a sequence, groups of such, and devices that share experts by number.

    InferenceMAX's scripts divide experts among all devices or not at all (`--ep-size`), and with DP_ATTENTION
    nothing but sequences. The sample multiplies their TP by EP, once or twice: 64 for what ids call tp8_ep8.
    """
    tensor, data, experts = (_count(each, key) for key in ("tp_size", "attention_dp_size", "moe_ep_size"))
    if experts == 1 or not is_published:
        return tensor, data, experts
    devices = tensor if min(tensor, data) > 1 else experts
    return (devices, 1, devices) if data == 1 else (1, devices, devices)


def sample() -> Path:
    """The package's file of measured deployments."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the measured deployments of aiconfigurator-core: pip install 'kvlab[silicon]'")
    return Path(spec.origin).parent / "systems" / "silicon_sample.csv"
