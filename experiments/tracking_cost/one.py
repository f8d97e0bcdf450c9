"""One run of `src.run` with a stopwatch on everything that tracking does: the last line is JSON."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections import defaultdict
from typing import Any

from kvlab.lab.run import recording, serve
from kvlab.lab.tracking.mlflow_tracker import MlflowTracker

seconds: defaultdict[str, float] = defaultdict(float)  # on the clock
work: defaultdict[str, float] = defaultdict(float)  # of a processor, which other programs do not disturb
meanwhile: set[str] = set()  # threads that were there while requests were served, and calls
serving = False


def timed(owner: Any, method: str, name: str) -> None:
    """Count the time in a method, and note when it is called while requests are served."""
    function = getattr(owner, method)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began, worked = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            work[name] += time.thread_time() - worked
            seconds[name] += time.perf_counter() - began
            if serving:
                meanwhile.add(name)

    setattr(owner, method, wrapper)


def main() -> None:
    timed(recording.Recording, "_open", "open, while the engine is built")
    timed(recording.Recording, "wait_until_open", "wait until it is open")
    for method in ("log_metrics", "log_series", "log_artifacts", "finish"):
        timed(MlflowTracker, method, method)
    from kvlab.lab.run.drive import drive

    def watched(*args: Any, **kwargs: Any) -> Any:
        global serving
        serving = True
        meanwhile.update(thread.name for thread in threading.enumerate())
        began = time.perf_counter()
        try:
            return drive(*args, **kwargs)
        finally:
            seconds["serving"] = time.perf_counter() - began
            meanwhile.update(thread.name for thread in threading.enumerate())
            serving = False

    setattr(serve, "drive", watched)  # noqa: B010
    from kvlab.cli.run import main as run

    code = 0
    try:
        run()
    except SystemExit as end:
        code = int(end.code or 0)
    print(json.dumps({"seconds": seconds, "work": work, "meanwhile": sorted(meanwhile)}))
    sys.exit(code)


if __name__ == "__main__":
    main()
