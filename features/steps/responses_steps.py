"""Steps of /v1/responses, and of the routes for gateways and operators."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
from pytest_bdd import parsers, then, when

from features.steps.http_steps import Exchange
from features.steps.smollm2 import Client


@when(
    parsers.parse('OpenAI\'s client asks for a response to "{text}" of at most {count:d} tokens'),
    target_fixture="response",
)
def ask_response(client: Client, text: str, count: int) -> Any:
    return client.sdk.responses.create(model="smollm2_135m", input=text, max_output_tokens=count, temperature=0)


@when(
    parsers.parse('OpenAI\'s client streams a response to "{text}" of at most {count:d} tokens'),
    target_fixture="response_events",
)
def stream_response(client: Client, text: str, count: int) -> list[Any]:
    options: Any = {"max_output_tokens": count, "temperature": 0, "stream": True}
    return list(client.sdk.responses.create(model="smollm2_135m", input=text, **options))


@then(parsers.parse('the response is {status}, says "{text}", and counts {prompt:d} and {output:d} tokens'))
def whole_response(response: Any, status: str, text: str, prompt: int, output: int) -> None:
    assert (response.status, response.output_text) == (status, text)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (prompt, output)
    assert (response.incomplete_details is None) == (status == "completed")


@then(parsers.parse("its events are {names}, {count:d} deltas, {rest}"))
def event_names(response_events: list[Any], names: str, count: int, rest: str) -> None:
    expected = [*names.split(", "), *["output_text.delta"] * count, *rest.split(", ")]
    assert [event.type.removeprefix("response.") for event in response_events] == expected
    assert [event.sequence_number for event in response_events] == list(range(len(expected)))


@then(parsers.parse('the deltas join to "{text}"'))
def deltas(response_events: list[Any], text: str) -> None:
    joined = "".join(event.delta for event in response_events if event.type == "response.output_text.delta")
    assert joined == text == response_events[-1].response.output_text


@then("/ping is ready, /load counts 0 requests, /server_info has the model, and /tokenizer_info the chat template")
def operations(client: Client) -> None:
    url = client.served.url
    assert httpx.get(f"{url}/ping").json() == {"status": "ready"}
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    assert httpx.get(f"{url}/server_info").json()["model"]["id"] == "smollm2_135m"
    tokenizer = httpx.get(f"{url}/tokenizer_info").json()
    assert "<|im_start|>" in tokenizer["chat_template"]
    assert tokenizer["eos_token"] == "<|im_end|>"


@then(parsers.parse("its log-probabilities are of {prompt:d} tokens of the prompt and {answer:d} of the answer"))
def echoed_logprobs(exchange: Exchange, prompt: int, answer: int) -> None:
    logprobs = exchange.reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == prompt + answer
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == exchange.reply.text


@then(parsers.parse('"{token}" is the likeliest token in its place'))
def likeliest_in_its_place(exchange: Exchange, token: str) -> None:
    logprobs = exchange.reply.choices[0].logprobs
    place = logprobs.tokens.index(token)
    assert logprobs.top_logprobs[place] == {token: logprobs.token_logprobs[place]}


@then(parsers.parse("each token of the prompt but the first has its log-probability and {count:d} alternatives"))
def scored_prompt(exchange: Exchange, count: int) -> None:
    first, *entries = exchange.reply.choices[0].prompt_logprobs
    assert first is None
    assert len(entries) == exchange.reply.usage.prompt_tokens - 1
    for entry in entries:
        assert count <= len(entry) <= count + 1
        assert sorted(alternative["rank"] or 99 for alternative in entry.values())[:count] == [*range(1, count + 1)]
