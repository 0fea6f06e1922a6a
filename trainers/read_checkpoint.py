"""Reads a checkpoint that anybody may have written, without running anything that is in it.

A pickled object may run any code when it is loaded. So only tensors, containers and plain values
are loaded, and what a user has allowed with `torch.serialization.add_safe_globals`. Nobody here
allows more: this is the one list, and Lightning goes by it, too (`fit(weights_only=True)`).
"""

import pickle
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import lightning as L
import torch

Kind = TypeVar("Kind")
KINDS: Mapping[str, type] = MappingProxyType(
    {
        "global_step": int, "epoch": int, "state_dict": dict, "loops": dict, "callbacks": dict,
        "optimizer_states": list, "lr_schedulers": list,
    }
)  # fmt: skip
"""The types of what Lightning writes. A checkpoint may lack any of it."""
RESTORED: Mapping[str, str] = MappingProxyType(
    {
        "restore_model": "state_dict", "restore_callbacks": "callbacks", "restore_loops": "loops",
        "restore_optimizers": "optimizer_states", "restore_lr_schedulers": "lr_schedulers",
    }
)  # fmt: skip
"""What Lightning's functions take out of a checkpoint."""
USED: Mapping[str, str] = MappingProxyType(
    {
        "/loops/progress.py": "loops", "/torch/optim/lr_scheduler.py": "lr_schedulers",
        "/torch/optim/": "optimizer_states",
    }
)  # fmt: skip
"""The files of those who use it, first in the first step."""


class CheckpointRefused(Exception):
    """A checkpoint holds what may run code, or is damaged. The text says what to do."""


def read_checkpoint(path: Path, key: str, kind: type[Kind]) -> Kind:
    """Return what a checkpoint has under this key, or raise `CheckpointRefused`."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(saved, dict):
            raise TypeError(f"it holds a {type(saved).__name__}")
        value = saved[key]
    except Exception as error:  # a mutated file raises whatever its reader meets
        if names := not_allowed(path):
            short = ", ".join(name.rpartition(".")[2] for name in names)
            raise CheckpointRefused(
                f"{path} was not loaded: it holds objects of {', '.join(names)}, and loading them"
                " may run code out of the file. If you trust who wrote it, add"
                f" torch.serialization.add_safe_globals([{short}]) to the file of your module"
            ) from error
        why = type(error).__name__
        if not isinstance(error, pickle.UnpicklingError):  # which advises to run what is in it
            why += f": {str(error).partition(chr(10))[0]}"
        raise CheckpointRefused(f"{path} is damaged ({why}): delete it to begin anew") from error
    for name, wanted in {**KINDS, key: kind}.items():
        found = saved.get(name, wanted())
        if not isinstance(found, wanted) or isinstance(found, bool):
            why = f"its {name} is a {type(found).__name__}"
            raise CheckpointRefused(f"{path} is damaged ({why}): delete it to begin anew")
    return value


def not_allowed(path: Path) -> list[str]:
    """Return the names in a checkpoint that would not be loaded; none if it is damaged."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # a damaged file: whatever its reader raises
        return []


@contextmanager
def going_on_from(path: Path | None, trainer: L.Trainer) -> Iterator[None]:
    """Let the trainer fit from this checkpoint in the block (None: from the beginning). Raise
    `CheckpointRefused` if it is none, or if what is in it ends the fit before the first step."""
    begun = 0 if path is None else read_checkpoint(path, "global_step", int)
    try:
        yield
    except Exception as error:
        steps: object = trainer.global_step
        first = not isinstance(steps, int) or steps <= begun
        part = None if path is None else part_of(error, first)
        if part is None:
            raise
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointRefused(
            f"{path} does not fit (its {part}: {why}): give the module and the Trainer that wrote"
            " it, or delete it to begin anew"
        ) from error


def part_of(error: Exception, first: bool) -> str | None:
    """Return the part of a checkpoint that Lightning or torch stumbled over; None if it was another
    thing. An error of ours says by itself what is wrong, and later ones may be the module's."""
    if type(error).__module__ != "builtins":
        return None
    frames = traceback.extract_tb(error.__traceback__)
    found = [RESTORED[f.name] for f in frames if "checkpoint_connector" in f.filename
             and f.name in RESTORED]  # fmt: skip
    if first or isinstance(error, TypeError):
        found += [part for place, part in USED.items() if place in frames[-1].filename]
    return found[0] if found else None
