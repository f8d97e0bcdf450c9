"""The command that asks for advice on a deployment, which other commands print."""

import shlex
from collections.abc import Sequence

from kvlab.config import WorkloadConfig
from kvlab.lab.settings import key_of
from kvlab.secrets import redacted_setting

FEWEST = 20  # requests that say anything
REFUSED = ("sweep", "resume", "repeat", "repeats", "optimize", "hydra.mode")  # keys that have no place in advice
_SIMULATED = "executor=simulated"
_OWN_TRAFFIC = ("workload=recorded", "workload.path=mine.jsonl")


def advice_line(words: Sequence[str], requests: int | None) -> str | None:
    """The command that asks what to change of a deployment that `words` of a command line give; with traffic of the
    user's own where they name none. `requests` are drawn; None: a file has them.

    None where advice is not for it: nothing is simulated, or too few requests.
    """
    given = {key_of(word): word for word in words}
    if "hardware" not in given or given.get("executor", _SIMULATED) != _SIMULATED:
        return None
    traffic: Sequence[str] = ()
    if not any(key.partition(".")[0] == "workload" for key in given):
        traffic = _OWN_TRAFFIC
    elif requests is not None and requests < FEWEST:
        return None
    left_out = {*REFUSED, "executor", "figures"}
    kept = [
        word for key, word in given.items() if key not in left_out and not key.startswith(("tracking", "hydra"))
    ]
    shown = " ".join(shlex.quote(redacted_setting(word)) for word in (*traffic, *kept))
    return f"what to change: kvlab advise {shown}"


def drawn_requests(workload: WorkloadConfig) -> int | None:
    """How many requests a workload draws; None: a file has them."""
    return workload.num_requests if workload.path is None else None
