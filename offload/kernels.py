"""What a captured task calls, with the tensors named by buffer: bound to addresses later.

    Call(aten.mm, (Value w, Value x), outputs=(Value y,))  --bind(view)-->  run()

`view(value)` is the tensor at the value's planned address. A kernel that allocates its outputs
itself (`outputs`) is made to put them there by placement.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from offload.taskgraph import ALIGNMENT

View = Callable[["Value"], torch.Tensor]
CPU = torch.device("cpu")
DEVICE_ALIGNMENT = 256
"""PyTorch's own allocator gives 512 on CUDA, and nothing asks beyond 256: cuBLASLt chooses kernels,
hence bits, by up to 256 bytes of an operand's alignment, cuDNN by 32, others vectorize by 16."""

Source = torch.Tensor | Sequence[torch.Tensor] | Callable[[], torch.Tensor]
"""A tensor of the user's; several, over one storage; or how to find it, where its owner makes
another object of it."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor over a buffer. `offset` in elements from the buffer's begin."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def renamed(self, names: Mapping[int, int]) -> "Value":
        return replace(self, buffer=names.get(self.buffer, self.buffer))


class Kernel(Protocol):
    """`Call`s in a row (`calls`)."""

    def renamed(self, names: Mapping[int, int]) -> "Kernel": ...

    @property
    def calls(self) -> "Sequence[Call]": ...


@dataclass(frozen=True, slots=True)
class Call:
    """`op(*args, **kwargs)`, tensors in them being `Value`s."""

    op: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Value | None, ...] = ()
    """The tensors that it returns in new memory, by position; None: not one (a view, a None, a
    result in place). Empty for a call in place."""
    allocations: Any = None
    """What it allocates, as profiling.py recorded it."""

    @property
    def calls(self) -> "Sequence[Call]":
        return (self,)

    def renamed(self, names: Mapping[int, int]) -> "Call":
        def rename(leaf: Any) -> Any:
            return leaf.renamed(names) if isinstance(leaf, Value) else leaf

        args, kwargs = _map((self.args, dict(self.kwargs)), rename)
        outputs = tuple(None if v is None else v.renamed(names) for v in self.outputs)
        return replace(self, args=args, kwargs=kwargs, outputs=outputs)

    def arguments(self, view: View) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With tensors for the values."""
        return _map(
            (self.args, dict(self.kwargs)),
            lambda leaf: view(leaf) if isinstance(leaf, Value) else leaf,
        )


@dataclass(frozen=True, slots=True)
class Calls:
    """Several, one right after the other."""

    calls: tuple[Call, ...]

    def renamed(self, names: Mapping[int, int]) -> "Calls":
        return Calls(tuple(call.renamed(names) for call in self.calls))


@dataclass(slots=True, eq=False)
class Program:
    """How the outside world is bound to a captured graph."""

    inputs: tuple[Value, ...]
    """What the batch is copied into."""
    outputs: tuple[Any, ...]
    """What the step returns: `Value`s, and whatever is no tensor as it is."""
    tensors: dict[str, Source]
    """The user's own tensors, by `Buffer.tensor`: parameters, buffers, optimizer state, constants.
    A runner moves them into its arenas."""
    recapture: Callable[..., Any] | None = None
    """The graph of the same step for a batch of another shape."""
    after_step: tuple[Callable[[], None], ...] = ()
    """Called when a step is over: host-side counters of the optimizer."""
    device: torch.device = CPU
    """Where its kernels run. The host's arena is in the machine's memory whatever it is."""
    fixed: int = 0
    """Bytes that libraries keep for themselves on the device, once for all kernels: measured."""

    @property
    def alignment(self) -> int:
        """Of every buffer: as much as kernels look at when they choose how to run."""
        return ALIGNMENT if self.device.type == "cpu" else DEVICE_ALIGNMENT

    def renamed(self, names: Mapping[int, int]) -> "Program":
        """Over other buffers."""

        def rename(leaf: Any) -> Any:
            return leaf.renamed(names) if isinstance(leaf, Value) else leaf

        inputs = tuple(value.renamed(names) for value in self.inputs)
        return replace(self, inputs=inputs, outputs=_map(self.outputs, rename))


def device_of(graph: Any) -> torch.device:
    """Where the kernels of a TaskGraph run; of one built by hand, on the CPU."""
    return CPU if graph.program is None else graph.program.device


def _map(tree: Any, change: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(change, tree, is_leaf=lambda leaf: isinstance(leaf, Value))
