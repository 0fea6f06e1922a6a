"""Promise 4: four learning rates at once, of which the worse ones stop early, as a fleet."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from children import Recipe, perfect_train, recipe_of, say
from front_page import Outcome, drawn
from killed import tensors_of

from perfect.report.page import note
from perfect.report.panels import BLUE, GREEN, INK, ORANGE
from perfect.report.results import read_metrics

PROMISE = "Four learning rates at once"
RATES = [0.3, 0.1, 0.03, 0.01]
KEYS = "optimizer.lr, phases.0.lr.lr, phases.1.lr.lr"


def run(folder: Path, pictures: Path, holdout: int = 200, first: int = 48) -> Outcome:
    """Train all of them as a fleet, and then the best one by itself."""
    recipe = recipe_of("reuse", pictures)
    recipe["trainer"]["validate_every"] = 1.0
    recipe["data"]["holdout"] = holdout
    stop = {"rule": "halving", "eta": 2, "first": first}
    fleet = {"devices": 1, "metric": "val_loss", "stop": stop}
    say(f"{PROMISE}: all of them together")
    together = seconds_of(recipe | {"grid": {KEYS: RATES}, "fleet": fleet}, folder / "together")
    jobs = json.loads((folder / "together" / "grid.json").read_text())["jobs"]
    [rate] = jobs[0]["settings"].values()
    for section in (recipe["optimizer"], *(phase["lr"] for phase in recipe["phases"])):
        section["lr"] = rate
    say(f"{PROMISE}: the best one, {rate:g}, by itself")
    alone = seconds_of(recipe, folder / "alone")
    runs = [folder / "together" / job["folder"] for job in jobs]
    winner, single = (tensors_of(of / "final.ckpt") for of in (runs[0], folder / "alone"))
    same = all(torch.equal(tensor, single[name]) for name, tensor in winner.items())
    curves = [read_metrics(of / "metrics.csv").pairs("step", "val_loss") for of in runs]
    names = [f"{job['name']}: {job['state']}, step {job['step']}" for job in jobs]
    return judge(together, alone, rate, same, dict(zip(names, curves, strict=True)))


def seconds_of(recipe: Recipe, out: Path) -> float:
    begun = time.perf_counter()
    perfect_train(recipe, out).result()
    return time.perf_counter() - begun


def judge(together: float, alone: float, rate: float, same: bool, curves: Any) -> Outcome:
    """The promise holds if it is quicker, and the winner is what it is by itself."""

    def draw(axes: Any) -> None:
        for (name, curve), colour in zip(curves.items(), (ORANGE, BLUE, GREEN, INK), strict=True):
            axes.plot(*curve, "o-", color=colour, label=name, ms=3)
        axes.set_yscale("log")
        axes.set_xlabel("optimizer step")
        axes.legend(frameon=False, fontsize=8)

    one_by_one = len(RATES) * alone
    return Outcome(
        PROMISE,
        f"{together:.0f} s; the best is {rate:g}"
        + (", with the weights of a run by itself" if same else ", with OTHER weights than alone"),
        f"{one_by_one:.0f} s one after another, reckoned as {len(RATES)} times the best one",
        same and together < one_by_one,
        (
            drawn("Loss on the hold-out", draw),
            note("At each rung the worse half stops. A picture is decoded once for all rates."),
        ),
    )
