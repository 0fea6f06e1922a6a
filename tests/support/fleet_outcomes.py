"""What came of the jobs of a fleet, beside what they are alone."""

from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.jobs.fleet_jobs import Net, Outcome
from trainers.fleet import FleetResult
from trainers.fleet.jobs.job_turns import FINAL


def states(result: FleetResult) -> dict[str, str]:
    return {name: job.state for name, job in result.jobs.items()}


def differences(lone: Mapping[str, Outcome], modules: Mapping[str, Net]) -> dict[str, list[str]]:
    return {name: lone[name].differences(Outcome.of(module)) for name, module in modules.items()}


def wrong(lone: Mapping[str, Outcome], folder: Path) -> dict[str, list[str]]:
    """Name by job what its last weights differ in from those of the job alone."""
    found: dict[str, list[str]] = {}
    for name, outcome in lone.items():
        weights = torch.load(folder / "jobs" / name / FINAL)["state_dict"]
        pairs = outcome.weights.items()
        found[name] = [key for key, value in pairs if not torch.equal(value, weights[key])]
    return found
