"""A tape: the ops of one traced step, and the storages that they touch.

    ops        conv1 -> relu -> ... -> backward of conv1     in the order of their calls
    storages   0 input   1 weight   2 what conv1 made   ...

Ops name storages by their numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.program.assumptions import Assumption
from offload.program.kernels import Value

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(slots=True)
class Storage:
    """One storage of the trace. The buffer made from it has the same number."""

    nbytes: int
    keep: Any
    """The storage itself, kept alive so that no other storage gets its address."""
    kind: str
    """made (by an op), input, real (the user's) or literal (written in the step's code). On the CPU
    of a step that runs on a GPU also folded and own (cpu_values.py)."""
    tensor: torch.Tensor | None = None
    """The tensor with the bytes. None for the kinds made and input."""
    name: str = ""
    filled: bool = False
    """Whether the op that made it also filled it. If not, the first op that writes it names it."""
    written: bool = False
    """Whether an op wrote it in place after it was made."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One call of a kernel. Tensors are `Value`s over the tape's storages."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    changes: tuple[int, ...]
    """Those of `writes` that existed before: the op changes them in place."""
    random: bool
    phase: str
    name: str
    where: str
    flops: float
    traffic: int
    autograd: bool
    """Whether autograd was on: a few kernels ask."""

    @property
    def code(self) -> str:
        """The call as text, for comparing two traces."""
        return f"{self.func}{self.args!r}{dict(self.kwargs)!r} -> {self.outputs!r}"


@dataclass(frozen=True, slots=True, eq=False)
class StepMark:
    """A call of an optimizer's `step()` in the middle of a trace."""

    after: int
    """The number of ops before it."""
    optimizer: torch.optim.Optimizer
    gradients: tuple[tuple[int, torch.nn.Parameter, Value, Value], ...]
    """The parameters that have a gradient: number of the group, parameter, where it lies, where its
    gradient lies."""

    @property
    def code(self) -> str:
        """The call as text, for comparing two traces."""
        found = [(group, id(p), own, g) for group, p, own, g in self.gradients]
        return f"{self.after} {id(self.optimizer)} {found!r}"


@dataclass(slots=True)
class Tape:
    """The ops and storages of one trace."""

    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    assumptions: list[tuple[int, Value, Assumption]] = field(default_factory=list)
    """What the step was answered when it asked for values: after how many ops, and for which."""
    steps: list[StepMark] = field(default_factory=list)
    """The steps of optimizers that the step calls itself."""
    away: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """While the step is traced: the user's tensors on other devices, by the keys of the storages
    that stand in for theirs."""
