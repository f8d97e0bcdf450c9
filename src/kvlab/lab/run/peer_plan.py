"""From a configuration to a run, whichever engine serves it; and to one of an engine that is not kvlab's."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvlab.config import RunConfig
from kvlab.core import Request
from kvlab.engine.protocol import ServingEngine
from kvlab.errors import ConfigError, shown
from kvlab.lab.machine import describe
from kvlab.lab.run.plan import PlannedGroup, RunPlan, plan_run
from kvlab.lab.run.requests import check_lengths, requests_of
from kvlab.models.config import DecoderConfig
from kvlab.models.families import decoder_config
from kvlab.models.tokenizer import Tokenizer
from kvlab.peers.engines import ENGINES
from kvlab.peers.engines.base import Assignment, EngineKind
from kvlab.secrets import redact

#: What is asked of any engine.
_OF_ENGINES = ("clock", "submit", "step", "abort", "has_work", "next_wakeup", "stats", "close")


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """A checked run of an engine that is not kvlab's: what is asked of it."""

    config: RunConfig
    kind: type[EngineKind]
    model: DecoderConfig
    requests: list[Request]
    longest: int  # tokens of the longest sequence that one of them can grow to
    # What is known of kvlab's own engines alone:
    tokenizer: ClassVar[Tokenizer | None] = None  # what it answers has its text
    own: ClassVar[RunPlan | None] = None
    parts: ClassVar[tuple[PlannedGroup, ...]] = ()
    is_real: ClassVar[bool] = True
    cpu_threads: ClassVar[int] = 0

    @property
    def chosen(self) -> dict[str, str | int]:
        """Which engine it is."""
        return {"engine": self.config.engine.kind}

    @property
    def machine(self) -> str:
        """Where it runs, in words."""
        url = self.config.engine.url
        return describe("cpu") if url is None else f"{redact(url)} (client: {describe('cpu')})"

    def start(self, directory: Path, should_stop: Callable[[], bool]) -> ServingEngine:
        """The engine, loaded and warm. Raises PeerError."""
        assignment = Assignment(self.config, self.model, self.requests, self.longest, directory, should_stop)
        engine = self.kind.start(assignment)
        if missing := [name for name in _OF_ENGINES if not hasattr(engine, name)]:
            text = f"start returned {shown(engine, repr)}, which lacks {', '.join(missing)} of ServingEngine"
            raise ConfigError("engine.kind", self.config.engine.kind, text)
        return engine


#: A run's plan, whichever engine serves it. Its users ask what both answer, and mypy holds both to that.
Plan = RunPlan | PeerPlan


def plan_any(config: RunConfig) -> Plan:
    """Check a configuration of any engine. Raises a KvlabError, see `plan_run` and `plan_peer`."""
    return plan_peer(config) or plan_run(config)


def plan_peer(config: RunConfig) -> PeerPlan | None:
    """Check a configuration whose engine is not kvlab's; None where it is.

    Raises a KvlabError as `plan_run` does, but for memory, which is the engine's own affair.
    """
    kind = ENGINES.get(config.engine.kind)
    if not kind.is_peer:
        return None
    debug, method, replicas = config.debug, config.scheduler.speculation.method, config.fleet.replicas
    for key, value, is_set, what, advice in (
        ("debug.profile", "true", debug.profile, "looks into", ""),
        ("debug.audit", "true", debug.audit, "looks into", ""),
        ("debug.faults.rate", "true", debug.faults.rate > 0, "looks into", ""),
        ("scheduler.speculation.method", method, method is not None, "is for", "; leave it null"),
        ("fleet.replicas", replicas, replicas > 1, "are replicas of", "; leave it at 1"),
    ):
        if is_set:
            text = f"{what} kvlab's own engine, and engine={config.engine.kind} is another{advice}"
            raise ConfigError(key, value, text)
    kind.check(config)
    requests = requests_of(config)
    model = decoder_config(config.model)
    longest = check_lengths(requests, config.workload.name, config.model.max_seq_len, model.max_position_embeddings)
    return PeerPlan(config, kind, model, requests, longest)
