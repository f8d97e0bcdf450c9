"""What a proxy's router decided and what it saw then, a line each; and the same decisions made again."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from kvlab.config.fleet import FleetConfig, WeightsConfig
from kvlab.errors import ConfigError, KvlabError, WorkloadError, shown
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.routers import ROUTERS
from kvlab.kv.tiers.base import Key
from kvlab.server.lookout import RouteSettings
from kvlab.server.upstreams import UnseenError, Upstream
from kvlab.workloads.lines import json_object, read_lines

_REQUEST = ("request_id", "session", "prompt_tokens", "output_tokens")
_VIEW = (
    "index", "in_flight", "running", "waiting", "sent_since", "kv_usage", "prefill_tokens", "blocks_in_use",
    "block_size", "remembered",
)  # fmt: skip


class DecisionLog:
    """A file that each decision is written to, up to the first that cannot be: what comes behind a hole would not
    come out again. Requests go on then, and `about` says so.

    Raises ConfigError where there is such a file, or none can be made.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self._path, self._written, self._lost, self._error = str(settings.record), 0, 0, ""
        try:
            self._file = open(self._path, "x", encoding="utf-8")  # noqa: SIM115
        except FileExistsError as error:
            text = "is there; name another file, or move that one away"
            raise ConfigError("record", self._path, text) from error
        except OSError as error:
            raise ConfigError("record", self._path, f"cannot be written: {error.strerror}") from error
        head = {"kvlab": "decisions", "started": time.time(), "upstreams": list(settings.upstreams)}
        fleet = asdict(settings.fleet)
        del fleet["link"], fleet["scale"], fleet["prefill_scale"]  # of simulated fleets
        self._write(head | {"seed": settings.seed, "fleet": fleet})

    def about(self) -> dict[str, Any]:
        """How far it is."""
        return {"path": self._path, "decisions": self._written, "lost": self._lost, "error": self._error or None}

    def put(self, call: RoutedRequest, now: float, views: Sequence[Upstream], choice: Choice) -> None:
        """A decision that was made `now`, before anything was sent."""
        row = {"t": now} | {name: getattr(call, name) for name in _REQUEST}
        shown_views = [_seen(view) | {"cached": view.cached_tokens(call)} for view in views]
        row |= {"views": shown_views, "scores": list(choice.scores), "choice": choice.replica}
        try:
            if not self._error:
                self._write(row)
                self._written += 1
                return
        except OSError as error:
            self._error = error.strerror or str(error)
        self._lost += 1

    def close(self) -> None:
        """Nothing more comes."""
        with suppress(OSError):  # which was told
            self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def _seen(view: Upstream) -> dict[str, Any]:
    """What a view says, as far as it is known."""
    found = {}
    for name in _VIEW:
        try:
            found[name] = getattr(view, name)
        except UnseenError:
            continue
    return found


class _RecordedCall(SimpleNamespace):
    def keys(self, block_size: int, most: int = 0) -> Sequence[Key]:
        raise KvlabError("the keys of prompts are not recorded")


class _RecordedView(SimpleNamespace):
    cached: int

    def cached_tokens(self, request: RoutedRequest) -> int:
        return self.cached


def replay(path: str) -> tuple[str, int, list[int]]:
    """Make the recorded decisions again: the router's name, how many there were, and the lines of those that come
    out otherwise, by choice or score. A last line that is cut off is left out. Raises WorkloadError.
    """
    router: Router | None = None
    count, others = 0, list[int]()
    for number, line in read_lines(path, "replay"):
        try:
            if router is None:
                head = json_object(line)
                if head.get("kvlab") != "decisions":
                    raise ValueError("is none that kvlab route recorded")
                fleet = head["fleet"] | {"weights": WeightsConfig(**head["fleet"].get("weights", {}))}
                router = ROUTERS.get(fleet["router"])(FleetConfig(**fleet), head["seed"])
            elif line.endswith(b"\n"):
                count += 1
                if not _is_repeated(router, json_object(line)):
                    others.append(number)
        except (AttributeError, KeyError, TypeError, ValueError, KvlabError) as error:
            raise WorkloadError(f"{shown(path)}, line {number}: {type(error).__name__}: {shown(error)}") from error
    if router is None:
        raise WorkloadError(f"replay={shown(path)}: has no decisions")
    return router.config.router, count, others


def _is_repeated(router: Router, row: Mapping[str, Any]) -> bool:
    views = [_RecordedView(**view) for view in row["views"]]
    call = cast(RoutedRequest, _RecordedCall(**{name: row[name] for name in _REQUEST}))
    choice = router.choose(call, cast(list[ReplicaView], views), row["t"])
    return (choice.replica, list(choice.scores)) == (row["choice"], row["scores"])
