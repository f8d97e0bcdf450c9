"""The runs of a sweep as tasks of a Ray cluster, whose nodes see one file system and have kvlab installed.

Source: https://docs.ray.io/en/latest/ray-core/tasks.html
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from kvlab.errors import ConfigError
from kvlab.lab.campaigns.sweep.plan import read_plan
from kvlab.lab.campaigns.sweep.sweep import record_failure

_TIME_TO_ANSWER_S = 5.0
_TIME_TO_END_S = 30.0  # that interrupted runs have to write what they have


def launch(
    context: HydraContext,
    config: DictConfig,
    task: TaskFunction,
    jobs: Mapping[int, Sequence[str]],
    address: str | None,
    takes: Mapping[str, float],
    retries: int,
) -> list[JobReturn]:
    """Run `jobs`, the overrides of each by its number, in the order in which nodes have room, each of which `takes`
    that of a node. A run whose process or node is lost begins again, at most `retries` times; then it has failed.

    Raises ConfigError for a cluster that does not answer, and KeyboardInterrupt, once the runs have ended.
    """
    import ray
    from ray.exceptions import RayError

    _connect(ray, address)
    run = ray.remote(max_retries=retries, max_calls=1, **takes)(run_point)  # a new process for each
    shared = [ray.put(part) for part in (context, config, task, Singleton.get_state())]
    tasks = [run.remote(number, list(overrides), os.getcwd(), *shared) for number, overrides in jobs.items()]
    try:
        ended = []
        for number, each in zip(jobs, tasks, strict=True):
            try:
                ended.append(ray.get(each))
            except RayError as error:
                ended.append(_lost(Path(str(config.hydra.sweep.dir)), number, error))
        return ended
    except KeyboardInterrupt:
        for task in tasks:
            ray.cancel(task)  # which interrupts it, as Ctrl-C does
        ray.wait(tasks, num_returns=len(tasks), timeout=_TIME_TO_END_S)
        raise
    finally:
        ray.shutdown()


def _connect(ray: ModuleType, address: str | None) -> None:
    """Join the cluster, or start one here. Raises ConfigError."""
    asked = address or os.environ.get("RAY_ADDRESS")
    more: dict[str, Any] = {} if asked else {"include_dashboard": False}
    try:
        host, colon, port = (asked or "").rpartition(":")
        if colon and port.isdigit() and "//" not in host:  # Ray itself waits for minutes
            socket.create_connection((host, int(port)), _TIME_TO_ANSWER_S).close()
        ray.init(address, log_to_driver=False, logging_level="error", **more)
    except (OSError, ValueError) as error:  # a ConnectionError and a TimeoutError are of the first
        reason = str(error).partition("\n")[0]
        text = f"no Ray cluster answers there ({reason}); ray start --head starts one"
        raise ConfigError("hydra.launcher.address", asked, text) from error


def _lost(sweep: Path, number: int, error: Exception) -> JobReturn:
    """The failure of a run that Ray could not bring to its end; of other work than a sweep's, that is raised."""
    reason = ConfigError("hydra/launcher", "ray", f"lost this run: {str(error).splitlines()[0]}")
    try:
        plan = read_plan(sweep)
    except OSError:
        return JobReturn(_return_value=reason, status=JobStatus.FAILED)
    directory = sweep / str(number)
    directory.mkdir(parents=True, exist_ok=True)
    returned = JobReturn(status=JobStatus.COMPLETED)
    returned.return_value = record_failure(directory, plan.job(str(number)).name, reason)
    return returned


def run_point(
    number: int,
    overrides: list[str],
    folder: str,
    context: HydraContext,
    config: DictConfig,
    task: TaskFunction,
    singletons: dict[Any, Any],
) -> JobReturn:
    """One point, in a process of its own, with `folder` as its working directory."""
    os.chdir(folder)
    setup_globals()
    Singleton.set_state(singletons)
    point = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(point):
        point.hydra.job.id, point.hydra.job.num = f"{point.hydra.job.name}_{number}", number
    HydraConfig.instance().set_config(point)
    return run_job(
        hydra_context=context,
        config=point,
        task_function=task,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
