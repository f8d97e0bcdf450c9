"""Requests of OpenAI's API as JSON lines or a JSON list: bodies, or the lines of a batch file with them."""

from collections.abc import Iterator
from typing import Any, ClassVar

from kvlab.core import limits
from kvlab.errors import shown
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import JsonLinesImporter
from kvlab.workloads.importers.table import arrival_of, seconds_of
from kvlab.workloads.prompt_blocks import most_tokens, prompts_of
from kvlab.workloads.trace_format import TracedRequest
from kvlab.workloads.traces import Place


@IMPORTERS.register("openai")
class OpenAIImporter(JsonLinesImporter):
    """Text is hashed and forgotten."""

    what: ClassVar[str] = "requests of OpenAI's API"
    expected = "a JSON object with a request of OpenAI's API"
    reads_text: ClassVar[bool] = True

    @classmethod
    def recognises(cls, head: str) -> bool:
        head = head.lstrip()
        seen = head if head.startswith("[") else head.partition("\n")[0]
        return seen.startswith(("{", "[")) and any(f'"{name}":' in seen for name in ("messages", "body", "prompt"))

    def of_line(self, place: Place, row: dict[str, Any]) -> Iterator[TracedRequest]:
        body = row.get("body", row)
        if not isinstance(body, dict) or all(body.get(name) is None for name in ("messages", "prompt")):
            raise place.error("has neither messages nor a prompt; expected a request of OpenAI's API")
        # What the server counted is in a field of its own, or in the response, as LiteLLM logs it.
        response = row.get("response")
        usage = row.get("usage") or (response.get("usage") if isinstance(response, dict) else None) or {}
        session = row.get("session_id") or body.get("user")
        prompts, samples = prompts_of(body) or [""], 1 if body.get("n") is None else body["n"]
        if type(samples) is not int or not 1 <= samples <= limits.MAX_SAMPLES:
            raise place.error(f"n is {shown(samples, repr)}; expected 1 to {limits.MAX_SAMPLES} samples")
        output, count = usage.get("completion_tokens"), samples * len(prompts)
        if output != 0 and type(usage.get("prompt_tokens")) is int:
            self.counted += samples * usage["prompt_tokens"]
        column = arrival_of(tuple(name for name in row if row[name] is not None))
        arrival_s = None if column is None else seconds_of(place, row[column], column, self.options.unit)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") if len(prompts) == 1 else None
        for index, prompt in enumerate(prompts):
            tokens, hashes = self.options.hasher.prompt(prompt, self.options.encode)
            for number in range(index * samples, (index + 1) * samples):
                # Of several answers the usage is that of all.
                share = output if count == 1 or output is None else (output + number) // count
                yield TracedRequest(
                    tokens,
                    arrival_s,
                    share,
                    hashes,
                    session=None if session is None else str(session),
                    max_tokens=most_tokens(body),
                    temperature=body.get("temperature"),
                    cached_tokens=None if number else cached,
                )
