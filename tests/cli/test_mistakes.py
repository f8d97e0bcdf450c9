"""What cannot be composed, and directories that cannot be made: a sentence and code 2, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvlab.cli.explain
import kvlab.cli.roofline
import kvlab.cli.run
from kvlab.cli.compose import compose_run
from kvlab.errors import ConfigError
from kvlab.workloads.trace_format import Header, TracedRequest, write_trace
from tests.support.commands import TINY, call

OVERRIDES = {
    "run_name=${oc.env:MISSING}": "run_name=${oc.env:MISSING}: \"Environment variable 'MISSING' not found\"",
    "run_name=${x(}": "run_name=${x(}: token recognition error",
    "run_name=${nope}": "run_name=${nope}: Interpolation key 'nope' not found",
    "run_name=${run_name}": "run_name=${run_name}: Recursive interpolation detected",
    "plugins=[${nope}]": "plugins=['${nope}']: Interpolation key 'nope' not found",
    "run_name='\0'": "run_name=\\x00: is no text",
    "run_name='\udcff'": "run_name=\\udcff: is no text",
    "run_name='x": "run_name='x: cannot be read: write key=value, and quotes around a value of other characters",
    "run_name=[x": "run_name=[x: cannot be read (no viable alternative",
    "kv.block_size=3=4": "kv.block_size=3=4: cannot be read (mismatched input '=' expecting <EOF>)",
    "seed": "settings=seed: is no setting; write key=value, as seed=...",
    "": "=: cannot be read",
    "=3": "settings=...: Config group override must be a string",
    "seed=": "seed=: must be a whole number",
    "seed=inf": "seed=inf: must be a whole number",
    "seed=" + "9" * 5000: "Exceeds the limit (4300 digits)",
    "seed=18446744073709551616": "seed=18446744073709551616: must be a number, at most 18446744073709551615",
    "~kv": "kv=null: a run has one choice of kv: kv=name",
    "+new.key=1": "new={'key': 1}: unknown; known: model, kv, ",
    "+kv.blocksize=8": "kv.blocksize=8: unknown; did you mean kv.block_size? known: backend, ",
    "model=qwen3_8": "did you mean qwen3_8b?",
    "hardware=H100": "hardware=H100: unknown; known: a100_pcie, a100_sxm, a100_sxm_40g, a10g, a30, ",
    "hydra/launcher=jobs": "hydra/launcher=jobs: unknown; known: basic",
    "tags={a: b}": "Could not override 'tags'; Key 'a' is not in struct; to add it, write +tags=...",
    "fleet.life=1:die:0": "fleet.life=1:die:0: must be a list, as 'fleet.life=[1:die:0]'",
    "fleet.life=1:die:0,2:die:1": "fleet.life=1:die:0,2:die:1: must be a list, as 'fleet.life=[1:die:0,2:die:1]'",
    "fleet.life=[],[1:die:0]": "fleet.life=[],[1:die:0]: has several values; sweep over them with kvlab run -m",
    "run_name=a,b": "run_name=a,b: has several values; sweep over them with kvlab run -m, or write one text",
    "plugins=null": "plugins=null: must be a list; [] is one of nothing",
    "kv.block_size=null": "kv.block_size=null: must have a value; leave it out for its default",
    "fleet.groups=l4": "fleet.groups=l4: must be a list of groups, as 'fleet.groups=[{count:2,hardware:l40s}]'",
    "fleet.groups={count: 2}": "fleet.groups={count: 2}: must be a list, as 'fleet.groups=[{count: 2}]'",
    "+tags={a: {b: c}}": "tags.a={'b': 'c'}: must be text",
}


@pytest.mark.parametrize(("override", "sentence"), OVERRIDES.items(), ids=[ascii(text)[:40] for text in OVERRIDES])
def test_a_mistake_names_its_key_and_value(override: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    with pytest.raises(ConfigError) as refused:
        compose_run(["workload.num_requests=3", override])
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()


def test_a_mistake_in_a_file_of_ones_own_names_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "conf" / "hardware" / "my_gpu.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("name: my_gpu\nmemory: 24GiB\nbandwidth_gb_s: fast\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hardware=my_gpu: hardware\.bandwidth_gb_s=fast there must be a number"):
        compose_run(["hardware=my_gpu"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("hardware.memory=much", "hardware.memory=much: is not a size"),
        ("framework.version=new", "framework.version=new: must be a version, as 0.24.0"),
        ("framework.version=0.10", "may be 0.10, which was read as a number; write 0.10.0"),
    ],
)
def test_what_defaults_depend_on_is_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose_run(["executor=simulated", "hardware=l4", override])


@pytest.mark.parametrize(
    "override", ["run_name=${nope}", "seed=" + "9" * 5000, "~kv", "kv=nope"], ids=lambda text: text[:9]
)
def test_a_run_ends_with_the_sentence(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = call(kvlab.cli.run.main, *TINY, "tracking=off", override)
    assert ended.code == 2
    assert ended.output.startswith("error: ")
    assert ended.output.count("\n") == 1


def test_no_password_of_another_setting_is_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        compose_run(["tracking.uri='postgresql://me:secret@host/db'", "hydra.job.num=x", "kv=nope"])
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"tracking.uri=postgresql://.*@host/db=: cannot be read"):
        compose_run(["tracking.uri=postgresql://me:secret@host/db="])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            ["hydra.run.dir={file}"],
            "error: hydra.run.dir={file}: cannot be written: File exists; choose another directory",
        ),
        (["hydra.run.dir={file}/x"], "cannot be written: Not a directory"),
        (["-m", "seed=1,2", "hydra.sweep.dir={file}"], "cannot be written: "),
        (["hydra.run.dir=${{nope}}"], "error: hydra.run.dir=${{nope}}: Interpolation key 'nope' not found"),
        (["-m", "kv.block_size=range(1,1000000000000)"], "points=10,001: more than the 10,000 points that a sweep"),
        (["-m", "seed=range(1,300)", "repeats=100"], "points=29,900: more than the 10,000 points"),
    ],
)
def test_where_results_cannot_go(settings: list[str], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    flags = [text for text in settings if text.startswith("-")]
    given = [text.format(file=file) for text in settings if text not in flags]
    ended = call(kvlab.cli.run.main, *flags, *TINY, "tracking=off", *given)
    assert ended.code == 2
    assert sentence.format(file=file) in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("main", [kvlab.cli.explain.main, kvlab.cli.roofline.main], ids=["explain", "roofline"])
def test_a_word_alone_is_a_run(main: Callable[[], None]) -> None:
    ended = call(main, "nowhere")
    assert ended.code == 2
    assert ended.output.startswith(
        "error: run=nowhere: is no output directory with a summary.json, nor the id of a "
    )


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = call(kvlab.cli.run.main, *TINY, "tracking=off", "workload=azure", "workload.path=none.csv")
    assert ended.code == 2, ended.output
    assert not list(tmp_path.glob("outputs/*/*"))


def test_a_trace_is_explained_whatever_its_name(tmp_path: Path) -> None:
    trace = tmp_path / "it's a=b, c (1).jsonl"
    write_trace(trace, Header(), [TracedRequest(20, 0.0, 3, e2el_ms=50.0)])
    simulated = ("executor=simulated", "hardware=h100_sxm", "executor.timing=roofline", "model=llama3_1_8b")
    done = call(kvlab.cli.explain.main, f"trace={trace}", *simulated, "figure=null")
    assert done.code == 0, done.output
    assert "1 requests on simulated h100_sxm" in done.output
