"""Runs that were recorded, as commands are given them: by directory, by id, or as a sweep.

The functions import what they need, so that commands answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvlab.errors import ConfigError, RecordError
from kvlab.run_files import CONFIG, STEPS, SUMMARY
from kvlab.secrets import redact

if TYPE_CHECKING:
    from kvlab.config import RunConfig
    from kvlab.lab.calibrate import RealRun


def find_run(name: str, root: Path = Path()) -> Path:
    """The output directory that `name` is, or that of the run with this id. Raises ConfigError."""
    if (Path(name) / SUMMARY).is_file():
        return Path(name)
    from kvlab.lab.results.records import read_summary

    for file in (file for folder in ("outputs", "multirun") for file in (root / folder).rglob(SUMMARY)):
        if (read_summary(file.parent) or {}).get("run_id") == name:
            return file.parent
    text = f"is no output directory with a {SUMMARY}, nor the id of a run in outputs/ or multirun/"
    raise ConfigError("run", name, text)


def find_runs(names: list[str]) -> list[Path]:
    """The directories of the runs that are named; a sweep is all of its runs. Raises ConfigError."""
    directories: list[Path] = []
    for name in names:
        points = [file.parent for file in sorted(Path(name).glob(f"*/{SUMMARY}"))]
        directories += points if points and not (Path(name) / SUMMARY).is_file() else [find_run(name)]
    return list(dict.fromkeys(directories))


def recorded_config(directory: Path) -> RunConfig:
    """The configuration of the run that is recorded in `directory`. Raises a KvlabError."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from kvlab.cli.compose import run_config
    from kvlab.config import RunConfig

    file = directory / CONFIG
    try:
        recorded = OmegaConf.load(file)
        if not isinstance(recorded, DictConfig):
            raise RecordError(f"{file}: has no settings of a run")
        names = ("run_name", "tags", "tracking")  # which may refer to an environment that is no more
        recorded = OmegaConf.masked_copy(recorded, [str(key) for key in recorded if key not in names])
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), recorded)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        reason = str(error).strip().partition("\n")[0]
        text = "cannot be read as the settings of a run, of this version of kvlab"
        raise RecordError(f"{file}: {text}: {redact(reason)}") from error
    return run_config(cast(DictConfig, merged))


def read_real_run(directory: Path) -> RealRun:
    """A run with what its steps consist of. Raises ConfigError or RecordError for one that cannot be fitted to."""
    from kvlab.lab.calibrate import RealRun
    from kvlab.lab.results.records import read_run
    from kvlab.models.families import decoder_config
    from kvlab.simulation.calibration import Subject

    run = read_run(directory)
    facts = run.facts
    if "timing" in facts:
        raise ConfigError("run", directory, "was simulated; calibrate on runs that computed their steps")
    if not (directory / STEPS).is_file():
        raise ConfigError("run", directory, f"has no {STEPS}; name a run that was recorded to its end")
    if "bytes_per_weight" not in facts:
        raise ConfigError("run", directory, "did not log what its model takes; run it again")
    config = recorded_config(directory)
    model = decoder_config(config.model)
    sizes = float(facts["bytes_per_weight"]), int(facts["kv_bytes_per_token"])
    subject = Subject(config.model.name, model.num_parameters, config.executor.dtype, *sizes)
    kernels = f"{facts['attention']}, {facts['kernels']}"
    return RealRun(str(directory), subject, model, facts["machine"], int(facts["threads"]), kernels, run.steps())
