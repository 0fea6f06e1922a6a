"""The calls of a captured task. Their tensors are named by buffer and bound to addresses later.

    Call(aten.mm, (Value w, Value x), outputs=(Value y,))  --bind(view)-->  run()

`view(value)` is the tensor at the value's planned address. If a kernel allocates its `outputs`
itself, placement.py makes it put them at their addresses.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from offload.graph.taskgraph import ALIGNMENT
from offload.torch_seams import pytree

View = Callable[["Value"], Any]
CPU = torch.device("cpu")
DEVICE_ALIGNMENT = 256
"""Alignment of buffers on a GPU. PyTorch's own allocator gives 512 bytes, and nothing needs more
than 256: cuBLASLt chooses kernels, hence bits, by up to 256 bytes of an operand's alignment, cuDNN
by 32, others vectorize by 16."""

LEAVES = frozenset({
    int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
"""Arguments of a kernel that are neither nests nor values."""

Source = torch.Tensor | Sequence[torch.Tensor]
"""A user's tensor, or several over one storage."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor over a buffer. `offset` counts elements from the beginning of the buffer."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    def rename(self, names: Mapping[int, int]) -> "Value":
        """The same tensor over a renamed buffer."""
        return replace(self, buffer=names.get(self.buffer, self.buffer))

    def fills(self, nbytes: int) -> bool:
        """Whether it covers every byte of a buffer of `nbytes` exactly once. Only such a value may
        take another one's place: what is done to it is done to the buffer."""
        expected = 1
        by_stride = sorted(zip(self.stride, self.size, strict=True))
        for stride, size in by_stride:
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.offset == 0 and expected * self.dtype.itemsize == nbytes


class Kernel(Protocol):
    """One or more `Call`s in a row."""

    def rename(self, names: Mapping[int, int]) -> "Kernel": ...

    @property
    def calls(self) -> "Sequence[Call]": ...


@dataclass(frozen=True, slots=True)
class Call:
    """`op(*args, **kwargs)`. Tensors among the arguments are `Value`s."""

    op: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Value | None, ...] = ()
    """The tensors that it returns in new memory, by position. None stands for other results: a
    view, a None, a result in place. Empty for a call that works in place."""
    allocations: Any = None
    """The allocations that profiling.py recorded."""
    advance: int | None = None
    """How far it moves the device's default generator on, as profiling.py found; None: unknown."""

    @property
    def calls(self) -> "Sequence[Call]":
        return (self,)

    @property
    def of_torch(self) -> Callable[..., Any]:
        """The op of torch's, where something of ours calls it."""
        return getattr(self.op, "of_torch", self.op)

    def rename(self, names: Mapping[int, int]) -> "Call":
        def rename_value(leaf: Any) -> Any:
            return leaf.rename(names) if isinstance(leaf, Value) else leaf

        args, kwargs = _map_leaves((self.args, dict(self.kwargs)), rename_value)
        outputs = tuple(None if v is None else v.rename(names) for v in self.outputs)
        return replace(self, args=args, kwargs=kwargs, outputs=outputs)

    def arguments(self, view: View) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with tensors in place of values."""
        kwargs = {name: _put_tensors(part, view) for name, part in self.kwargs.items()}
        return tuple([_put_tensors(part, view) for part in self.args]), kwargs


@dataclass(frozen=True, slots=True)
class Calls:
    """Several calls, one right after the other."""

    calls: tuple[Call, ...]
    inner: Mapping[int, range] = field(default_factory=dict)
    """By buffer that only these calls touch: its bytes in the workspace of the task."""

    def rename(self, names: Mapping[int, int]) -> "Calls":
        return Calls(tuple(call.rename(names) for call in self.calls), self.inner)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """How a captured graph is bound to the user's tensors and functions."""

    inputs: tuple[Value, ...]
    """Values that the batch is copied into."""
    outputs: tuple[Any, ...]
    """What the step returns: `Value`s, and anything else as it is."""
    tensors: Mapping[str, Source]
    """The user's own tensors by `Buffer.tensor`: parameters, buffers, optimizer state, constants. A
    runner moves them into its arenas."""
    recapture: Callable[..., Any] | None = None
    """Captures the same step for a batch of another shape."""
    device: torch.device = CPU
    """The device of its kernels. The host's arena is always in the machine's memory."""
    fixed: int = 0
    """Bytes that libraries keep on the device for all kernels together, as measured."""

    @property
    def alignment(self) -> int:
        """The alignment of every buffer, which is the most that kernels consider when they choose
        code."""
        return alignment_on(self.device)


def alignment_on(device: torch.device) -> int:
    return ALIGNMENT if device.type == "cpu" else DEVICE_ALIGNMENT


def device_of(graph: Any) -> torch.device:
    """The device of a TaskGraph's kernels; the CPU for a handmade graph."""
    return CPU if graph.program is None else graph.program.device


def values_in(tree: Any) -> Iterator[Value]:
    """All values among arguments."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, tuple | list):
        for leaf in tree:
            yield from values_in(leaf)


def _put_tensors(tree: Any, view: View) -> Any:
    """The tree with tensors in place of values."""
    kind = type(tree)
    if kind is Value:
        return view(tree)
    if kind in LEAVES or kind is torch.Tensor:
        return tree
    if kind is tuple or kind is list:
        return kind([_put_tensors(part, view) for part in tree])
    return _map_leaves(tree, lambda leaf: view(leaf) if isinstance(leaf, Value) else leaf)


def _map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """As `tree_map`, which takes ten times as long for the nests that arguments of kernels are."""
    kind = type(tree)
    if kind is Value or kind in LEAVES or kind is torch.Tensor:
        return change(tree)
    if kind is tuple or kind is list:
        return kind([_map_leaves(part, change) for part in tree])
    if kind is dict:
        return {key: _map_leaves(part, change) for key, part in tree.items()}
    return pytree.tree_map(change, tree, is_leaf=lambda leaf: isinstance(leaf, Value))
