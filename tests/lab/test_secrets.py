"""Secrets given to the commands in every way there is: none is in a file that they leave, or in what they print."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import kvlab.cli.report
import kvlab.cli.roofline
import kvlab.cli.run
import kvlab.cli.tune
import kvlab.cli.ui
from kvlab.cli.compose import compose_run
from kvlab.config import TrackingConfig
from kvlab.core import FinishReason, RequestRecord
from kvlab.errors import TrackingError
from kvlab.lab.campaigns.sweep.sweep import record_failure
from kvlab.lab.results.columns import request_row
from kvlab.lab.tracking import MlflowTracker, Store, start_run
from kvlab.secrets import redact, redacted, redacted_setting
from tests.support.commands import TINY, Command, Lab, call
from tests.support.marked import ENVIRONMENT, MARK, SECRETS, check


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.chdir(tmp_path)
    return Lab.with_store(tmp_path)


def as_typed(main: Callable[[], None], *arguments: str) -> Command:
    """The command, which finds its arguments where a run looks for the command that started it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "orig_argv", ["/bin/python", "-m", "src.run", *arguments])
        return call(main, *arguments)


def test_a_run_keeps_no_secret_and_is_found_again(lab: Lab) -> None:
    ran = as_typed(kvlab.cli.run.main, *lab.arguments("figures=true", *SECRETS))
    again = as_typed(kvlab.cli.run.main, *lab.arguments("resume=true", *SECRETS))
    assert (ran.code, again.code) == (0, 0), ran.output + again.output
    check(lab.base, ran, again)
    (run,) = lab.runs()
    assert f"done before: run {run.run_id}" in again.output
    assert run.name == run.params["model.name"] == run.tags["origin"] == "${oc.env:PLAIN_NAME}"
    assert run.tags["same"] == "of ${tags.origin}"
    assert (run.tags["short"], ENVIRONMENT["SHORT"] in ran.output) == ("${oc.env:SHORT}", False)
    assert run.tags["link"] == "https://***@git.host/a?x=1&access_token=***"
    assert "'run_name=${oc.env:PLAIN_NAME}'" in run.tags["command"]
    kept = OmegaConf.load(lab.base / "out" / "config.yaml")
    assert kept.tags.same == "of " + ENVIRONMENT["PLAIN_NAME"]  # whoever has the environment gets all of it


def test_runs_that_differ_in_the_environment_alone_are_not_repeats(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, order in enumerate(("fcfs", "priority", "fcfs")):
        monkeypatch.setenv("ORDER", order)
        ran = lab.here("scheduler.order=${oc.env:ORDER}", "tracking=off", directory=str(number))
        assert ran.code == 0, ran.output
    monkeypatch.delenv("ORDER")
    said = call(kvlab.cli.report.main, "0", "1", "2", "figures=false").output
    assert "(2)" in said
    assert "(1)" in said


def test_a_run_that_fails_is_recorded_without_what_its_error_quotes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(f"no model at https://{ENVIRONMENT['HF_TOKEN']}@host")

    monkeypatch.setattr("kvlab.lab.run.serve.make_engine", fail)
    ran = as_typed(kvlab.cli.run.main, *lab.arguments())
    assert (ran.code, lab.runs()[0].tags["kvlab.error"]) == (1, "RuntimeError: no model at https://***@host")
    error = RuntimeError(f"token={MARK}")
    record_failure(lab.base / "point", "a point", error)
    record = RequestRecord("r", 0, 0.0, 1, (), (), FinishReason.ABORTED, 0.0, error=str(error))
    assert request_row(record)["error"] == "token=***"
    check(lab.base, ran)


def test_a_roofline_needs_no_environment_that_changes_nothing_of_it(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.here("+tags.origin=${oc.env:PLAIN_NAME}", "run_name=${oc.env:PLAIN_NAME}", "tracking=off")
    monkeypatch.delenv("PLAIN_NAME")
    assert kvlab.cli.roofline.read_run(lab.base / "out")[1].model.name == "qwen3_tiny"


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_a_search_and_their_reports_keep_no_secret(lab: Lab) -> None:
    sweep = as_typed(kvlab.cli.run.main, *lab.arguments("-m", "figures=true", "kv.num_blocks=64,128", *SECRETS))
    tune = as_typed(
        kvlab.cli.tune.main,
        *("optimize=throughput/output_tokens_per_s", "memory=100MiB", "trials=2", f"tracking.uri={lab.uri}"),
        *(*TINY, *SECRETS, f"+tags.storage=http://user:{MARK}@host"),
    )
    report = as_typed(kvlab.cli.report.main, "out", "by=tags.origin,kv.num_blocks")
    roofline = as_typed(kvlab.cli.roofline.main, "run=out/0")
    commands = (sweep, tune, report, roofline)
    assert [each.code for each in commands] == [0] * 4, "".join(each.output for each in commands)
    check(lab.base, *commands)
    assert "kvlab run" in tune.output
    assert "'+tags.storage=http://***@host'" in tune.output


def failing(*arguments: str, main: Callable[[], None] = kvlab.cli.run.main) -> str:
    ran = as_typed(main, *arguments)
    assert ran.code != 0, ran.output
    check(Path(), ran)
    return ran.output


def test_no_error_tells_a_secret(lab: Lab) -> None:
    address = f"postgresql://user:half/@{MARK}@127.0.0.1:9/kvlab"
    assert "model.path=/${oc.env:HF_TOKEN}: " in failing("model=checkpoint", "model.path=/${oc.env:HF_TOKEN}")
    failing("kv.block_size=${oc.env:PLAIN_NAME}")
    failing(f"tracking.url={address}")
    failing(f"tracking.uri={address}{{")
    failing("workload=jsonl", f"workload.path=https://host/x?sig={MARK}")
    failing("kv.num_blocks=${oc.env:PLAIN_NAME},2", "-m", "hydra.sweep.dir=many")
    said = failing("tracking.artifacts=s3://key:${oc.env:AWS_SECRET_ACCESS_KEY}@bucket/runs")
    assert "error: tracking.artifacts=s3://***@bucket/runs: has a password in it, which the store" in said
    failing(address, main=kvlab.cli.report.main)
    failing(address, f"--store={address}", main=kvlab.cli.ui.main)
    tune = ("optimize=throughput/output_tokens_per_s", "memory=100MiB", *TINY, "tracking=off")
    assert "storage=postgresql://***@127.0.0.1:9/kvlab: cannot be used: " in failing(
        *tune, f"storage={address}", main=kvlab.cli.tune.main
    )


def test_an_unexpected_error_ends_with_a_traceback_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(f"postgresql://user:{MARK}@host and {ENVIRONMENT['AWS_ACCESS_KEY_ID']}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvlab.cli.run._run", fail)
    for full in ("0", "1"):
        monkeypatch.setenv("HYDRA_FULL_ERROR", full)
        said = failing(f"+tags.link=https://user:{MARK}@host")
        assert "ZeroDivisionError: postgresql://***@host and ***" in said


@pytest.mark.parametrize("shown", [("--cfg", "job"), ("--cfg", "job", "--resolve")])
def test_no_secret_is_in_the_configuration_that_hydra_shows(tmp_path: Path, shown: tuple[str]) -> None:
    ran = call(kvlab.cli.run.main, *shown, f"tracking.uri=postgresql://user:{MARK}@host/kvlab", *SECRETS)
    check(tmp_path, ran)
    assert "uri: postgresql://***@host/kvlab" in ran.output


def test_a_store_with_a_password_is_opened_by_the_command_that_a_run_ends_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"postgresql+psycopg2://user:{MARK}@host/kvlab"

    def command() -> str:
        return MlflowTracker(Store(address, 1), "1", "2", 0).where().splitlines()[0]

    assert command() == 'MLFLOW_TRACKING_URI="postgresql+psycopg2://***@host/kvlab" kvlab ui'
    monkeypatch.setenv("STORE", address)
    assert compose_run(["tracking.uri=${oc.env:STORE}"]).config.tracking.uri == address
    assert command() == 'MLFLOW_TRACKING_URI="$STORE" kvlab ui'
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert command() == "kvlab ui"


@pytest.fixture
def port() -> Iterator[int]:
    """One that nobody listens at."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield int(closed.getsockname()[1])


@pytest.mark.parametrize(
    "uri",
    [
        "postgresql://user:database-{0}@127.0.0.1:{1}/kvlab",
        "postgresql://user:half/@{0}@127.0.0.1:{1}/kvlab",
        "http://user:server-{0}@127.0.0.1:{1}",
        "http://token-{0}@127.0.0.1:{1}",
        "http://127.0.0.1:{1}/?token=query-{0}",
        "http://user:half/{0}@127.0.0.1:{1}",
        "mysql://user:{0}@127.0.0.1:{1}/kvlab",
        "nothing://user:{0}@127.0.0.1:{1}/kvlab",
        "postgresql://user:{0}@127.0.0.1:port/kvlab",
    ],
)
def test_a_store_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path, port: int, uri: str) -> None:
    config = TrackingConfig(uri=uri.format(MARK, port))
    with pytest.raises(TrackingError, match=r"tracking\.uri=\w+(\+psycopg2)?://.*127") as raised:
        start_run(config, root=tmp_path, run_name="a", params={}, tags={}, facts={})
    assert MARK not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("given", ["MLFLOW_TRACKING_URI", "STORE"])
def test_a_run_whose_store_is_not_there_keeps_no_secret(
    lab: Lab, port: int, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(given, f"postgresql://user:database-{MARK}@127.0.0.1:{port}/kvlab")
    lab.uri = "null" if given == "MLFLOW_TRACKING_URI" else f"${{oc.env:{given}}}"
    ran = as_typed(kvlab.cli.run.main, *lab.arguments(*SECRETS))
    assert ran.code == 1, ran.output
    assert "warning: tracking.uri=postgresql+psycopg2://***@127.0.0.1:" in ran.output
    check(lab.base, ran)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://user:pw@host/a and http://b", "see https://***@host/a and http://b"),
        ("http://token@host", "http://***@host"),
        ("postgresql://user:p@s/s@host/db", "postgresql://***@host/db"),
        ("postgresql://user:two words@host/db", "postgresql://***@host/db"),
        ("http://host/?a=1&token=abc&b=2", "http://host/?a=1&token=***&b=2"),
        ("https://h/x?X-Amz-Signature=abc&sig=def", "https://h/x?X-Amz-Signature=***&sig=***"),
        ("host=db password='abc' user=me", "host=db password='***' user=me"),
        ("  api_key: abc\n  other: abc", "  api_key: ***\n  other: abc"),
        ('{"secret": "abc", "n": 1}', '{"secret": "***", "n": 1}'),
        ("{secret: abc}", "{secret: ***"),
        ("api_key=-  token=-abc key=- api_key=-", "api_key=-  token=*** key=- api_key=-"),
        *[
            (text, text)
            for text in (
                "sqlite:////home/me@work/mlflow.db",
                "postgresql://<user>:<password>@<host>/<database>",
                "tags.token=${oc.env:HF_TOKEN}",
                "scheduler.max_batched_tokens=512 token=null",
                "no such token: the model ended",
                "set MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, to an account",
            )
        ],
    ],
)
def test_what_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


def test_errors_quote_an_address_in_part() -> None:
    address = "postgresql://me:half@st%2Fring@host/db?token=abcdef"
    assert redact('host name "st%2Fring@host", "half@st/ring", abcdef', address) == (
        'host name "***@host", "***", ***'
    )
    assert redact('user "mlflow" of mlflow', "postgresql://mlflow:mlflow@host") == 'user "mlflow" of mlflow'


def test_settings_are_hidden_by_their_names_and_numbers_are_not() -> None:
    given = {"api_token": "a", "tokens": "b", "secret": 7, "list": ["http://u:p@h"], "token": "${oc.env:X}"}
    assert redacted("tags", given) == given | {"api_token": "***", "list": ["http://***@h"]}
    assert redacted_setting("+tags.password=two words") == "+tags.password=***"
    assert redacted_setting("max_token=5") == redact("max_token=5") == "max_token=5"
    assert redacted_setting("http://u:p@h/?a=b") == "http://***@h/?a=b"


def test_paths_show_the_home_directory_whatever_a_configuration_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models/private")
    home = os.path.expanduser("~")
    compose_run(["+tags.home=${oc.env:HOME}", "+tags.models=${oc.env:MODELS}"])
    assert redact(f"{home}/x /models/private/y") == f"{home}/x ${{oc.env:MODELS}}/y"
