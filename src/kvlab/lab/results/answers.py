"""The words of a run: its answers as text, and a sample of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvlab.core import FinishReason, Request, RequestRecord
from kvlab.models.tokenizer import Tokenizer

_SAMPLE = 5  # answers that are shown of a run
_MOST_CHARS = 400  # of an answer, or of a prompt


class Answer(NamedTuple):
    """What was asked and what came, on one line each, cut where it is long."""

    name: str
    prompt: str
    text: str
    ending: str


def with_text(
    records: Sequence[RequestRecord], requests: Sequence[Request], tokenizer: Tokenizer, eos: tuple[int, ...]
) -> list[RequestRecord]:
    """The records with their answers as text, which the tokenizer makes of the tokens when all have ended. A stop
    token is no part of it. Those whose engine made the text, to look for stop strings, keep it.
    """
    stops = {request.request_id: {*eos, *request.sampling.stop_token_ids} for request in requests}
    worded = []
    for record in records:
        ids = list(record.output_token_ids)
        if record.finish_reason is FinishReason.STOP and ids and ids[-1] in stops[record.request_id]:
            ids.pop()
        worded.append(record if record.text else replace(record, text=tokenizer.decode(ids)))
    return worded


def sample_answers(records: Sequence[RequestRecord]) -> list[Answer]:
    """Some answers of a run, evenly from its first to its last request; none to prompts that are no text."""
    with_words = [record for record in records if record.prompt and record.text and record.sample == 0]
    count = min(_SAMPLE, len(with_words))
    answers = []
    for index in range(count):
        record = with_words[index * (len(with_words) - 1) // max(1, count - 1)]
        ending = f"{len(record.output_token_ids)} tokens, {record.finish_reason}"
        answers.append(Answer(record.name, _line(record.prompt), _line(record.text), ending))
    return answers


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."
