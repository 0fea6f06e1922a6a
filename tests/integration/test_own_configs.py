"""Every YAML of ours: it can run, and its complete form is the same configuration."""

from pathlib import Path
from typing import Any

import yaml

from perfect.assembly.phase_plan import build_phases
from perfect.config.grid import Grid
from perfect.config.grid_reader import read_recipe
from perfect.config.schema import RunConfig, dump_config
from perfect.errors import PerfectError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def problems(path: Path, again: Path) -> list[str]:
    try:
        recipe, _ = read_recipe(path)
        runs = [p.config for p in recipe.points] if isinstance(recipe, Grid) else [recipe]
        phases = [phase for config in runs for phase in build_phases(config)[0]]
        complete = recipe.dump() if isinstance(recipe, Grid) else dump_config(recipe)
        again.write_text(yaml.safe_dump(complete, sort_keys=False))
        same = _jobs(read_recipe(again)[0]) == _jobs(recipe)
    except PerfectError as error:
        return [str(error)]
    checks = {
        "has no phase": bool(phases),
        "has a phase without an end": all(phase.passes or phase.steps for phase in phases),
        "is another configuration once it is dumped": same,
        "means something else in full": part(yaml.safe_load(path.read_text("utf-8")), complete),
    }
    return [said for said, good in checks.items() if not good]


def _jobs(recipe: RunConfig | Grid) -> object:
    """What of a recipe decides its runs; a grid's own run has the first value of each key."""
    return (recipe.fleet, recipe.points) if isinstance(recipe, Grid) else recipe


def part(short: Any, whole: Any) -> bool:
    """Whether all that is written is in the complete form."""
    if isinstance(short, dict):
        return all(part(value, whole[key]) for key, value in short.items())
    if isinstance(short, list):
        return all(part(a, b) for a, b in zip(short, whole, strict=True))
    return bool(short == whole or (isinstance(short, str) and float(short) == whole))


def test_every_configuration_of_ours_can_run_and_is_the_same_when_it_is_complete(
    tmp_path: Path,
) -> None:
    assert len(CONFIGS) >= 30
    found = {
        path.relative_to(ROOT).as_posix(): problems(path, tmp_path / "complete.yaml")
        for path in CONFIGS
    }
    assert {path: said for path, said in found.items() if said} == {}
