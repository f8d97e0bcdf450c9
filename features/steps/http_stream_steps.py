"""Steps about streams that clients of a server get, and about log-probabilities."""

from __future__ import annotations

import itertools
import json

from pytest_bdd import parsers, then

from features.steps.http_steps import Exchange


@then(parsers.parse("its log-probabilities are lists of {count:d} with {alternatives:d} alternatives each"))
def logprob_lists(exchange: Exchange, count: int, alternatives: int) -> None:
    found = exchange.reply.choices[0].logprobs
    assert {len(found.tokens), len(found.token_logprobs), len(found.text_offset)} == {count}
    assert [len(each) for each in found.top_logprobs] == [alternatives] * count


@then("the tokens join to the text, each at its offset")
def offsets(exchange: Exchange) -> None:
    choice = exchange.reply.choices[0]
    ends = itertools.accumulate(map(len, choice.logprobs.tokens))
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset == [0, *ends][:-1]


@then(parsers.parse("each of the {count:d} tokens has its bytes and {alternatives:d} alternatives"))
def logprob_content(exchange: Exchange, count: int, alternatives: int) -> None:
    content = exchange.reply.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [alternatives] * count
    assert all(bytes(entry.bytes).decode() == entry.token and entry.logprob <= 0 for entry in content)


@then("the bytes join to the text")
def bytes_join(exchange: Exchange) -> None:
    (choice,) = exchange.reply.choices
    joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert joined.decode() == choice.message.content


@then(parsers.parse("the bytes of its only token are {expected}"))
def bytes_of_a_part(exchange: Exchange, expected: str) -> None:
    (entry,) = exchange.reply.choices[0].logprobs.content
    assert (entry.token, entry.bytes) == ("\ufffd", json.loads(expected))


@then("each token's log-probability is the highest of its alternatives")
def likeliest(exchange: Exchange) -> None:
    found = exchange.reply.choices[0].logprobs
    assert found.token_logprobs == [max(top.values()) for top in found.top_logprobs]


@then("both have the same log-probabilities")
def same_logprobs(exchange: Exchange) -> None:
    whole, stream = exchange.replies
    (one,) = whole.choices
    parts = [choice.logprobs for choice in stream.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert getattr(one.logprobs, name) == [value for part in parts for value in getattr(part, name)]


@then(parsers.parse('the stream had {count:d} chunks, the last with the finish reason "{reason}"'))
def chunks(exchange: Exchange, count: int, reason: str) -> None:
    assert [choice.finish_reason for choice in exchange.reply.choices] == [None] * (count - 1) + [reason]
    assert len(exchange.reply.chunks) == count


@then(parsers.parse('the first chunk has the role "{role}" and a text'))
def role(exchange: Exchange, role: str) -> None:
    deltas = [choice.delta for choice in exchange.reply.choices]
    assert [delta.role for delta in deltas] == [role] + [None] * (len(deltas) - 1)
    assert all(delta.content for delta in deltas)


@then('it gets lines of "data: " and JSON, a blank line after each, and "data: [DONE]" at the end')
def events(exchange: Exchange) -> None:
    response = exchange.posted[-1]
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert len(events) == 2
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


@then("the first chunk has a text")
def first_chunk(exchange: Exchange) -> None:
    assert exchange.reply.pieces[0]


@then("an empty chunk stands for each token that was held back")
def held_back(exchange: Exchange) -> None:
    pieces = exchange.reply.pieces
    assert len(pieces) == len(exchange.reply.chunks)
    assert "" in pieces[:-1]


@then(parsers.parse("the chunks of {count:d} choices come interleaved"))
def interleaved(exchange: Exchange, count: int) -> None:
    indices = [choice.index for choice in exchange.reply.choices]
    assert set(indices) == set(range(count))
    assert indices != sorted(indices)


@then("each choice ended once")
def each_ended_once(exchange: Exchange) -> None:
    assert {len(reasons) for reasons in exchange.reply.reasons.values()} == {1}


@then(parsers.parse("the chunks have usage: {usage}"))
def chunks_with_usage(exchange: Exchange, usage: str) -> None:
    assert [bool(chunk.usage) for chunk in exchange.reply.chunks] == [each == "yes" for each in usage.split(", ")]


@then(parsers.parse("the last chunk has no choice, and a usage of {count:d} completion tokens"))
def last_chunk(exchange: Exchange, count: int) -> None:
    last = exchange.reply.chunks[-1]
    assert (last.choices, last.usage.completion_tokens) == ([], count)


@then(parsers.parse("the chunks count {counts} completion tokens"))
def running_usage(exchange: Exchange, counts: str) -> None:
    assert ", ".join(str(chunk.usage.completion_tokens) for chunk in exchange.reply.chunks) == counts


@then("the first chunk has the prompt's ids, and each chunk its token's")
def chunks_with_ids(exchange: Exchange) -> None:
    first, *others = (choice.model_extra for choice in exchange.reply.choices)
    assert first == {"prompt_token_ids": [504, 3575, 282, 4649, 314], "token_ids": [7042]}
    assert [list(other) for other in others] == [["token_ids"]]


@then("no chunk has a part of a character")
def whole_characters(exchange: Exchange) -> None:
    assert exchange.reply.pieces
    assert not any("\ufffd" in piece for piece in exchange.reply.pieces)
