"""engine=openai: what a client sees of any server, and what becomes of one that does not work."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvlab.cli.compose import compose_one, compose_run
from kvlab.config import EngineChoiceConfig, RunConfig
from kvlab.core import UNKNOWN_TOKEN, FinishReason, Request, RequestRecord, SamplingParams
from kvlab.errors import ConfigError, KvlabError, PeerError
from kvlab.lab.compare.work import check_outputs
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.results.records import read_run
from kvlab.lab.run.drive import drive
from kvlab.lab.run.peer_plan import plan_peer
from kvlab.peers import remote
from kvlab.peers.endpoint import EndpointEngine
from kvlab.peers.engines import ENGINES
from tests.support.endpoint import endpoint
from tests.support.model import tiny_config
from tests.support.pools import sharing_pool
from tests.support.runs import run_small
from tests.support.serving import served

VOCABULARY = f"model.architecture.vocab_size={tiny_config().vocab_size}"


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests run, requests are sent late."""
    monkeypatch.setattr(remote, "MOST_LAG_MS", 1e9)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return compose_run(["model=qwen3_tiny", "workload.num_requests=1"]).config


def request(name: str, prompt: int = 4, output: int = 3, arrival_s: float = 0.0, **sampling: Any) -> Request:
    asked = SamplingParams(output, ignore_eos=True, **sampling)
    return Request(name, tuple(range(10, 10 + prompt)), asked, arrival_s)


def connect(config: RunConfig, url: str, *, needs_ids: bool = False, **settings: Any) -> EndpointEngine:
    serving = EngineChoiceConfig(kind="openai", url=url, **settings)
    return EndpointEngine(
        replace(config, engine=serving), longest=90, needs_ids=needs_ids, should_stop=lambda: False
    )


def run(config: RunConfig, url: str, requests: list[Request], limit: int | None = None, **settings: Any) -> RunLog:
    engine = connect(config, url, **settings)
    try:
        log = drive(engine, requests, concurrency=limit)
        log.engine_report = engine.report()
        return log
    finally:
        engine.close()


class TestAgainstOurServer:
    def test_a_run_leaves_what_any_run_leaves_but_what_a_client_cannot_see(self, tmp_path: Path) -> None:
        with served(words=False, pool=sharing_pool()) as server:
            settings = [VOCABULARY, "engine=openai", f"engine.url={server.url}/v1", "model.max_seq_len=64"]
            shared = ["workload.system_len=16", "workload.num_requests=4", "workload.concurrency=1"]
            results = [
                run_small(tmp_path / name, *settings, *shared, "engine.metrics_s=0.01") for name in ("one", "two")
            ]
        assert [result.status for result in results] == ["finished", "finished"]
        one, two = (read_run(tmp_path / name) for name in ("one", "two"))
        assert check_outputs(one, two).equal
        assert one.choices["engine"] == "openai"
        assert one.facts["engine"]["version"] == "0.1.0"
        known = {"tokens/output", "latency/ttft_ms_p50", "latency/itl_ms_p50", "capacity/peak_running"}
        assert known | {"requests/preemptions", "kv/block_utilization_mean"} <= one.metrics.keys()
        unknown = {"kv/internal_fragmentation_mean", "latency/queue_ms_p50", "kv/leaked_blocks"}
        assert not unknown & one.metrics.keys()
        # The prompts of a run share their beginning; nothing is left of the run before.
        assert one.metrics["kv/prefix_hit_tokens"] == two.metrics["kv/prefix_hit_tokens"] == 3 * 16
        assert not (tmp_path / "one/steps.parquet").exists()
        series = pq.read_table(tmp_path / "one/series.parquet")
        assert {"time_s", "running", "waiting", "kv_usage", "prefix_hits"} <= set(series.column_names)
        columns = set(pq.read_table(tmp_path / "one/requests.parquet").column_names)
        assert {"ttft_ms", "output_token_ids", "cached_tokens"} <= columns
        assert not {"queue_ms", "preemptions", "scheduled_s", "recomputed_tokens"} & columns

    def test_what_a_request_was_refused_for_is_its_error(self, tmp_path: Path) -> None:
        with served(words=False) as server:
            result = run_small(tmp_path, "engine=openai", f"engine.url={server.url}", "model.max_seq_len=64")
        assert result.status == "failed"
        assert result.error is not None
        assert result.error.startswith("the server refused it: 400: token id")

    def test_a_run_that_is_stopped_leaves_its_requests(self, config: RunConfig) -> None:
        stops = iter([False, True])
        with endpoint(after=1, then="hang") as server:
            engine = connect(config, server.url)
            log = drive(engine, [request("a"), request("b")], should_stop=lambda: next(stops))
            engine.close()
        assert log.interrupted
        assert [record.finish_reason for record in log.records] == [FinishReason.ABORTED] * 2
        assert not engine.has_work()


class TestTokens:
    @pytest.mark.parametrize(
        ("script", "ids", "times"),
        [
            ({}, (0, 1, 2, 3), 4),
            ({"tokens_per_event": 3}, (0, 1, 2, 3), 2),
            ({"tells_ids": False}, (UNKNOWN_TOKEN,) * 4, 4),
            ({"tells_ids": False, "tokens_per_event": 2}, (UNKNOWN_TOKEN,) * 4, 2),
            ({"tells_ids": False, "tokens_per_event": 2, "usage": "end"}, (UNKNOWN_TOKEN,) * 4, 2),
        ],
    )
    def test_are_counted_as_the_server_tells_them(
        self, config: RunConfig, script: dict[str, Any], ids: tuple[int, ...], times: int
    ) -> None:
        with endpoint(**script) as server:
            log = run(config, server.url, [request("a", output=4)])
        (record,) = log.records
        assert (record.output_token_ids, record.finish_reason, record.text) == (ids, FinishReason.LENGTH, "xxxx")
        assert len(record.token_times_s) == 4
        assert len(set(record.token_times_s)) <= times
        assert log.engine_report is not None
        assert ("output_token_ids" in log.engine_report.unreported) == (UNKNOWN_TOKEN in ids)

    def test_whose_ids_are_not_told_are_counted_when_the_run_is_read_again(self, tmp_path: Path) -> None:
        with endpoint(tells_ids=False, has_metrics=False) as server:
            for name in ("one", "two"):
                run_small(tmp_path / name, "engine=openai", f"engine.url={server.url}")
        one, two = (read_run(tmp_path / name) for name in ("one", "two"))
        assert "output_token_ids" not in pq.read_table(tmp_path / "one/requests.parquet").column_names
        assert not (tmp_path / "one/series.parquet").exists()
        assert sum(len(record.output_token_ids) for record in one.requests()) == one.metrics["tokens/output"]
        assert "no outputs of the same requests were kept" in check_outputs(one, two).text

    def test_that_end_before_the_forced_length_are_told_of(self, config: RunConfig) -> None:
        with endpoint(most_tokens=2) as server:
            log = run(config, server.url, [request("a", output=4), request("b", output=2)])
            asked = server.script.bodies[1]
        assert (asked["ignore_eos"], asked["min_tokens"], asked["temperature"]) == (True, 4, 0.0)
        assert log.engine_report is not None
        assert list(log.engine_report.notes) == [
            "1 of 2 answers are shorter than was asked for: the engine does not obey ignore_eos, and throughput is "
            "not comparable"
        ]


class TestLoad:
    def test_what_the_server_says_of_itself_becomes_metrics(self, config: RunConfig) -> None:
        with endpoint() as server:
            log = run(config, server.url, [request("a"), request("b")])
        metrics = run_metrics(log)
        assert metrics["kv/block_utilization_mean"] == 25
        assert metrics["requests/preemptions"] == 2  # the script's counter, without the first request's
        assert (metrics["kv/prefix_hit_tokens"], metrics["kv/prefix_hit_rate"]) == (0, 0)
        assert metrics["capacity/token_slots"] == 1600

    @pytest.mark.parametrize("settings", [{"limit": 1}, {"max_in_flight": 1}])
    def test_is_limited_in_a_closed_loop_and_by_the_client(
        self, config: RunConfig, settings: dict[str, Any]
    ) -> None:
        with endpoint() as server:
            log = run(config, server.url, [request(name) for name in "abc"], **settings)
        spans = sorted((record.token_times_s[0], record.finished_s) for record in log.records)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        arrivals = [record.arrival_s for record in log.records]
        assert (arrivals[1] > 0) == ("limit" in settings)

    def test_that_was_sent_late_is_invalid(
        self, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "MOST_LAG_MS", 0.0)
        with endpoint() as server:
            uniform = ["workload.arrival=uniform", "workload.rate=100"]
            result = run_small(tmp_path, "engine=openai", f"engine.url={server.url}", *uniform)
            burst = run(config, server.url, [request("a")])
        assert result.status == "failed"
        assert result.error is not None
        assert result.error.startswith("invalid: requests were sent ")
        assert result.metrics["client/send_lag_ms_p99"] > 0
        assert burst.engine_report is not None
        assert burst.engine_report.invalid is None

    def test_conversations_are_made_of_the_tokens_that_came(self, config: RunConfig) -> None:
        second = replace(request("b", prompt=2), follows="a")
        with endpoint() as server:
            run(config, server.url, [request("a"), second], needs_ids=True)
            assert server.script.bodies[-1]["prompt"] == [10, 11, 12, 13, 0, 1, 2, 10, 11]


class TestRefusals:
    @pytest.mark.parametrize(
        ("script", "settings", "said"),
        [
            ({"key": "k"}, {}, "wants a key; give it as engine.api_key='${oc.env:NAME}'"),
            ({"models": ["a", "b"]}, {}, "has several models; give one as engine.model, of: a, b"),
            ({}, {"model": "x"}, "has no model x; give one as engine.model, of: m"),
            ({"models": []}, {}, "answers 200 to /v1/models, which is not OpenAI's protocol"),
            ({}, {"version": "1.0"}, "is version 9.9, and engine.version=1.0 asks for another"),
            ({"version": None}, {"version": "1.0"}, "does not say its version, and engine.version=1.0"),
            ({"max_model_len": 89}, {}, "takes up to 89 tokens, prompt and output together, and the workload has"),
            (
                {"refuses": "cache_salt"},
                {},
                "Unrecognized request argument supplied: cache_salt; engine.extensions=",
            ),
            (
                {"after": 0, "then": "hang"},
                {"timeout_s": 0.5},
                "had no answer within engine.timeout_s=0.5 seconds",
            ),
            ({"after": 0, "then": "break"}, {}, "the first request was cut off"),
            ({"tells_ids": False}, {"needs_ids": True}, "does not tell token ids (return_token_ids)"),
        ],
    )
    def test_a_server_that_will_not_do_is_named_before_the_run(
        self, config: RunConfig, script: dict[str, Any], settings: dict[str, Any], said: str
    ) -> None:
        with endpoint(**script) as server, pytest.raises(PeerError) as raised:
            connect(config, server.url, **settings)
        assert str(raised.value).startswith(f"engine.url={server.url}: ")
        assert said in str(raised.value)

    def test_a_key_and_openai_alone_work(self, config: RunConfig) -> None:
        with endpoint(key="k", refuses="return_token_ids") as server:
            log = run(config, server.url, [request("a")], api_key="k", extensions=False)
            refused = run(config, server.url, [request("b", top_k=4)], api_key="k", extensions=False)
        assert log.completed == 1
        assert refused.refused == [
            "request b: top_k is no part of OpenAI's protocol; engine.extensions=true asks for it in vLLM's terms"
        ]

    def test_where_nothing_listens(self, config: RunConfig) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
            with pytest.raises(PeerError, match="no server answers there \\(Connection refused\\)") as raised:
                connect(config, url)
        assert str(raised.value).startswith(f"engine.url={url}: ")

    @pytest.mark.parametrize("url", [None, "localhost:8000", "ftp://x", "http://", "http://x:99999"])
    def test_an_address_that_is_none(self, config: RunConfig, url: str | None) -> None:
        with pytest.raises(ConfigError, match=r"engine\.url"):
            plan_peer(replace(config, engine=EngineChoiceConfig(kind="openai", url=url)))

    @pytest.mark.parametrize(
        ("script", "settings", "said"),
        [
            ({"then": "error"}, {}, "the server refused it: 500: CUDA out of memory"),
            ({"then": "hang"}, {"timeout_s": 1}, "no complete answer within engine.timeout_s=1 seconds"),
            ({"then": "break"}, {}, "the connection broke off ("),
        ],
    )
    def test_a_request_that_fails_leaves_the_others(
        self, config: RunConfig, script: dict[str, Any], settings: dict[str, Any], said: str
    ) -> None:
        with endpoint(after=2, **script) as server:
            log = run(config, server.url, [request(name) for name in "ab"], limit=1, **settings)
        assert [record.finish_reason for record in log.records] == [FinishReason.LENGTH, FinishReason.FAILED]
        assert said in str(log.records[1].error)

    def test_a_server_that_ends_fails_the_run(self, tmp_path: Path) -> None:
        loop = ["workload.num_requests=4", "workload.concurrency=1"]
        with endpoint(after=3, then="end") as server, pytest.raises(PeerError) as raised:
            run_small(tmp_path, "engine=openai", f"engine.url={server.url}", *loop)
        assert "no server answers there" in str(raised.value)
        assert str(raised.value).endswith("it ended while it had requests to answer")
        assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"

    def test_what_looks_into_kvlab(self, config: RunConfig) -> None:
        inside = replace(config, debug=replace(config.debug, audit=True))
        with pytest.raises(ConfigError, match=r"debug.audit=true: looks into kvlab's own engine"):
            plan_peer(replace(inside, engine=EngineChoiceConfig(kind="openai", url="http://x")))

    def test_commands_that_have_an_engine_of_their_own(self) -> None:
        with pytest.raises(ConfigError, match=r"engine=openai: a server has kvlab's own engine; leave engine= out"):
            compose_one(["engine=openai", "engine.url=http://x"], "a server")

    def test_an_unknown_engine(self) -> None:
        assert {"kvlab", "openai"} <= set(ENGINES.names())
        with pytest.raises(KvlabError, match="unknown; known: kvlab, llamacpp, llamacpp_q8, openai"):
            compose_run(["engine=vlm"])


def test_a_callback_that_raises_fails_its_own_sample(config: RunConfig) -> None:
    ended: list[RequestRecord] = []
    with endpoint() as server:
        engine = connect(config, server.url)

        def fail(output: object) -> None:
            raise ValueError("no")

        engine.submit(request("a", output=30), fail, ended.append)
        engine.submit(request("b"), lambda output: None, ended.append)
        while engine.has_work():
            engine.step()
            engine.clock.wait_until(engine.clock.now() + 0.05)
        engine.close()
    assert {record.name: record.error for record in ended} == {"a": "on_output raised ValueError: no", "b": None}
