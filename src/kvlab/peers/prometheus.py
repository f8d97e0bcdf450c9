"""What servers say at /metrics, under the names that vLLM, SGLang, llama.cpp and text-generation-inference use."""

from collections.abc import Sequence
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvlab.engine.protocol import EngineSeries

#: Column of the series: the names it has on pages.
COLUMNS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_COLUMN = {name: column for column, names in COLUMNS.items() for name in names}
_CACHE = "vllm:cache_config_info"
_KEPT = tuple(name.encode() for name in (*_COLUMN, _CACHE))


def kept_lines(page: bytes) -> bytes:
    """The lines of a page that are read later: a page has a thousand, and reading it all would delay requests."""
    return b"\n".join(line for line in page.split(b"\n") if line.startswith(_KEPT))


def read_series(pages: Sequence[tuple[float, bytes]]) -> EngineSeries:
    """The series of kept lines, each with its time; columns that are on every page. Counts of several models or
    processes are added, shares averaged.
    """
    series: dict[str, list[float]] = {}
    for number, (_, page) in enumerate(pages):
        values: dict[str, list[float]] = {}
        for sample in _samples(page):
            column = _COLUMN.get(sample[0].removesuffix("_total"))
            if column is not None:
                values.setdefault(column, []).append(sample[2])
        for column, counts in values.items():
            value = sum(counts) / len(counts) if column == "kv_usage" else sum(counts)
            if len(series.setdefault(column, [])) == number:
                series[column].append(value)
    columns = {name: series[name] for name in COLUMNS if name in series and len(series[name]) == len(pages)}
    return EngineSeries([when for when, _ in pages], columns)


def cache_slots(page: bytes) -> int | None:
    """Token slots of the KV cache, where a page tells its blocks."""
    for _, labels, _ in _samples(page):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdigit() and size.isdigit():
            return int(blocks) * int(size)
    return None


def block_tokens(page: bytes) -> int | None:
    """Tokens of a block of the KV cache, where a page tells them."""
    sizes = [labels.get("block_size", "") for _, labels, _ in _samples(page)]
    return next((int(size) for size in sizes if size.isdigit()), None)


def _samples(page: bytes) -> list[tuple[str, dict[str, str], float]]:
    """Names, labels and values; of a page that is no metrics, none."""
    try:
        families = list(text_string_to_metric_families(page.decode(errors="replace") + "\n"))
    except ValueError:
        return []
    return [(row.name, dict(row.labels), float(row.value)) for family in families for row in family.samples]
