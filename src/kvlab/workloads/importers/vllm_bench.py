"""Results of `vllm bench serve`, which have what the server did too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvlab.errors import WorkloadError, shown
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import Importer
from kvlab.workloads.lines import read_document
from kvlab.workloads.trace_format import TracedRequest


@IMPORTERS.register("vllm_bench")
class VllmBenchImporter(Importer):
    """The file of `vllm bench serve --save-result --save-detailed`."""

    what: ClassVar[str] = "a result of vllm bench serve"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)

    @staticmethod
    def recognises(head: str) -> bool:
        return head.lstrip().startswith("{") and '"request_throughput"' in head

    def requests(self) -> Iterator[TracedRequest]:
        path = self.options.path
        found = read_document(path)
        names = ("input_lens", "output_lens", "ttfts", "itls")
        if missing := [name for name in names if not isinstance(found.get(name), list)]:
            text = f"has no {missing[0]}; save it with vllm bench serve --save-result --save-detailed"
            raise WorkloadError(f"{shown(path)}: {text}")
        starts = found.get("start_times") or [None] * len(found["input_lens"])
        try:
            rows = list(zip(starts, *(found[name] for name in names), strict=True))
            rows.sort(key=lambda row: row[0] or 0.0)
            for start, prompt, output, ttft, itls in rows:
                e2el = (ttft + sum(itls)) * 1000
                times = [each * 1000 for each in itls]
                yield TracedRequest(prompt, start, output, ttft_ms=ttft * 1000, e2el_ms=e2el, itl_ms=times)
        except (TypeError, ValueError) as error:
            raise WorkloadError(f"{shown(path)}: its lists are not of one length, or no numbers") from error
