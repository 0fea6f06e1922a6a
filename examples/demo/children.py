"""Runs a piece of the demo in a process of its own, which need not import torch anew.

demo, has imported torch --fork--> child: its prints go to a log --pipe--> what it returns
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

FORK = multiprocessing.get_context("fork")
TERMINAL = os.dup(2)
BEGUN = time.monotonic()
Recipe = dict[str, Any]


class Died(RuntimeError):
    """A child ended and returned nothing."""


class Child:
    """A call in a process of its own. All that it prints goes to `log`."""

    def __init__(self, log: Path, work: Callable[..., Any], *args: Any) -> None:
        self._log = log
        self._receiver, sender = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_call, args=(log, sender, work, args))
        self.process.start()
        sender.close()

    def result(self) -> Any:
        """Wait for what the call returns. Raise `Died` if it raises or is killed."""
        try:
            return self._receiver.recv()
        except EOFError:
            raise Died(f"a process returned nothing; see {self._log}") from None
        finally:
            self.process.join()


def _call(log: Path, sender: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sender.send(work(*args))


def say(text: str) -> None:
    """Write a line to the terminal, from any process."""
    os.write(TERMINAL, f"{time.monotonic() - BEGUN:5.0f} s  {text}\n".encode())


def perfect_train(recipe: Recipe, out: Path) -> Child:
    """Start the command `perfect-train` with this recipe, written beside the run's folder."""
    from perfect.train import main

    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return Child(out.with_suffix(".log"), main, [str(file), "--out", str(out)])


def recipe_of(name: str, pictures: Path) -> Recipe:
    """Return what configs/demo/NAME.yaml says, for these pictures."""
    file = Path(__file__).parents[2] / "configs" / "demo" / f"{name}.yaml"
    recipe = yaml.safe_load(file.read_text())
    recipe["data"]["root"] = str(pictures)
    return recipe
