"""What importers make of requests that failed, of nulls, and of lines that are wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvlab.cli.import_ import ColumnSettings, ImportSettings
from kvlab.errors import ConfigError, WorkloadError
from kvlab.lab.traffic import import_traffic
from kvlab.workloads.trace_format import Header, TracedRequest, read_trace, write_trace


def imported(tmp_path: Path, text: str) -> list[TracedRequest]:
    source, trace = tmp_path / "source", tmp_path / "trace.jsonl"
    source.write_text(text)
    import_traffic(str(source), ImportSettings(to=str(trace)))
    return [request for _, request in read_trace(str(trace))]


def aiperf(metrics: dict[str, float], error: dict[str, Any] | None = None) -> str:
    values = {name: {"value": value, "unit": "tokens"} for name, value in metrics.items()}
    metadata = {"request_start_ns": 10**18, "was_cancelled": False}
    return json.dumps({"metadata": metadata, "metrics": values, "error": error}) + "\n"


def test_a_request_of_aiperf_that_failed_is_left_out(tmp_path: Path) -> None:
    """Its record has neither lengths nor times."""
    good = aiperf({"input_sequence_length": 7, "output_sequence_length": 3})
    text = good + aiperf({"error_isl": 7}, {"code": 500, "message": "out of memory"}) + good
    assert [request.prompt_tokens for request in imported(tmp_path, text)] == [7, 7]


def test_a_table_may_begin_with_a_request_that_failed(tmp_path: Path) -> None:
    """Whose usage is null, so that the column of the prompts is not known yet."""
    source, trace = tmp_path / "source", tmp_path / "trace.jsonl"
    source.write_text('{"llm": null}\n{"llm": {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}}\n')
    for name in (None, "llm.usage.prompt_tokens"):
        columns = ColumnSettings(prompt_tokens=name)
        with pytest.raises(WorkloadError, match=r"line 1.*; drop=prompts leaves out the requests"):
            import_traffic(str(source), ImportSettings(to=str(trace), columns=columns))
        import_traffic(str(source), ImportSettings(to=str(trace), columns=columns, drop=["prompts"]))
        assert [(request.prompt_tokens, request.output_tokens) for _, request in read_trace(str(trace))] == [(7, 3)]
    wrong = ColumnSettings(prompt_tokens="in")
    with pytest.raises(ConfigError, match=r"columns\.prompt_tokens=in: the file has no such column; it has llm"):
        import_traffic(str(source), ImportSettings(to=str(trace), columns=wrong, drop=["prompts"]))
    source.write_text('{"llm": {"usage": {"tokens": 7}}}\n')
    with pytest.raises(WorkloadError, match="which column has the prompt's tokens"):
        import_traffic(str(source), ImportSettings(to=str(trace), format="table", drop=["prompts"]))


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": -1}, None),
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "Hello."}, {"prompt": "Hello.", "messages": None}])
def test_null_is_a_field_that_was_left_out(
    tmp_path: Path, limits: dict[str, int | None], most: int | None, prompt: dict[str, Any]
) -> None:
    (request,) = imported(tmp_path, json.dumps({"model": "m", **prompt, **limits}) + "\n")
    assert request.max_tokens == most


@pytest.mark.parametrize(
    "answer",
    [
        {"server_usage": {"completion_tokens": 7}},
        {"server_usage": {"completion_tokens": None}, "output_tokens": 7},
    ],
)
def test_inference_perf_need_not_count_what_the_server_did(tmp_path: Path, answer: dict[str, Any]) -> None:
    info = {"input_tokens": 5, "response_metrics": answer}
    text = json.dumps([{"start_time": 1.0, "end_time": 2.0, "info": info, "error": None}])
    assert [request.output_tokens for request in imported(tmp_path, text)] == [7]


LOG = "INFO {} vLLM Received request cmpl-1: params: SamplingParams(n=1, temperature={}), token_ids: [1, 2]"


@pytest.mark.parametrize(("written", "value"), [("0.7", 0.7), ("1e-05", 1e-05), ("0.7.1", 0.7)])
def test_a_temperature_of_a_log_is_a_number(tmp_path: Path, written: str, value: float) -> None:
    (request,) = imported(tmp_path, LOG.format("11-16 18:15:46", written))
    assert request.temperature == value


def test_a_line_of_a_log_with_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="source, line 1: 13-99 18:15:46 is no date and time"):
        imported(tmp_path, LOG.format("13-99 18:15:46", "0.7"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"drop": ["outputs", "times"]}, "drop=outputs,times: is of files of others"),
        ({"unit": "ms"}, "unit=ms: is of files of others"),
        ({"columns": ColumnSettings(arrival="t")}, "columns.arrival=t: is of files of others"),
    ],
)
def test_what_is_said_of_files_of_others_is_refused_of_a_trace(
    tmp_path: Path, said: dict[str, Any], message: str
) -> None:
    write_trace(trace := tmp_path / "a.jsonl", Header(), [TracedRequest(7, 0.0, 3)])
    with pytest.raises(ConfigError, match=message):
        import_traffic(str(trace), ImportSettings(to=str(tmp_path / "b.parquet"), **said))


def test_a_trace_is_sorted_if_asked_for(tmp_path: Path) -> None:
    write_trace(trace := tmp_path / "a.jsonl", Header(), [TracedRequest(7, 2.0, 3), TracedRequest(8, 1.0, 3)])
    other = tmp_path / "b.parquet"
    with pytest.raises(WorkloadError, match="sort=true sorts them"):
        import_traffic(str(trace), ImportSettings(to=str(other)))
    import_traffic(str(trace), ImportSettings(to=str(other), sort=True))
    assert [request.prompt_tokens for _, request in read_trace(str(other))] == [8, 7]


def test_fields_of_names_of_their_own_take_no_longer_the_more_there_are(tmp_path: Path) -> None:
    """As of calls by their ids: 2,000 such rows took half a minute."""
    rows = [{"prompt_tokens": 7, "output_tokens": 3, "calls": {f"call_{number}": 1}} for number in range(2000)]
    source = tmp_path / "source"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    began = time.process_time()
    done = import_traffic(str(source), ImportSettings(to=str(tmp_path / "trace.jsonl")))
    assert time.process_time() - began < 5
    (unread,) = (text for text in done.unknown if text.startswith("not read: "))
    assert unread.startswith("not read: calls.call_0, calls.call_1, ")
    assert "calls.call_19 and 1,980 more; columns.arrival=NAME" in unread


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (['{"input_tokens": 7, "output_tokens": 3}', '{"input_tokens": 7, "outp'], "Unterminated string starting"),
        (['{"input_tokens": 7, "output_tokens": 3}', '{"input_tokens": "n/a"}'], "'n/a'; expected a whole number"),
        (["input_tokens,output_tokens", "7,3", "7"], "1 columns; expected 2 as in the first line"),
        (['{"prompt": "Hi", "max_tokens": 3}', '{"prompt": "Hi", "n": 0}'], "n is 0; expected 1 to"),
        (['{"prompt": "Hi", "max_tokens": 3}', '{"prompt": "Hi'], "Unterminated string starting"),
    ],
)
def test_lines_that_cannot_be_read_are_left_out_if_asked_for(tmp_path: Path, lines: list[str], wrong: str) -> None:
    """As one that a crash cut off."""
    source, trace = tmp_path / "source", tmp_path / "trace.jsonl"
    source.write_text("\n".join([*lines, lines[-2], ""]))
    with pytest.raises(WorkloadError, match=r"; drop=broken leaves out what cannot be read$") as caught:
        import_traffic(str(source), ImportSettings(to=str(trace)))
    assert wrong in str(caught.value)
    done = import_traffic(str(source), ImportSettings(to=str(trace), drop=["broken"]))
    assert len(list(read_trace(str(trace)))) == 2
    assert any(text.startswith("left out by drop=broken: 1 of 3 requests") for text in done.unknown)
    assert any(text.startswith("the first that cannot be read: ") and wrong in text for text in done.unknown)


def test_a_cell_without_an_end_is_not_left_out_with_all_behind_it(tmp_path: Path) -> None:
    (source := tmp_path / "source").write_text('input_tokens,output_tokens\n7,3\n7,"3\n7,3\n')
    with pytest.raises(WorkloadError, match=r"line 3: a cell in quotes does not end; expected [^;]*$"):
        import_traffic(str(source), ImportSettings(drop=["broken"]))


def test_of_a_file_that_is_no_lines_none_is_left_out(tmp_path: Path) -> None:
    (source := tmp_path / "source").write_text("INFO\n")
    with pytest.raises(ConfigError, match="drop=broken: is for tables and JSON lines"):
        import_traffic(str(source), ImportSettings(format="vllm_log", drop=["broken"]))
