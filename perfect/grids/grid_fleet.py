"""Makes the fleet of a grid: a job for every point, and the fleet's own settings."""

from collections.abc import Sequence
from pathlib import Path

import torch

from perfect.assembly import build_phases
from perfect.config.grid import Grid, Point
from perfect.config.grid_schema import FleetConfig
from perfect.errors import BuildError
from perfect.grids.grid_job import GridJob
from trainers.fleet import Fleet
from trainers.fleet.deciding.halving import Halving
from trainers.fleet.deciding.stop_rule import StopRule
from trainers.fleet.fleet import Watch
from trainers.fleet.search import optuna_pruner_of


def build_fleet(grid: Grid, folder: Path, watch: Watch, jobs: Sequence[Point]) -> Fleet:
    """Return the fleet with the jobs of these points; a search adds its own. Raise `BuildError` if
    a key does not fit this machine."""
    given = grid.fleet
    points = grid.points or (grid.first,)
    for point in points:
        build_phases(point.config)
    fleet = Fleet(
        given.budget,
        devices=_devices(grid),
        host_budget=given.host_budget,
        stop=_rule(given),
        metric=given.metric,
        mode=given.mode,
        quantum=given.quantum,
        hours=given.hours,
        folder=folder,
        watch=watch,
    )
    plain = given.budget is None and any(point.config.offload is None for point in points)
    if plain and fleet.devices[0].type == "cuda":
        raise BuildError(
            "fleet.budget",
            "is missing: on a GPU a fleet must know what a step takes before it runs; give it, or"
            " give offload: {}, which plans each step",
        )
    for point in jobs:
        fleet.add_program(point.name, GridJob(point.config))
    return fleet


def _rule(given: FleetConfig) -> StopRule | None:
    stop, search = given.stop, given.search
    if search is not None and search.pruner is not None and search.every is not None:
        return optuna_pruner_of(search.pruner, given.metric, every=search.every, mode=given.mode)
    if stop is None:
        return None
    return Halving(stop.metric or given.metric, stop.eta, stop.first, stop.mode or given.mode)


def _devices(grid: Grid) -> str | int | Sequence[str | int]:
    """Return what the fleet is given. A CPU may be several devices, each with a process."""
    devices = grid.fleet.devices
    accelerator = grid.first.config.trainer.accelerator
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available())
    if not on_cpu:
        return devices
    if isinstance(devices, list):
        raise BuildError(
            "fleet.devices", f"is {devices}, numbers of GPUs, but the jobs run on the CPU: give 1"
        )
    return ["cpu"] * (1 if isinstance(devices, str) else devices)
