"""Reads a checkpoint that anybody may have written, without running anything that is in it.

A pickled object may run any code when it is loaded. So only tensors, containers and plain values
are loaded, and what a user has allowed with `torch.serialization.add_safe_globals`. Nobody here
allows more: this is the one list, and Lightning goes by it, too (`fit(weights_only=True)`).
"""

from pathlib import Path
from typing import TypeVar

import torch

Kind = TypeVar("Kind")


class CheckpointRefused(Exception):
    """A checkpoint holds what may run code, or is damaged. The text says what to do."""


def read_checkpoint(path: Path, key: str, kind: type[Kind]) -> Kind:
    """Return what a checkpoint has under this key, or raise `CheckpointRefused`. Tensors are read
    from the file when they are used."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        value = saved[key]
    except Exception as error:  # a mutated file raises whatever its reader meets
        if names := not_allowed(path):
            short = ", ".join(name.rpartition(".")[2] for name in names)
            raise CheckpointRefused(
                f"{path} was not loaded: it holds objects of {', '.join(names)}, and loading them"
                " may run code out of the file. If you trust who wrote it, add"
                f" torch.serialization.add_safe_globals([{short}]) to the file of your module"
            ) from error
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointRefused(f"{path} is damaged ({why}): delete it to begin anew") from error
    if not isinstance(value, kind):
        why = f"its {key} is a {type(value).__name__}"
        raise CheckpointRefused(f"{path} is damaged ({why}): delete it to begin anew")
    return value


def not_allowed(path: Path) -> list[str]:
    """Return the names in a checkpoint that would not be loaded; none if it is damaged."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # a damaged file: whatever its reader raises
        return []
