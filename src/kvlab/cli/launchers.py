"""Hydra's launchers, which run the points of a sweep in other processes or on a cluster, for other work too."""

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kvlab.errors import ConfigError, KvlabError
from kvlab.extras import install_command

Result = TypeVar("Result")
_EXTRAS = {
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "submitit": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "ray": ("ray", "ray"),
}


def check_installed(words: Sequence[str]) -> None:
    """Raise ConfigError for a launcher whose package is not installed."""
    for text in words:
        key, _, value = text.partition("=")
        for name, (module, extra) in _EXTRAS.items():
            if key == "hydra/launcher" and value.startswith(name) and find_spec(module) is None:
                raise ConfigError(key, value, f"needs a package that is not installed: {install_command(extra)}")


def launched(
    work: Callable[[str], Result], tasks: Sequence[str], *, words: Sequence[str], directory: Path
) -> Iterator[tuple[str, Result]]:
    """The result of each task, by the launcher that `words` of a command line choose. A single task is done here:
    it would wait in a queue for nothing. `directory` is where launchers keep their files, which a cluster shares.

    Raises ConfigError where the launcher fails.
    """
    if len(tasks) < 2:
        yield from ((task, work(task)) for task in tasks)
        return
    from hydra import compose, initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext

    import kvlab.cli.compose  # noqa: F401 - the schema and the resolvers of conf
    from kvlab.cli.mistakes import explained
    from kvlab.paths import CONF

    def task_of_job(_: Any) -> Result:
        return work(tasks[HydraConfig.get().job.num])

    words = [*words, f"hydra.sweep.dir={str(directory.resolve())!r}"]
    with explained(words), initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("run", words, return_hydra_config=True)
        context = HydraContext(GlobalHydra.instance().config_loader(), Callbacks(config))
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task_of_job, config=config
        )
        try:
            results = [job.return_value for job in launcher.launch([[] for _ in tasks], initial_job_idx=0)]
        except KvlabError:
            raise
        except Exception as error:  # a worker that was killed, a queue that is gone
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise ConfigError("hydra/launcher", words[0].partition("=")[2], f"failed: {reason}") from error
    yield from zip(tasks, results, strict=True)
