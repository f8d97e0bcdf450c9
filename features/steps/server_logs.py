"""What servers log of the requests that they answered, as tests of imports write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def otel_span(row: tuple[float, int, int, list[int]]) -> dict[str, Any]:
    at, prompt, output, _ = row
    numbers = {"gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": output}
    attributes = [{"key": name, "value": {"intValue": str(value)}} for name, value in numbers.items()]
    attributes.append({"key": "gen_ai.latency.time_to_first_token", "value": {"doubleValue": 0.0095}})
    times = {"startTimeUnixNano": str(int(at * 1e9)), "endTimeUnixNano": str(int(at * 1e9) + 10**8)}
    return {"name": "llm_request", **times, "attributes": attributes}


def agent_spans() -> dict[str, Any]:
    """Of an agent that calls a model twice: its own span has the sum, and a client's the server's below it. And one
    of embeddings; one attribute is empty.
    """
    spans = []
    for name, parent, kind, prompt, output in (
        ("agent", "", "invoke_agent", 144, 12),
        ("one", "agent", "chat", 48, 3),
        ("post", "one", "", 0, 0),
        ("server", "post", "", 48, 3),
        ("two", "agent", "chat", 96, 9),
        ("words", "agent", "embeddings", 7, 0),
    ):
        at = 12.0 if name == "two" else 10.0
        span = otel_span((at, prompt, output, [])) | {"traceId": "t", "spanId": name, "parentSpanId": parent}
        span["attributes"] += [
            {"key": "gen_ai.operation.name", "value": {"stringValue": kind}},
            {"key": "gen_ai.request.seed", "value": {}},
        ]
        spans.append(span)
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}, {}]}]}


def vllm_lines(number: int, row: tuple[float, int, int, list[int]]) -> str:
    """What vLLM 0.32 logs of a request, times in whole seconds."""
    at, prompt, output, _ = row
    name, when = f"cmpl-{number:032x}", f"11-16 18:15:{int(at):02}"
    tokens, given = (str(list(range(count))) for count in (prompt, output))
    return (
        f"(APIServer pid=7) DEBUG {when} [request_logger.py:54] Request {name}-0 details: prompt: 'Hi: there, "
        f"params: a', prompt_token_ids: {tokens}, prompt_embeds shape: None.\n"
        f"(APIServer pid=7) INFO {when} [request_logger.py:64] Received request {name}-0: params: "
        "SamplingParams(n=1, temperature=0.7, max_tokens=9, logprobs=None), lora_request: None.\n"
        f"(APIServer pid=7) DEBUG {when} [request_logger.py:97] Generated response {name} (streaming complete) "
        f"details: output_token_ids: {given}\n"
        f"(APIServer pid=7) INFO {when} [request_logger.py:103] Generated response {name} (streaming complete): "
        "output: 'x', finish_reason: stop\n"
    )


def vllm_chats(rows: list[tuple[float, int, int, list[int]]]) -> Iterator[str]:
    """What vLLM 0.32 logs of chats whose ids end with numbers: streams part by part, the last line of each without
    tokens, and of the last one two samples that are no stream. Between them a call of /tokenize.
    """
    for number, (_, prompt, output, _) in enumerate(rows):
        name, when = f"chatcmpl-load-{number}", f"01-01 00:00:0{number}" if number else "12-31 23:59:59"
        is_stream = number + 1 < len(rows)
        prompt_ids = list(range(prompt))
        yield f"DEBUG {when} [a.py:54] Request {name} details: prompt: 'n=7', prompt_token_ids: {prompt_ids}"
        params = f"SamplingParams(n={1 if is_stream else 2}, max_tokens=9)"
        yield f"INFO {when} [a.py:64] Received request {name}: params: {params}, lora_request: None."
        yield f"DEBUG {when} [a.py:54] Request tokenize-{number} details: prompt: 'a', prompt_token_ids: [1, 2]"
        yield f"INFO {when} [a.py:64] Received request tokenize-{number}: params: None, lora_request: None."
        parts = [[token] for token in range(output)] if is_stream else [list(range(output - 1)), [0]]
        kind = " (streaming delta)" if is_stream else ""
        for tokens in parts:
            yield f"DEBUG {when} [a.py:97] Generated response {name}{kind} details: output_token_ids: {tokens}"
            yield f"INFO {when} [a.py:103] Generated response {name}{kind}: output: 'x', finish_reason: stop"
        if is_stream:
            end = f"Generated response {name} (streaming complete)"
            yield f"DEBUG {when} [a.py:97] {end} details: output_token_ids: None"
            yield f"INFO {when} [a.py:103] {end}: output: 'x', finish_reason: streaming_complete"
