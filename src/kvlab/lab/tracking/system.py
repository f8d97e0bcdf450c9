"""The machine's load during a run."""

from __future__ import annotations

import time
from contextlib import suppress
from threading import Event, Thread
from typing import Any

_EVERY_S = 1.0  # MLflow's own ten seconds leave short runs without any


class SystemMetrics:
    """Samples processor, memory, disk, network and GPU once a second until `stop`, through MLflow's monitors. The
    samples are kept: MLflow's own thread writes to the store at each.
    """

    def __init__(self) -> None:
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(Exception):  # no such GPU, or no library to ask it
            from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

            self._monitors.append(GPUMonitor())
        self._points: list[tuple[str, float, int, int]] = []
        self._over = Event()
        self._thread = Thread(target=self._watch, name="system metrics", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[str, float, int, int]]:
        """Name, value, Unix time in milliseconds and step of each sample."""
        self._over.set()
        self._thread.join()
        return self._points

    def _watch(self) -> None:
        step = 0
        while True:
            now = time.time_ns() // 1_000_000
            for monitor in self._monitors:
                with suppress(Exception):  # a counter that this machine does not have
                    monitor.collect_metrics()
                    sample = monitor.aggregate_metrics()
                    self._points += [(f"system/{name}", float(value), now, step) for name, value in sample.items()]
                monitor.clear_metrics()
            step += 1
            if self._over.wait(_EVERY_S):
                return
