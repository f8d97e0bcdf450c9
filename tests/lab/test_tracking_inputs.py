"""What a run was made of: its workload, its machine, its commit, its command; and no password."""

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from kvlab.config import LengthConfig, RunConfig, TrackingConfig, WorkloadConfig
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.provenance import provenance, uncommitted
from kvlab.lab.run.recording import Recording, RunContext
from kvlab.lab.settings import Composition
from kvlab.lab.terminal import Terminal
from kvlab.lab.tracking import RunStatus
from kvlab.workloads import build_requests
from kvlab.workloads.describe import describe_workload
from tests.support.tracking import empty_store, start

LENGTHS = LengthConfig(min=4, max=12)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "mlflow.db").write_bytes(empty_store())
    return folder


def client(root):
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")


def facts(**settings):
    config = WorkloadConfig(name="few", num_requests=5, prompt_len=LENGTHS, output_len=LENGTHS, **settings)
    requests = build_requests(config, vocab_size=100, seed=3)
    return describe_workload(config, requests, vocab_size=100, seed=3), requests


def test_a_workload_is_described_by_its_digest_its_lengths_and_what_draws_it_again():
    said, requests = facts(turns=2)
    lengths = sorted(len(request.prompt_token_ids) for request in requests)
    assert (said.name, said.source_type, len(said.digest)) == ("few", "synthetic", 16)
    assert (said.profile["num_rows"], said.profile["later_turns"]) == (10, 5)
    assert said.profile["prompt_tokens"] == sum(lengths)
    spread = said.profile["prompt_length"]
    assert (spread["min"], spread["max"]) == (lengths[0], lengths[-1])
    assert lengths[0] <= spread["p50"] <= spread["p90"] <= lengths[-1]
    source = said.source
    assert (source["seed"], source["vocab_size"], source["prompt_len"]["max"]) == (3, 100, 12)
    assert facts(turns=2)[0] == said
    assert facts(turns=1)[0].digest != said.digest


def test_a_file_of_requests_is_named(tmp_path):
    file = tmp_path / "asked.jsonl"
    file.write_text('{"arrival_s": 0.5, "prompt_tokens": 8, "max_tokens": 4}\n')
    config = WorkloadConfig(name="jsonl", source="jsonl", path=str(file))
    said = describe_workload(config, build_requests(config, vocab_size=9, seed=0), vocab_size=9, seed=0)
    assert (said.source_type, said.source["uri"]) == ("local", str(file))
    assert said.profile["last_arrival_s"] == 0.5


def test_the_workload_is_the_runs_input(root):
    said, _ = facts()
    ids = [start(root, workload=said, facts={}).run_id for _ in "ab"]
    inputs = [client(root).get_run(run_id).inputs.dataset_inputs for run_id in ids]
    assert [len(given) for given in inputs] == [1, 1]
    dataset = inputs[0][0].dataset
    assert (dataset.name, dataset.digest, dataset.source_type) == ("few", said.digest, "synthetic")
    assert json.loads(dataset.profile)["num_rows"] == 5
    assert json.loads(dataset.source)["seed"] == 3
    assert {tag.key: tag.value for tag in inputs[0][0].tags} == {"mlflow.data.context": "workload"}
    experiment = client(root).get_experiment_by_name("kvlab").experiment_id
    found = client(root).search_runs([experiment], f"dataset.digest = '{said.digest}'")
    assert {run.info.run_id for run in found} == set(ids)


def test_system_metrics_are_sampled_apart_and_only_when_asked_for(root):
    for wanted in (False, True):
        tracker = start(root, system_metrics=wanted, facts={})
        tracker.watch_system()
        tracker.finish(RunStatus.FINISHED)
        logged = client(root).get_run(tracker.run_id).data.metrics
        assert ("system/cpu_utilization_percentage" in logged) is wanted
        assert ("system/system_memory_usage_megabytes" in logged) is wanted


def git(folder, *arguments):
    """What git prints, in this folder."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_provenance_knows_the_commit_and_whether_the_tree_was_dirty(tmp_path, monkeypatch):
    assert "git.commit" not in provenance(tmp_path)
    git(tmp_path, "init")
    assert "git.commit" not in provenance(tmp_path)  # a repository without a commit
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    facts = provenance(tmp_path)
    assert (facts["git.commit"], facts["git.dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), "false")
    (tmp_path / "new.py").touch()
    assert provenance(tmp_path)["git.dirty"] == "true"
    monkeypatch.setenv("PATH", "")
    assert "git.commit" not in provenance(tmp_path)
    assert provenance(tmp_path)["version.torch"]


def test_provenance_names_the_program_without_this_machines_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "src" / "run.py")])
    assert provenance(tmp_path)["program"] == str(Path("src", "run.py"))
    assert provenance(tmp_path / "other")["program"] == "run.py"


def record(directory, config):
    """What the terminal says of a run's record, and its summary."""
    said = StringIO()
    yaml = f"tracking:\n  uri: {config.tracking.uri}\n"
    made = Composition(config, {"kv": "paged"}, lambda: yaml, dict)
    recording = Recording(RunContext(made, directory, Terminal(file=said, width=300), "a run"))
    recording.wait_until_open()
    recording.finish(RunLog(), {"x": 1.0}, RunStatus.FINISHED)
    return said.getvalue(), json.loads((directory / "summary.json").read_text())


def test_a_run_says_where_it_was_made_and_that_the_tree_had_changes(tmp_path, monkeypatch):
    (tmp_path / "tree").mkdir()
    monkeypatch.setattr("kvlab.lab.results.provenance.SOURCE", tmp_path / "tree")
    git(tmp_path / "tree", "init")
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "first")
    off = RunConfig(tracking=TrackingConfig(backend="off"))
    said, summary = record(tmp_path, off)
    assert "uncommitted" not in said
    assert summary["environment"]["git.dirty"] == "false"
    (tmp_path / "tree" / "changed.py").touch()
    said, summary = record(tmp_path, off)
    environment = summary["environment"]
    assert f"note: uncommitted changes: commit {environment['git.commit'][:10]} alone" in said
    assert environment["git.dirty"] == "true"
    wanted = {"host.cpu", "host.os", "host.memory", "version.torch", "version.kvlab", "command", "program"}
    assert wanted <= environment.keys()
    assert uncommitted({}) is None


def test_no_password_is_kept(tmp_path, root, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["/bin/python", "-m", "src.run", "tracking.uri=http://u:secret@h/x"])
    assert provenance(tmp_path)["command"] == "python -m src.run 'tracking.uri=http://***@h/x'"
    monkeypatch.setattr("sys.orig_argv", ["/bin/python", "/env/bin/kvlab", "run", "kv=paged"])
    assert provenance(tmp_path)["command"] == "kvlab run kv=paged"
    tracking = TrackingConfig(uri=f"sqlite:///{root / 'mlflow.db'}", artifacts="s3://key@bucket/runs")
    config = RunConfig(tracking=tracking, tags={"origin": "https://u:secret@git.host/a"})
    _, summary = record(tmp_path, config)
    run = client(root).get_run(summary["run_id"])
    assert run.data.params["tracking.artifacts"] == "s3://***@bucket/runs"
    kept = "".join(file.read_text() for file in tmp_path.iterdir() if file.suffix in (".yaml", ".json"))
    assert "secret" not in kept + str(run.data.tags) + str(run.data.params)


def test_the_page_of_a_run_begins_with_its_command_and_its_choices(root):
    known = {"command": "python -m src.run " + " ".join(f"kv.num_blocks={i}" for i in range(12)), "host.name": "h"}
    tags = {"choice.kv": "paged", "host.name": "mine"}
    tracker = start(root, tags=tags, facts=known)
    kept = client(root).get_run(tracker.run_id).data.tags
    note = kept["mlflow.note.content"]
    assert max(map(len, note.splitlines())) <= 74
    assert note.replace("\\\n  ", "").strip("`\n") == known["command"]
    assert kept["host.name"] == "mine"
    experiment = client(root).get_experiment_by_name("kvlab")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
