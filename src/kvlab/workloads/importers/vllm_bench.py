"""Results of `vllm bench serve`, which have what the server did too."""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import DocumentImporter
from kvlab.workloads.trace_format import TracedRequest


@IMPORTERS.register("vllm_bench")
class VllmBenchImporter(DocumentImporter):
    """The file of `vllm bench serve --save-result --save-detailed`."""

    what: ClassVar[str] = "a result of vllm bench serve"
    begins, marks = "{", ('"request_throughput"',)
    expected = "lists of one length, of numbers"
    unknown: ClassVar[tuple[str, ...]] = ("prefixes",)
    in_order = False

    def of_document(self, document: Any) -> Iterator[TracedRequest]:
        names = ("input_lens", "output_lens", "ttfts", "itls")
        if missing := [name for name in names if not isinstance(document.get(name), list)]:
            raise self.error(f"has no {missing[0]}; save it with vllm bench serve --save-result --save-detailed")
        starts = document.get("start_times") or [None] * len(document["input_lens"])
        for start, prompt, output, ttft, itls in zip(starts, *(document[name] for name in names), strict=True):
            times = [time * 1000 for time in itls]
            e2el_ms = ttft * 1000 + sum(times)
            yield TracedRequest(prompt, start, output, ttft_ms=ttft * 1000, e2el_ms=e2el_ms, itl_ms=times)
