"""A request that cannot be served is refused on arrival, naming what is wrong; the others are not touched."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvlab.core import Request, SamplingParams
from kvlab.errors import RequestRefusedError
from tests.support.engines import drain, make_engine, request
from tests.support.model import VOCAB, expected_tokens

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0; at least 1"),
    ({"max_tokens": 2.5}, "max_tokens=2.5; must be a whole number"),
    ({"max_tokens": True}, "max_tokens=True; must be a whole number"),
    ({"n": 0}, "n=0; at least 1 sample"),
    ({"top_k": -1}, "top_k=-1; at least 0; 0 keeps all tokens"),
    ({"top_k": 1.5}, "top_k=1.5; must be a whole number"),
    ({"min_tokens": -1}, "min_tokens=-1; at least 0"),
    ({"min_tokens": 6}, "min_tokens=6; at most max_tokens=5"),
    ({"logprobs": -1}, "logprobs=-1; at least 0"),
    ({"logprobs": True}, "logprobs=True; must be a whole number"),
    ({"temperature": -0.1}, "temperature=-0.1; a number, at least 0; 0 is greedy"),
    ({"temperature": math.nan}, "temperature=nan; a number"),
    ({"temperature": math.inf}, "temperature=inf; a number"),
    ({"temperature": "warm"}, "temperature='warm'; a number"),
    ({"temperature": None}, "temperature=None; a number"),
    ({"top_p": 0}, r"top_p=0; a number in \(0, 1\]; 1 keeps all tokens"),
    ({"top_p": 1.01}, r"top_p=1.01; a number in \(0, 1\]"),
    ({"min_p": 1}, r"min_p=1; a number in \[0, 1\); 0 keeps all tokens"),
    ({"min_p": -0.2}, r"min_p=-0.2; a number in \[0, 1\)"),
    ({"repetition_penalty": 0}, "repetition_penalty=0; a number, at least 0.001; 1 changes nothing"),
    ({"presence_penalty": 2.1}, "presence_penalty=2.1; a number from -2.0 to 2.0"),
    ({"frequency_penalty": math.nan}, "frequency_penalty=nan; a number from -2.0 to 2.0"),
    ({"logit_bias": {3: 1}}, "logit_bias=.*; must be a tuple of pairs of a token id and a number"),
    ({"logit_bias": ((VOCAB, 1.0),)}, f"logit_bias=.*; token ids must be from 0 to below {VOCAB}"),
    ({"logit_bias": ((3, 101),)}, "logit_bias=.*; biases must be numbers from -100 to 100"),
    ({"logit_bias": ((3, 1), (3, 2))}, "logit_bias=.*; has a token twice"),
    ({"logit_bias": tuple((0, 1) for _ in range(301))}, "logit_bias=.*; has 301 tokens; at most 300"),
    ({"seed": 1.5}, "seed=1.5; must be a whole number, or None"),
    ({"ignore_eos": "no"}, "ignore_eos='no'; must be true or false"),
    ({"stop_token_ids": (VOCAB,)}, rf"stop_token_ids=\({VOCAB},\); must be a tuple of token ids, .* below {VOCAB}"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ({"stop_token_ids": 7}, "stop_token_ids=7; must be a tuple"),
    ({"stop": "end"}, "stop='end'; must be a tuple of strings, none of them empty"),
    ({"stop": ("end", "")}, "stop=.*; must be a tuple of strings, none of them empty"),
    ({"stop": (7,)}, "stop=.*; must be a tuple of strings"),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(values) for values, _ in WRONG])
def test_is_refused_and_the_others_go_on(values: dict[str, Any], message: str) -> None:
    engine = make_engine(vocab_size=VOCAB, detokenize=str)
    other = engine.add_request(request("other", 9, 6))
    engine.step()
    wrong = Request("wrong", (1, 2), SamplingParams(**({"max_tokens": 5} | values)))
    with pytest.raises(RequestRefusedError, match=f"request 'wrong': {message}"):
        engine.add_request(wrong)
    assert not engine.abort("wrong")
    again = engine.add_request(request("wrong", 3, 2))  # its name is still free
    drain(engine)
    assert other.output_token_ids == expected_tokens(other.request)
    assert again.output_token_ids == expected_tokens(again.request)


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestRefusedError, match=r"stop=\('x',\); needs text: give the engine a detokenizer"):
        make_engine().add_request(request("x", 3, 3, stop=("x",)))


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 10**9},
        {"top_p": 1e-12, "temperature": 1},
        {"min_p": 0.999, "temperature": 1.0},
        {"min_tokens": 5},
        {"seed": -(2**100), "temperature": 1.0},
        {"logprobs": 20},
        {"repetition_penalty": 1e9},
        {"repetition_penalty": 0.001},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": ((3, -100), (4, 100.0))},
    ],
    ids=str,
)
def test_the_ends_of_each_range_are_served(values: dict[str, Any]) -> None:
    engine = make_engine()
    sequence = engine.add_request(request("x", 3, 5, **values))
    drain(engine)
    assert sequence.num_output_tokens == 5
