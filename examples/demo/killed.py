"""Promise 3: a run is killed in its middle, the same command starts again, and nothing differs."""

import os
import signal
import time
from pathlib import Path

import torch
from children import Died, Recipe, perfect_train, recipe_of, say
from front_page import Outcome
from torch.utils import _pytree as pytree

from perfect.report.page import note

PROMISE = "kill -9, and the same command again"
Tensors = dict[str, torch.Tensor]


def run(folder: Path, pictures: Path) -> Outcome:
    recipe = recipe_of("reuse", pictures)
    recipe["phases"][0]["passes"] = recipe["phases"][1]["passes"] = 1
    recipe["checkpoint"]["every_steps"] = 5
    say(f"{PROMISE}: a run that is left alone")
    perfect_train(recipe, folder / "alone").result()
    say(f"{PROMISE}: one that is killed, and begun again")
    kill_in_the_middle(recipe, folder / "killed")
    perfect_train(recipe, folder / "killed").result()
    return judge(*(tensors_of(folder / name / "last.ckpt") for name in ("alone", "killed")))


def kill_in_the_middle(recipe: Recipe, out: Path) -> None:
    """Kill the run as soon as it has written a checkpoint. Raise if it was over by then."""
    child = perfect_train(recipe, out)
    while not (out / "last.ckpt").exists() and child.process.is_alive():
        time.sleep(0.02)
    os.kill(child.process.pid or 0, signal.SIGKILL)
    try:
        child.result()
    except Died:
        return
    raise RuntimeError(f"the run in {out} was over before it could be killed")


def tensors_of(checkpoint: Path) -> Tensors:
    leaves, _ = pytree.tree_flatten_with_path(torch.load(checkpoint, weights_only=False))
    return {pytree.keystr(at): leaf for at, leaf in leaves if isinstance(leaf, torch.Tensor)}


def judge(alone: Tensors, killed: Tensors) -> Outcome:
    equal = [n for n, tensor in alone.items() if n in killed and torch.equal(tensor, killed[n])]
    every = len(alone.keys() | killed.keys())
    return Outcome(
        PROMISE,
        f"{len(equal)} of {every} tensors of the last checkpoint equal the undisturbed run's",
        "begin anew",
        0 < len(equal) == every,
        (note("Compared bit for bit: weights, batch norms, momenta, states of generators."),),
    )
