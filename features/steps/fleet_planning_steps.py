"""Steps about planning a fleet: what the runs of a sweep left."""

from __future__ import annotations

from pytest_bdd import parsers, then

from features.steps.sweep_steps import Commands
from kvlab.lab.results.records import read_sweep


@then(parsers.parse('the first run has the figure "{one}" in place of "{other}", the second the other'))
def figures_of_runs(laboratory: Commands, one: str, other: str) -> None:
    for run, has, lacks in zip(read_sweep(laboratory.directory), (one, other), (other, one), strict=True):
        names = {file.name for file in (run.directory / "figures").iterdir()}
        assert has in names
        assert lacks not in names


@then(parsers.parse('the sweep has the picture "{whole}", and each run "{each}"'))
def has_pictures(laboratory: Commands, whole: str, each: str) -> None:
    assert (laboratory.directory / "report" / whole).is_file()
    assert all((run.directory / "figures" / each).is_file() for run in read_sweep(laboratory.directory))


@then(parsers.parse('behind "{better}" more prompt tokens were found than behind "{worse}"'))
def found_more(laboratory: Commands, better: str, worse: str) -> None:
    runs = read_sweep(laboratory.directory)
    found = {run.config["fleet.router"]: run.metrics["kv/prefix_hit_tokens"] for run in runs}
    assert found[better] > found[worse]
