"""Steps about answers that follow a schema, and about tools."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
from pytest_bdd import parsers, then, when

from features.steps.http_steps import Exchange
from features.steps.smollm2 import Client, Reply

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
ASKED = {"messages": [{"role": "user", "content": "Describe a person as JSON."}], "max_tokens": 60}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}},
]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


def is_person(text: str) -> bool:
    found = json.loads(text)
    return list(found) == ["name", "age"] and isinstance(found["name"], str) and isinstance(found["age"], int)


@when(parsers.re(r"it asks for a person as JSON, with (?P<fields>\{.*\})"))
def ask_person(client: Client, exchange: Exchange, fields: str) -> None:
    exchange.ask(client, "chat", {**ASKED, "response_format": AS_PERSON, **json.loads(fields)})


@then(parsers.parse('each of the {count:d} answers is a person, and ended by "{reason}"'))
def persons(exchange: Exchange, count: int, reason: str) -> None:
    texts, reasons = exchange.reply.texts, exchange.reply.reasons
    assert [is_person(text) for text in texts.values()] == [True] * count, texts
    assert list(reasons.values()) == [[reason]] * count


@then(parsers.parse('it gets a text like "{pattern}"'))
def gets_text_like(exchange: Exchange, pattern: str) -> None:
    assert re.fullmatch(pattern, exchange.reply.text, re.DOTALL), exchange.reply.text


@when("4 clients ask at once, of which every second wants a person as JSON", target_fixture="mixed_replies")
def mixed(client: Client) -> list[Reply]:
    free = {"messages": [QUESTION], "max_tokens": 24}
    asked = [free, {**ASKED, "response_format": AS_PERSON}] * 2
    with ThreadPoolExecutor(len(asked)) as pool:
        return [client.ask("chat", free), *pool.map(lambda fields: client.ask("chat", fields), asked)]


@then("each free answer is as alone, and each other is a person")
def mixed_answers(mixed_replies: list[Reply]) -> None:
    alone, *together = (reply.text for reply in mixed_replies)
    assert together[::2] == [alone] * 2
    assert all(map(is_person, together[1::2]))


@when("OpenAI's client asks for a response that is a person, of at most 60 tokens", target_fixture="response")
def ask_response_person(client: Client) -> Any:
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    options: Any = {"max_output_tokens": 60, "temperature": 0, "text": form}
    return client.sdk.responses.create(model="smollm2_135m", input="Describe a person as JSON.", **options)


@then("the response's text is a person")
def response_person(response: Any) -> None:
    assert is_person(response.output_text)


@when(parsers.re(r"it asks for the weather in Paris with tools, with (?P<fields>\{.*\})"))
def ask_with_tools(client: Client, exchange: Exchange, fields: str) -> None:
    asked = {"messages": [QUESTION], "max_tokens": 60, "tools": TOOLS, **json.loads(fields)}
    exchange.ask(client, "chat", asked)


def calls_of(reply: Reply) -> list[tuple[str, str]]:
    """Name and arguments of each call; of a stream as a client joins them."""
    names, arguments, ids = dict[int, str](), dict[int, str](), set[str]()
    for choice in reply.choices:
        said = getattr(choice, "message", None) or choice.delta
        for place, call in enumerate(said.tool_calls or ()):
            index = getattr(call, "index", place)
            names[index] = names.get(index, "") + (call.function.name or "")
            arguments[index] = arguments.get(index, "") + call.function.arguments
            ids |= {call.id} - {None}
    assert len(ids) == len(names)
    return [(names[index], arguments[index]) for index in sorted(names)]


@then("it calls get_weather for a city")
def calls_weather(exchange: Exchange) -> None:
    (name, arguments), *_ = calls_of(exchange.reply)
    assert name == "get_weather"
    assert list(json.loads(arguments)) == ["city"]
    assert exchange.reply.text == ""
    is_named = isinstance(exchange.fields[-1]["tool_choice"], dict)
    assert exchange.reply.reasons == {0: ["stop" if is_named else "tool_calls"]}


@then("it gets words and no call")
def words_alone(exchange: Exchange) -> None:
    assert exchange.reply.text
    assert calls_of(exchange.reply) == []


@when(parsers.parse('it chats about a call of get_weather whose answer was "{text}"'), target_fixture="told")
def chat_about_call(client: Client, text: str) -> str:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]
    asked = {"messages": messages, "max_tokens": 1, "tools": TOOLS, "return_token_ids": True}
    (choice,) = client.ask("chat", asked).choices
    found = httpx.post(f"{client.served.url}/detokenize", json={"tokens": choice.prompt_token_ids}).json()
    return str(found["prompt"])


@then(parsers.parse('its prompt has the tools, the call and "{text}"'))
def prompt_has(told: str, text: str) -> None:
    places = [told.index(part) for part in ('"get_time"', '{"name": "get_weather", "arguments": {"city"', text)]
    assert places == sorted(places)
