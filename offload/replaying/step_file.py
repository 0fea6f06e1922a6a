"""Reads and writes a step as a file: its operations, and the bytes that it begins with.

    step     training_step | cut | training_step      a part for each stretch between two cuts
    part     aten::mm(slot 3, slot 7) -> slot 12      operations over slots, which are storages
    data     slot 3: bytes                            a file may leave them out

A file holds numbers, strings and tensors only, so reading one from somebody else runs no code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError
from offload.graph.taskgraph import Role
from offload.program.kernels import Value

FORMAT = 1
NAMED = (torch.dtype, torch.layout, torch.memory_format)
"""Arguments of operations that a file has by name."""


@dataclass(frozen=True, slots=True)
class NumberTensor:
    """A number that an operation is given as a tensor of the host."""

    number: complex
    dtype: torch.dtype
    of_python: bool


@dataclass(frozen=True, slots=True)
class SavedOp:
    """One operation as it was issued. `Value.buffer` is a slot."""

    op: str
    args: tuple[Any, ...]
    """All arguments of its schema, in order."""
    made: tuple[Value | None, ...]
    grad: bool
    """Whether autograd was on."""
    backward: bool
    where: str
    """The user's line that issued it."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the module or of an optimizer."""

    name: str
    role: Role
    value: Value


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What was issued between two cuts of a step, and what it begins with."""

    step: str
    """What the step is called, such as training_step."""
    device: str
    ops: Sequence[SavedOp]
    nbytes: Mapping[int, int]
    """By slot: the bytes of its storage."""
    given: Sequence[int]
    """The slots that have bytes before the part begins."""
    held: Sequence[int]
    """The slots that somebody holds after it."""
    named: Sequence[NamedTensor]
    data: Mapping[int, torch.Tensor]
    """By slot: the bytes that it begins with. Empty in a file without data."""
    generators: Sequence[torch.Tensor]
    """The states of the generators of the CPU and of the device."""

    def without_data(self) -> "SavedPart":
        return replace(self, data={})


@dataclass(frozen=True, slots=True)
class SavedStep:
    title: str
    budget: str | int | None
    parts: Sequence[SavedPart]
    threads: int
    """Of torch, on which bits may depend."""
    torch: str = str(torch.__version__)


def write_step(path: Path, step: SavedStep) -> None:
    torch.save({"format": FORMAT, "step": _encode(step)}, path)


def read_step(path: Path) -> SavedStep:
    """Raises `OffloadError` if the file is no step, or one of another format."""
    try:
        content = torch.load(path, weights_only=True)
        known = content["format"]
        step = _decode(content["step"]) if known == FORMAT else None
    except OSError as error:
        raise OffloadError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OffloadError(f"{path} is no file of a step: {first}") from error
    if step is None:
        raise OffloadError(
            f"{path} has format {known}, and this version reads format {FORMAT}: read it with the"
            " version that wrote it"
        )
    if not isinstance(step, SavedStep):
        raise OffloadError(f"{path} is no file of a step: it holds a {type(step).__name__}")
    return step


# ---- plain values -------------------------------------------------------------------------------


def _encode(tree: Any) -> Any:
    """The value as plain ones: a pair of a kind and a content where it is no plain value itself."""
    if isinstance(tree, Role):
        return ("role", tree.value)
    if isinstance(tree, (SavedStep, SavedPart, SavedOp, NamedTensor, NumberTensor, Value)):
        content = {each.name: _encode(getattr(tree, each.name)) for each in fields(tree)}
        return (type(tree).__name__, content)
    if isinstance(tree, NAMED):
        return ("torch", str(tree).removeprefix("torch."))
    if isinstance(tree, torch.device):
        return ("device", str(tree))
    if isinstance(tree, complex):
        return ("complex", tree.real, tree.imag)
    if isinstance(tree, tuple):
        return ("tuple", *map(_encode, tree))
    if isinstance(tree, list):
        return [_encode(each) for each in tree]
    if isinstance(tree, Mapping):
        return {name: _encode(each) for name, each in tree.items()}
    if tree is None or isinstance(tree, bool | int | float | str | torch.Tensor):
        return tree
    raise OffloadError(
        f"a step with the argument {tree!r} cannot be saved, because a file holds tensors and"
        " numbers: draw from the default generator, if it is a generator"
    )


def _decode(tree: Any) -> Any:
    if isinstance(tree, list):
        return [_decode(each) for each in tree]
    if isinstance(tree, dict):
        return {name: _decode(each) for name, each in tree.items()}
    if not isinstance(tree, tuple):
        return tree
    kind, *content = tree
    match kind:
        case "tuple":
            return tuple(map(_decode, content))
        case "role":
            return Role(content[0])
        case "device":
            return torch.device(content[0])
        case "complex":
            return complex(*content)
        case "torch":
            named = getattr(torch, content[0])
            if not isinstance(named, NAMED):
                raise ValueError(f"torch.{content[0]} is no type of numbers or memory")
            return named
    classes = (SavedStep, SavedPart, SavedOp, NamedTensor, NumberTensor, Value)
    made = next(each for each in classes if each.__name__ == kind)
    return made(**_decode(content[0]))
