"""Which values are looked into, and which types' attributes are noted.

plain values, tensors, modules of Python      as they are: another one is a change
containers, functions, partials, classes      what is in them is noted
objects of the user's and of most libraries   reads of their attributes are noted
open files, iterators                         refused: what they give differs in every step
"""

import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch

from offload.program.frames import OUR_TRAINERS, OURS
from offload.torch_seams import FakeTensor
from offload.watching.holders import inside

CONTAINERS = (dict, list, set, deque, np.ndarray, array, bytearray)
FIXED = (tuple, frozenset)
OPAQUE = (torch.Tensor, torch.dtype, torch.device, torch.Generator, Enum)
DICE = (random.Random, np.random.Generator, np.random.RandomState)
LOOKED_INTO = frozenset(
    {"argparse", "collections", "configparser", "queue", "types", "weakref", "__main__"}
)
STANDARD = frozenset(sys.stdlib_module_names) - LOOKED_INTO
"""Python's own modules, whose objects are not looked into."""
TORCH = ("torch.nn", "torch.optim", "torch.distributions", "torch.utils.data")
"""The modules of torch whose objects are looked into."""
COMMON = frozenset(
    {"builtins", "torch", "numpy", "collections", "types", "lightning", "pytorch_lightning"}
    | {"offload", "trainers"}
)
"""Libraries whose classes nobody changes at run time."""
PROFILERS = "lightning.pytorch.profilers"
"""Their hooks note what runs, and no step depends on that."""
HEAP_TYPE, IMMUTABLE_TYPE = 1 << 9, 1 << 8


class StandIn:
    """The base of what stands for a value while a step is traced: no user's object may keep it."""


def is_common(module: str) -> bool:
    """Whether this is a module of Python, of ours, or of a library that every program has."""
    root = module.split(".", 1)[0]
    return root in STANDARD or root in COMMON


def is_users(kind: type) -> bool:
    """Whether a class is the user's own, or of a library that few programs have."""
    return not is_common(kind.__module__ or "")


def file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<unknown>"


def is_looked_into(kind: type) -> bool:
    """Whether reads of this type's attributes are noted."""
    if not kind.__flags__ & HEAP_TYPE:  # a type of C
        return False
    module = kind.__module__ or ""
    root = module.split(".", 1)[0]
    if root == "torch":
        return module.startswith(TORCH) or issubclass(kind, torch.nn.Module)
    if module.startswith(PROFILERS):
        return False
    return root not in STANDARD and root not in ("builtins", "numpy", "offload", "trainers")


def can_be_changed(kind: type) -> bool:
    """Whether attributes of this class can be set: a metaclass may forbid it."""
    immutable = kind.__flags__ & IMMUTABLE_TYPE
    return not immutable and type(kind).__setattr__ is type.__setattr__


def is_iterator(value: Any) -> bool:
    """Whether this is an iterator of C, or a generator: both remember where they are."""
    kind = type(value)
    if isinstance(value, GeneratorType):
        return True
    return hasattr(kind, "__next__") and not kind.__flags__ & HEAP_TYPE


def is_of_ours(value: Any) -> bool:
    """Whether we put this into a user's object for the time of a trace."""
    if isinstance(value, StandIn):
        return True
    if type(value) is FunctionType:
        return value.__code__.co_filename.startswith((OURS, OUR_TRAINERS))
    return False


def stand_ins(value: Any, depth: int = 3) -> Iterator[Any]:
    """The fake tensors and other stand-ins in this value."""
    if isinstance(value, FakeTensor | StandIn):
        yield value
    elif depth and isinstance(value, dict | list | tuple | set | frozenset | deque):
        for key, item in inside(value):
            yield from stand_ins(key, 1)
            yield from stand_ins(item, depth - 1)


def has_stand_in(value: Any) -> bool:
    return any(True for _ in stand_ins(value))


def why_kept(value: Any) -> str:
    kept = next(stand_ins(value))
    if isinstance(kept, FakeTensor):
        return (
            "a tensor of the step (a metric or a cache?), and it has no value while the step is"
            " captured. Return it from the step and keep it outside, or fill a cache by one eager"
            " call first"
        )
    return (
        f"a {type(kept).__name__}, which stands for a number of the trainer while the"
        " step is traced. Keep such numbers in a hook (on_train_batch_end)"
    )
