"""Steps about the recorder: a server whose answers are known, and a recorder before it, each on a free port."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from aiohttp import web
from pytest_bdd import given, parsers, then, when

from features.steps.run_steps import Runner
from features.steps.upstream import PATHS, PROMPT, WHOLE, Upstream, listening, listening_in_http_1_0
from kvlab.cli import import_, record
from kvlab.server.recorder import Recorder
from kvlab.server.tracing import TraceSettings
from kvlab.workloads.trace_format import TracedRequest, read_header, read_trace
from tests.support.commands import Command, call
from tests.support.serving import wait_until


@dataclass
class Recorded:
    """A recorder, the server behind it, and what a client got last."""

    url: str
    upstream: Upstream
    recorder: Recorder
    status: int = 0
    got: bytes = b""
    first_came: bool = False
    generated: int = 0  # calls that a trace may have
    error: Exception | None = None

    def ask(self, kind: str) -> None:
        """Ask as a client; keep what came."""
        body = {
            "prompt": PROMPT,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 9,
            "stream": True,
        }
        headers = {"Authorization": "Bearer secret-key"}
        method = "GET" if kind == "list" else "POST"
        self.got = b""
        self.generated += method == "POST"
        with httpx.Client(timeout=60, headers=headers) as client:
            try:
                with client.stream(method, self.url + PATHS[kind], json=body) as answer:
                    self.status = answer.status_code
                    for part in answer.iter_bytes():
                        self.got += part
                        self.first_came |= not self.upstream.goes_on.is_set()
                        self.upstream.goes_on.set()
            except httpx.HTTPError as error:
                self.error = error

    def lines(self) -> list[TracedRequest]:
        return lines_of(Path(self.recorder.trace.path))


@dataclass(frozen=True)
class Recording:
    """A recorder that is a process, and its trace."""

    process: subprocess.Popen[str]
    url: str
    trace: Path
    upstream: Upstream

    def lines(self) -> list[TracedRequest]:
        return lines_of(self.trace)


def lines_of(path: Path) -> list[TracedRequest]:
    has_lines = path.is_file() and path.stat().st_size
    return [request for _, request in read_trace(str(path))] if has_lines else []


@pytest.fixture
def opened_recorder() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def upstream_of(stack: ExitStack, upstream: Upstream) -> str:
    if "HTTP/1.0" in upstream.kind:
        return stack.enter_context(listening_in_http_1_0(upstream))
    app = web.Application()
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = upstream.answer
    app.router.add_route("*", "/v1/{path:.*}", handler)
    app.router.add_post("/tokenize", upstream.tokenize)
    app.router.add_get("/health", _ready)
    return stack.enter_context(listening(app))


def recorder_before(
    stack: ExitStack, folder: Path, kind: str | None, tokenizer: str | None = None, *, text: bool = False
) -> Recorded:
    upstream = Upstream(kind or "")
    url = upstream_of(stack, upstream) if kind else "http://127.0.0.1:9"
    trace = TraceSettings(str(folder / "trace.jsonl"), b"0123456789abcdef", tokenizer, url, text=text)
    recorder = Recorder(trace)
    return Recorded(stack.enter_context(listening(recorder.app())), upstream, recorder)


async def _ready(request: web.Request) -> web.Response:
    return web.Response()


@given(parsers.parse("a recorder before a server that answers {kind}"), target_fixture="recorded")
def recorder_of(opened_recorder: ExitStack, tmp_path: Path, kind: str) -> Recorded:
    return recorder_before(opened_recorder, tmp_path, kind)


@given(parsers.parse("a recorder that keeps text before a server that answers {kind}"), target_fixture="recorded")
def recorder_with_text(opened_recorder: ExitStack, tmp_path: Path, kind: str) -> Recorded:
    return recorder_before(opened_recorder, tmp_path, kind, text=True)


@given("a recorder that asks the server for tokens", target_fixture="recorded")
def recorder_that_asks(opened_recorder: ExitStack, tmp_path: Path) -> Recorded:
    return recorder_before(opened_recorder, tmp_path, "in whole", "upstream")


@given(parsers.parse("a recorder, as a process, before a server that answers {kind}"), target_fixture="recording")
def recorder_process(opened_recorder: ExitStack, tmp_path: Path, kind: str) -> Recording:
    upstream, trace = Upstream(kind), tmp_path / "trace.jsonl"
    to = (f"upstream={upstream_of(opened_recorder, upstream)}", "port=0", f"to={trace}")
    command = (sys.executable, "-m", "kvlab.cli", "record", *to)
    pipe = subprocess.PIPE
    process = opened_recorder.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
    opened_recorder.callback(process.kill)
    assert process.stdout is not None
    url = process.stdout.readline().split(" at ")[1].split(";")[0]
    return Recording(process, url, trace, upstream)


@given("a recorder before no server", target_fixture="recorded")
def recorder_of_none(opened_recorder: ExitStack, tmp_path: Path) -> Recorded:
    return recorder_before(opened_recorder, tmp_path, None)


@given("the trace cannot be written")
def unwritable(recorded: Recorded) -> None:
    Path(recorded.recorder.trace.path).mkdir()


@when(parsers.re(r"a client asks for a (?P<kind>\w+) through it"))
def ask_through(recorded: Recorded, kind: str) -> None:
    recorded.ask(kind)


@when(parsers.re(r"a client asks through it for (?P<asked>\{.*\})"))
def ask_exactly(recorded: Recorded, asked: str) -> None:
    body = json.loads(asked)
    path = PATHS["chat" if "messages" in body else "completion"]
    assert httpx.post(recorded.url + path, json=body).status_code == 200
    recorded.generated += 1


@when("a client leaves while the server pauses")
def leave(recording: Recording) -> None:
    body = {"prompt": PROMPT, "stream": True}
    with httpx.stream("POST", f"{recording.url}/v1/completions", json=body) as answer:
        next(answer.iter_bytes())
    wait_until(lambda: bool(recording.lines()))
    recording.upstream.goes_on.set()


@then("the server saw that its client left")
def was_left(recording: Recording) -> None:
    wait_until(lambda: recording.upstream.was_left is not None)
    assert recording.upstream.was_left


@then(parsers.parse('the trace has the request, which ended by "{reason}", and the recorder logged nothing'))
def left_in_trace(recording: Recording, reason: str) -> None:
    (line,) = recording.lines()
    assert (line.output_tokens, line.finish_reason) == (1, reason)
    recording.process.send_signal(signal.SIGINT)
    assert recording.process.communicate(timeout=30)[1] == ""


@when(parsers.parse("a client asks for {count:d} completions of one prompt through it"))
def ask_often(request: pytest.FixtureRequest, count: int) -> None:
    if "recording" in request.fixturenames:
        url = request.getfixturevalue("recording").url
        for _ in range(count):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}).json() == WHOLE
        # A client has its answer before the recorder has handed it on: a later call comes behind that.
        assert httpx.get(f"{url}/health").json()["trace"]["lost"] == 0
        return
    recorded: Recorded = request.getfixturevalue("recorded")
    for _ in range(count):
        recorded.ask("completion")
    wait_until(lambda: recorded.recorder.trace.progress.written == count)


@when(parsers.parse('I run the recorded trace with "{text}" on a tiny model'))
def run_recorded(lab: Runner, commands: list[Command], recorded: Recorded, text: str) -> None:
    commands.append(lab.run(f"{text} workload.path={recorded.recorder.trace.path}"))


@when(parsers.parse('I record with "{settings}"'))
def record_with(commands: list[Command], settings: str) -> None:
    commands.append(call(record.main, *settings.split()))


@when("the recorder is killed")
def kill_recorder(recording: Recording) -> None:
    recording.process.kill()
    recording.process.wait(30)


@then(parsers.parse("the trace comes to have {count:d} requests, and one of their prompts again and again"))
def killed_trace(recording: Recording, count: int) -> None:
    wait_until(lambda: len(recording.lines()) == count)
    assert len({tuple(line.hashes or ()) for line in recording.lines()}) == 1


@then(
    parsers.parse("the server was asked with the client's key, and the trace has the {count:d} tokens that it said")
)
def server_tokens(recorded: Recorded, count: int) -> None:
    wait_until(lambda: recorded.recorder.trace.progress.seen == 1)
    (line,) = recorded.lines()
    assert (line.prompt_tokens, len(line.hashes or ())) == (count, -(-count // 16))
    assert recorded.upstream.asked_for_tokens_by == "Bearer secret-key"


@then(parsers.parse("the client got status {status:d} and the bytes of the server"))
def got_bytes(recorded: Recorded, status: int) -> None:
    assert recorded.error is None
    assert (recorded.status, recorded.got) == (status, recorded.upstream.sent)


@then(parsers.parse('the client got status {status:d} and "{text}"'))
def got_text(recorded: Recorded, status: int, text: str) -> None:
    assert recorded.status == status
    assert text in recorded.got.decode()


@then(parsers.parse("the trace has {count:d} requests"))
def trace_has(recorded: Recorded, count: int) -> None:
    wait_until(lambda: recorded.recorder.trace.progress.seen == recorded.generated)
    assert len(recorded.lines()) == count


@then(parsers.re(r"the trace has prompts of (?P<prompts>[\d ]+) tokens with outputs of (?P<outputs>[\d ]+)"))
def trace_counts(recorded: Recorded, prompts: str, outputs: str) -> None:
    wait_until(lambda: recorded.recorder.trace.progress.seen == recorded.generated)
    found = [(str(line.prompt_tokens), str(line.output_tokens)) for line in recorded.lines()]
    assert found == list(zip(prompts.split(), outputs.split(), strict=True))


@then("the client had the first part while the server paused")
def had_first(recorded: Recorded) -> None:
    assert recorded.first_came
    assert recorded.got == recorded.upstream.sent


@then("the client saw that the stream broke")
def saw_break(recorded: Recorded) -> None:
    assert recorded.error is not None
    assert b"An" in recorded.got


@then(
    parsers.parse(
        "the last has {output:d} output tokens, {cached:d} cached tokens, a first token and an end, "
        'and ended by "{reason}"'
    )
)
def last_recorded(recorded: Recorded, output: int, cached: int, reason: str) -> None:
    wait_until(lambda: len(recorded.lines()) == 1)
    (line,) = recorded.lines()
    assert (line.output_tokens, line.cached_tokens or 0, line.finish_reason) == (output, cached, reason)
    assert line.ttft_ms is not None
    assert line.e2el_ms is not None
    assert 0 < line.ttft_ms <= line.e2el_ms
    assert line.max_tokens == 9


@then("the trace has neither its text nor its key")
def no_text(recorded: Recorded) -> None:
    text = Path(recorded.recorder.trace.path).read_text()
    assert not any(word in text for word in ("nobody", "answer", "secret", "Bearer"))


@then(
    parsers.parse('the trace says that it has text, and has the client\'s prompt and "{output}", and not its key')
)
def has_text(recorded: Recorded, output: str) -> None:
    wait_until(lambda: recorded.recorder.trace.progress.written == 1)
    path = recorded.recorder.trace.path
    assert read_header(path).text
    ((_, found),) = read_trace(path, text=True)
    assert found.prompt in (PROMPT, json.dumps([{"role": "user", "content": PROMPT}]))
    assert found.output == output
    assert not any(word in Path(path).read_text() for word in ("secret", "Bearer", "Authorization"))


@then("nobody but its owner can read the trace")
def for_its_owner(recorded: Recorded) -> None:
    assert Path(recorded.recorder.trace.path).stat().st_mode & 0o077 == 0


@then("as Parquet it has the same text")
def text_in_parquet(recorded: Recorded, tmp_path: Path) -> None:
    path, packed = recorded.recorder.trace.path, tmp_path / "with_text.parquet"
    assert call(import_.main, path, f"to={packed}").code == 0
    assert read_header(str(packed)).text
    texts = [[(each.prompt, each.output) for _, each in read_trace(str(of), text=True)] for of in (path, packed)]
    assert texts[0] == texts[1]
    assert [output for _, output in texts[0]] == ["An answer"] * 2
    assert packed.stat().st_mode & 0o077 == 0


@then(parsers.parse("the recorder's health is {status:d}"))
def health_is(recorded: Recorded, status: int) -> None:
    assert httpx.get(f"{recorded.url}/health").status_code == status


@then(parsers.parse('the recorder\'s health is {status:d} and says that 1 request is lost: "{reason}"'))
def recorder_health_says(recorded: Recorded, status: int, reason: str) -> None:
    def trace() -> dict[str, Any]:
        answer = httpx.get(f"{recorded.url}/health")
        assert answer.status_code == status
        found: dict[str, Any] = answer.json()["trace"]
        return found

    wait_until(lambda: trace()["lost"] == 1)
    assert trace()["error"] == reason
