"""The report and its forms."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from kvlab.cli.settings import read_settings, refuse_settings
from kvlab.errors import ConfigError, OutputError, RecordError
from kvlab.lab.compare.groups import RunSet
from kvlab.lab.report.options import ReportOptions
from kvlab.lab.report.pages import add_figures, to_html, to_markdown, write_report
from kvlab.lab.report.report import build_report
from kvlab.lab.report.terminal import print_report
from kvlab.lab.terminal import Terminal
from tests.support.recorded import THROUGHPUT, record_run, record_sweep

POINTS = {"contiguous": {"kv__backend": "contiguous"}, "paged": {}}
RATES = {"contiguous": [100.0, 90.0, 95.0], "paged": [80.0, 72.5, 75.5]}


@pytest.fixture
def sweep(tmp_path):
    return RunSet("sweep", tuple(record_sweep(tmp_path / "sweep", POINTS, RATES)))


@pytest.fixture
def make(tmp_path):
    """Builds a report on single runs, each a dict of what `record_run` takes."""

    def build(*settings, **options):
        sets = [RunSet(f"run{n}", (record_run(tmp_path / f"run{n}", **s),)) for n, s in enumerate(settings)]
        return build_report(sets, ReportOptions(**options))

    return build


def printed(report, width: int = 200) -> str:
    shown = io.StringIO()
    print_report(report, Terminal(file=shown, width=width))
    return shown.getvalue()


def test_a_sweep_with_repeats_gets_verdicts(sweep):
    report = build_report([sweep], ReportOptions())
    assert report.title == "kv=paged against kv=contiguous"
    line = next(line for line in report.rows if line.metric == THROUGHPUT)
    assert [cell.value for cell in line.cells] == ["95.0 tok/s", "75.5 tok/s"]
    assert (line.cells[1].delta, line.cells[1].word, line.cells[1].tone) == ("\u221220.0 %", "slower", "bad")
    assert "kv=paged is slower than kv=contiguous" in report.headlines[0]
    assert "3 pairs" in report.headlines[0]
    assert list(report.differences) == ["kv"]
    assert report.outputs == [("kv=contiguous, kv=paged", "equal for 2 requests")]
    assert "ran in turns" in report.method[0]
    assert report.warnings == []


@pytest.mark.parametrize(("machine", "warns"), [("a CPU", True), ("simulated l4", False)])
def test_sets_that_were_measured_one_after_the_other_are_warned_of(tmp_path, machine, warns):
    facts = {"machine": machine}
    runs = [record_run(tmp_path / str(n), 100 + n, facts=facts | {"started": float(n)}) for n in range(6)]
    report = build_report([RunSet("old", tuple(runs[:3])), RunSet("new", tuple(runs[3:]))], ReportOptions())
    assert [group.name for group in report.groups] == ["old", "new"]
    assert any("ran all before or all after" in text for text in report.warnings) == warns
    assert "independent samples" in report.method[0]


@pytest.mark.parametrize("rates", [[100.0], [100.0, 100.0]])
def test_of_simulated_runs_other_seeds_are_advised_and_no_repeats(tmp_path, rates):
    points = {name: own | {"facts": {"machine": "simulated l4, timing roofline"}} for name, own in POINTS.items()}
    runs = record_sweep(tmp_path, points, dict.fromkeys(POINTS, rates))
    said = " ".join(build_report([RunSet("sweep", tuple(runs))], ReportOptions()).method)
    assert "`kvlab run -m seed=0,1,2,3,4` simulates other requests" in said
    assert ("Repeats of a simulation are the same to the last digit" in said) == (len(rates) > 1)
    assert "repeats=5" not in said


def test_runs_of_other_work_are_refused_with_the_keys(make):
    other = {"workload__num_requests": 9, "facts": {"workload_digest": "d1"}}
    with pytest.raises(RecordError, match=r"cannot be compared: .*workload\.num_requests.*by=.*force=true"):
        make({}, other)
    assert make({}, other, by=["workload.num_requests"]).warnings == []
    assert "force=true although" in make({}, other, force=True).warnings[0]


def test_other_work_beside_comparable_runs_gets_no_word(tmp_path):
    points: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"kv__backend": "contiguous"},
        "c": {"model__architecture__hidden_size": 128},
    }
    runs = record_sweep(tmp_path, points, {"a": [100.0, 101.0], "b": [50.0, 50.5], "c": [10.0, 10.1]})
    report = build_report([RunSet("sweep", tuple(runs))], ReportOptions())
    words = next(line for line in report.rows if line.metric == THROUGHPUT).cells
    assert [cell.word for cell in words] == ["", "slower", ""]
    assert "no verdict: not the same work: model.architecture.hidden_size differ" in report.warnings[0]


def test_what_speaks_against_many_groups_is_said_once(tmp_path):
    points: dict[str, dict[str, Any]] = {"a": {}} | {
        str(size): {"model__architecture__hidden_size": size} for size in (128, 256, 384, 512, 640, 768)
    }
    points["b"] = {"kv__backend": "contiguous"}
    runs = record_sweep(tmp_path, points, {name: [100.0, 101.0] for name in points})
    report = build_report([RunSet("sweep", tuple(runs))], ReportOptions())
    (said,) = [text for text in report.warnings if "no verdict" in text]
    assert " and 2 more: no verdict: not the same work: model.architecture.hidden_size differ. by= " in said


def test_what_did_not_finish_is_left_out_and_said(sweep, tmp_path):
    record_run(tmp_path / "sweep" / "5", status="out_of_memory", error="does not fit", repeat=2)
    from kvlab.lab.results.records import read_sweep

    report = build_report([RunSet("sweep", tuple(read_sweep(tmp_path / "sweep")))], ReportOptions())
    assert report.warnings[0] == "kv=paged: 1 of 3 runs left out (out of memory)."
    with pytest.raises(RecordError, match="none of its runs finished: failed: broken"):
        build_report([RunSet("x", (record_run(tmp_path / "x", status="failed", error="broken"),))], ReportOptions())


def test_one_configuration_alone_is_shown(make):
    report = make({"rate": 100})
    assert (len(report.groups), report.headlines) == (1, [])
    assert "100" in printed(report)
    assert "100.0 tok/s" in to_markdown(report)
    assert "100.0 tok/s" in to_html(report)


def test_a_metric_that_no_run_has_lists_those_there_are_the_nearest_first(make):
    with pytest.raises(
        ConfigError, match=rf"metrics=throughput/tokens_per_s: .*there are: {THROUGHPUT}, .*duration_s"
    ):
        make({}, metrics=["throughput/tokens_per_s"])
    with pytest.raises(ConfigError, match=rf"fail_if=throughput/output_tokens: .*there are: {THROUGHPUT}"):
        make({}, fail_if=["throughput/output_tokens < -5%"])
    with pytest.raises(ConfigError, match=rf"fail_if=throughput/\*: is of one metric; name one of {THROUGHPUT}"):
        make({}, fail_if=["throughput/* < -5%"])
    lines = make({}, metrics=["latency/*", "duration_s"]).rows
    assert [line.metric for line in lines] == ["latency/ttft_ms_p50", "duration_s"]
    assert len(make({}, metrics=["all"]).rows) == 3


def test_the_baseline_is_chosen_by_name(sweep):
    report = build_report([sweep], ReportOptions(baseline="kv=paged"))
    assert "kv=contiguous is faster than kv=paged" in report.headlines[0]
    with pytest.raises(ConfigError, match="baseline=segmented: no group has this name; there are: kv=contiguous, "):
        build_report([sweep], ReportOptions(baseline="segmented"))


def test_the_gate_compares_every_other_group_with_the_baseline(sweep):
    options, _ = read_settings(ReportOptions, [f"fail_if={THROUGHPUT} < -5%", "fail_if=duration_s > 100"])
    report = build_report([sweep], options)
    assert [finding.violated for finding in report.findings] == [True, False]
    assert report.violated
    assert "kv=paged is 75.5 against 95 of kv=contiguous: -20.0 %" in report.findings[0].sentence


def test_a_gate_on_a_change_needs_a_second_group(make):
    (finding,) = make({}, fail_if=[f"{THROUGHPUT} < -5%"]).findings
    assert finding.violated
    assert finding.sentence.endswith("is the only one; name runs of two")


def test_the_terminal_has_the_table_and_what_it_means(sweep):
    text = printed(build_report([sweep], ReportOptions(fail_if=[f"{THROUGHPUT} < -5%"])))
    assert re.search(r"output tokens .*95\.0 tok/s .*75\.5 tok/s .*20\.0 % .*slower", text)
    assert "greedy outputs of kv=contiguous, kv=paged: equal for 2 requests" in text
    assert "failed: throughput/output_tokens_per_s of kv=paged" in text


def test_three_groups_are_rows_where_there_is_no_room_beside_each_other(tmp_path):
    points = {f"paged{size}": {"kv__block_size": size} for size in (8, 16, 32)}
    runs = record_sweep(tmp_path, points, {key: [100.0, 101.0] for key in points})
    report = build_report([RunSet("sweep", tuple(runs))], ReportOptions())
    assert "interval" in printed(report)
    narrow = printed(report, 80)
    assert "\u2026" not in narrow
    assert all(f"kv.block_size={size}" in narrow for size in (8, 16, 32))


def test_many_groups_are_rows(tmp_path):
    points = {str(size): {"kv__block_size": size} for size in (1, 2, 4, 8)}
    runs = record_sweep(tmp_path, points, {name: [100.0, 101.0] for name in points})
    report = build_report([RunSet("sweep", tuple(runs))], ReportOptions())
    text = printed(report)
    assert all(f"kv.block_size={size} (2)" in text for size in (1, 2, 4, 8))
    assert report.outputs == [
        ("kv.block_size=1, kv.block_size=2, kv.block_size=4, kv.block_size=8", "equal for 2 requests")
    ]
    assert "| kv.block_size=1 (2) | kv.block_size=2 (2) |" in to_markdown(report)


def test_of_very_many_groups_the_first_sentences_name_the_extremes(tmp_path):
    points = {str(size): {"kv__block_size": size} for size in range(1, 10)}
    runs = record_sweep(tmp_path, points, {name: [100.0 * int(name), 101.0 * int(name)] for name in points})
    headlines = build_report([RunSet("sweep", tuple(runs))], ReportOptions()).headlines
    assert [text.split(" is ")[0] for text in headlines] == ["kv.block_size=2", "kv.block_size=9"]


def test_markdown_is_a_table_of_equal_rows(sweep):
    text = to_markdown(build_report([sweep], ReportOptions()), [("memory: kv=paged", Path("figures/00.png"))])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    medians = [row for row in rows if row.count("|") == 7]
    assert len(medians) == 2 + 3
    assert "| output tokens | 95.0 tok/s | 75.5 tok/s | \u221220.0 % |" in text
    assert "**slower**" in text
    assert "![memory: kv=paged](figures/00.png)" in text


def test_the_page_needs_nothing_beside_it(sweep, tmp_path):
    report = build_report([sweep], ReportOptions())
    page = write_report(report, tmp_path / "out").read_text()
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    for text in ("kv=paged is slower than", "95.0 tok/s", "prefers-color-scheme", "kv.block_size", "viewport"):
        assert text in page
    assert page.count('class="dot"') >= 6


def test_names_are_escaped(make):
    page = to_html(make({"run_name": "x", "tags": {"t": "<script>"}}, by=["tags.t"]))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_a_report_that_cannot_be_written_names_its_file(make, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/report/report.md: cannot be written: (Not a dir|File ex)"):
        write_report(make({}), tmp_path / "file" / "report")


def test_options_are_read_and_mistakes_reported():
    options, runs = read_settings(
        ReportOptions,
        ["a/b", "c,d", "by=kv.backend,set", "--metrics=[x/y, z]", "force=true", "confidence=99%", "min_effect=2%"],
    )
    assert (runs, options.by, options.metrics) == (["a/b", "c,d"], ["kv.backend", "set"], ["x/y", "z"])
    assert (options.force, options.confidence, options.min_effect) == (True, 99, 2)
    assert read_settings(ReportOptions, ["filter=tags.x = 'a=b'"])[0].filter == ["tags.x = 'a=b'"]
    for text, said in {
        "basline=x": "did you mean baseline",
        "force=perhaps": "true or false",
        "confidence=100": "less than 100",
        "min_effect=much": "not a number",
        "tracking.timeout_s=0": "more than 0",
    }.items():
        with pytest.raises(ConfigError, match=said):
            refuse_settings(ReportOptions, read_settings(ReportOptions, [text])[1])


@pytest.mark.slow
def test_figures_are_drawn_into_the_page(sweep, tmp_path):
    report = build_report([sweep], ReportOptions())
    add_figures(report)
    page = write_report(report, tmp_path / "out").read_text()
    assert {picture.group for picture in report.images} == {None, "kv=contiguous", "kv=paged"}
    assert len(report.images) == len(list(tmp_path.glob("out/figures/*.png"))) >= 5
    assert page.count('<img alt="') == len(report.images)
    assert "plotly.js" in page


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path):
    points = {name: {"tags": {"side": name}} for name in ("[/red]", "[bold]")}
    runs = record_sweep(tmp_path, points, {name: [100.0, 101.0] for name in points})
    text = printed(build_report([RunSet("[/x]", tuple(runs))], ReportOptions(by=["tags.side"])))
    assert "tags.side=[bold] against tags.side=[/red]" in text
    many = {f"[/red]{size}": {"tags": {"side": f"[/red]{size}"}} for size in range(5)}
    runs = record_sweep(tmp_path / "many", many, {name: [100.0, 101.0] for name in many})
    assert "tags.side=[/red]4 (2)" in printed(
        build_report([RunSet("x", tuple(runs))], ReportOptions(by=["tags.side"]))
    )


def test_figures_that_cannot_be_drawn_are_named_with_the_reason(sweep, tmp_path):
    report = build_report([sweep], ReportOptions())
    add_figures(report)  # these runs were recorded without steps and blocks
    assert {(image.name, image.group) for image in report.images if image.group} == {
        (name, group) for name in ("timeline", "latency") for group in ("kv=contiguous", "kv=paged")
    }
    assert "kv=paged: no memory: its steps have no blocks." in report.left_out
    page = write_report(report, tmp_path / "out")
    for text in (page.read_text(), page.with_name("report.md").read_text()):
        assert "kv=paged: no pool map: it kept no record of single blocks." in text
