"""Typed errors. Each message says what was asked, what there is, and what to change."""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters, which a terminal would obey, as escapes; tabs and ends of lines stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shown(value: object, text_of: Callable[[object], str] = str, *, most: int = 200) -> str:
    """A user's value in a message: on one line, without control characters, cut at `most`."""
    try:
        text = printable(text_of(value)).replace("\n", "\\n")
    except ValueError:  # Python writes no whole number of more than some 4,000 digits
        text = "(a number of thousands of digits)"
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str], question: str) -> str:
    """The `question` whether a mistaken name means the one that is most like it, in place of {}; empty: none is."""
    near = get_close_matches(name, list(known), n=1)
    return question.format(near[0]) if near else ""


class KvlabError(Exception):
    """Base of every error that a user of kvlab can cause; its text is fit to be shown as it is."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(KvlabError, ValueError):
    """A setting is wrong. The message names the key, the value and what would do."""

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{shown(key)}={'null' if value is None else shown(value)}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class CapacityError(KvlabError, RuntimeError):
    """Something does not fit: a pool too small for a sequence, or a run larger than the machine.

    In a sweep this is a result, not a failure.
    """


class KernelError(KvlabError, RuntimeError):
    """A native kernel cannot be built or loaded on this machine."""


class OutOfBlocksError(KvlabError, RuntimeError):
    """The allocator has fewer blocks to give than were asked for; nothing was changed.

    Attributes: `wanted`, `free`, `evictable` (part of `free` that still holds reusable content), `total`,
    all in blocks; `slots`: the pool's slots that did not fit, where the caller was a pool.
    """

    def __init__(
        self, wanted: int, free: int, total: int, *, evictable: int = 0, slots: Sequence[int] = ()
    ) -> None:
        where = f" for slots {list(slots)}" if slots else ""
        super().__init__(
            f"out of KV blocks: {wanted} wanted{where}, {free} free (of which {evictable} cached), "
            f"{total} in the pool"
        )
        self.wanted = wanted
        self.free = free
        self.evictable = evictable
        self.total = total
        self.slots = tuple(slots)


class BlockError(KvlabError, ValueError):
    """A block id that is out of range, not allocated, or freed once too often; nothing was changed."""


class SlotError(KvlabError, ValueError):
    """A slot that is not live, or a length the slot cannot take; nothing was changed."""


class TierError(KvlabError, RuntimeError):
    """A tier cannot keep a page, or has not the page that it should have: its content is lost to that tier."""


class AuditError(KvlabError, RuntimeError):
    """An invariant of the pool is broken: a defect of kvlab, found by an audit."""


class BackendError(KvlabError, ValueError):
    """An attention backend that does not exist or cannot compute what was asked of it."""


class DeviceError(KvlabError, RuntimeError):
    """A device that this machine does not have."""


class WeightsError(KvlabError, ValueError):
    """A checkpoint with a missing, extra or misshapen tensor, or none at all."""


class TokenizerError(KvlabError, ValueError):
    """A checkpoint has no tokenizer or chat template, a broken one, or one that does not take what it is given."""


class FetchError(KvlabError, RuntimeError):
    """A published model that cannot be brought to this machine."""


class WorkloadError(KvlabError, ValueError):
    """A workload file that cannot be read, or a request that no engine of this configuration can serve."""


class RequestRefusedError(KvlabError, ValueError):
    """The engine refused a request on arrival; the others are not touched. `parameter` is the wrong one's name."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class TooLongError(RequestRefusedError):
    """Prompt and output together can grow beyond the longest sequence that fits, of `most` tokens."""

    def __init__(self, message: str, parameter: str, most: int) -> None:
        super().__init__(message, parameter)
        self.most = most


class QueueFullError(RequestRefusedError):
    """As many requests wait as may; the same request may be taken later."""


class SamplingError(KvlabError, ArithmeticError):
    """The model's logits leave no token to sample: not a number, infinite, or every token masked.

    `request_ids` are those whose logits they are.
    """

    def __init__(
        self, request_ids: Sequence[str], reason: str = "the logits are not finite, or every token is masked"
    ) -> None:
        super().__init__(f"no token can be sampled for {', '.join(map(repr, request_ids))}: {reason}")
        self.request_ids = tuple(request_ids)


class GrammarError(KvlabError, ValueError):
    """A grammar, or a JSON schema, that cannot be followed."""


class PlaybackError(KvlabError, RuntimeError):
    """A run that is played back decided otherwise than its recording."""


class EngineStoppedError(KvlabError, RuntimeError):
    """A step of the engine itself failed, rather than one of its requests; the engine serves no more."""


class TrackingError(KvlabError, RuntimeError):
    """The tracking store cannot be reached or refused what was logged; results stay on disk."""


class OutputError(KvlabError, RuntimeError):
    """A file or directory cannot be written; nothing of it is left. `reason` has the cause and what would do."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class RecordError(KvlabError, ValueError):
    """A run that was asked for is not there, or what it left cannot be read."""


class PeerError(KvlabError, RuntimeError):
    """An engine other than kvlab's cannot be reached or started, or has ended or hung."""
