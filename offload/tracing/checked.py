"""Puts the checks of what a step assumes among its ops, before all that could do harm.

    tape    stats.add_   count -> asked   table[index]   stats.mul_
    graph   copy of stats -> add_ -> ...  count -> CHECK -> table[index] ...   mul_   copy back

A value that is not the assumed one ends the step at its check. Until then nothing may be written
that outlives the step: what an op writes before the last check is written into a copy, and copied
back after it. An op that takes whole numbers as indices waits for the checks before it, because
with other values they might lie outside of a tensor.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import Role
from offload.program.assumptions import Assumption, Check
from offload.program.kernels import Call, Value
from offload.program.trees import leaves
from offload.torch_seams import pytree, schema_of
from offload.tracing.tape import Op, Tape

WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
SAFE = frozenset({
    "all", "any", "argmax", "argmin", "cat", "clone", "copy_", "_to_copy", "cumsum", "max", "min",
    "nonzero_static", "sort", "stack", "sum", "topk",
})  # fmt: skip
"""Ops that use whole numbers as numbers, besides those that work point by point."""


class Building(Protocol):
    """What a `Build` offers: its builder, and new tasks."""

    builder: GraphBuilder

    def task(
        self, name: str, reads: Iterable[int], writes: Iterable[int], kernel: Call, **more: Any
    ) -> int: ...


class Checked:
    """Adds the checks of one tape to a graph while its ops are added."""

    def __init__(self, build: Building, tape: Tape) -> None:
        self._build = build
        self._asked: dict[int, list[tuple[Value, Assumption]]] = {}
        """What is asked after so many ops."""
        for number, value, assumption in tape.assumptions:
            self._asked.setdefault(number, []).append((value, assumption))
        self._ops = len(tape.ops)
        self._last = max(self._asked, default=0)
        self._waiting: list[tuple[Value, Assumption]] = []
        self._made = 0
        self._copies: dict[int, int] = {}
        self.latest: tuple[int, ...] = ()
        """What the op has to wait for besides its buffers."""
        self._check: tuple[int, ...] = ()

    def before(self, number: int, op: Op) -> Op:
        """The op over copies of what it must not change yet. What it waits for is `latest`."""
        self._waiting += self._asked.pop(number, ())
        risky = not op_is_safe(op)
        if self._waiting and risky:
            self._add_check()
        if number < self._last:
            for b in op.changes:
                if b not in self._copies and self._build.builder.buffers[b].persistent:
                    self._copy(b)
        self.latest = self._check if risky else ()
        return _renamed(op, self._copies) if self._copies else op

    def end(self, number: int | None = None) -> None:
        """Add the last check after all ops, or before op `number` if nothing is asked later, and
        then write what waited for it."""
        self._waiting += self._asked.pop(self._ops if number is None else number, ())
        if self._waiting:
            self._add_check()
        for b, own in self._copies.items():
            buffer = self._build.builder.buffers[b]
            whole, copy = _whole(b, buffer.nbytes), _whole(own, buffer.nbytes)
            self._build.task(
                f"{buffer.name}.written", (own,), (b,), copy_of(whole, copy), after=self._check
            )
        self._copies.clear()

    def _copy(self, b: int) -> None:
        buffer = self._build.builder.buffers[b]
        own = self._build.builder.buffer(f"{buffer.name}.copy", buffer.nbytes, Role.TEMPORARY)
        self._copies[b] = own
        whole, copy = _whole(b, buffer.nbytes), _whole(own, buffer.nbytes)
        self._build.task(f"{buffer.name}.copy", (b,), (own,), copy_of(copy, whole))

    def _add_check(self) -> None:
        values = [value.renamed(self._copies) for value, _ in self._waiting]
        check = Check(self._made, tuple(assumption for _, assumption in self._waiting))
        number = self._build.task(
            "check",
            tuple(dict.fromkeys(value.buffer for value in values)),
            (),
            Call(check, tuple(values)),
            after=self._check,
            checks=True,
            where=self._waiting[0][1].where,
        )
        self._made += len(values)
        self._waiting = []
        self._check = (number,)


def op_is_safe(op: Op) -> bool:
    """Whether the op can be run with any values."""
    if torch.Tag.pointwise in op.func.tags or packet_name(op.func) in SAFE:
        return True
    given = leaves(pytree.tree_leaves((op.args, dict(op.kwargs)), is_leaf=_is_value))
    return not any(isinstance(leaf, Value) and leaf.dtype in WHOLE for leaf in given)


def packet_name(func: Any) -> str:
    return schema_of(func).name.split("::")[1]


def copy_of(to: Value, source: Value) -> Call:
    return Call(torch.ops.aten.copy_.default, (to, source))


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _whole(b: int, nbytes: int) -> Value:
    return Value(b, torch.uint8, (nbytes,), (1,))


def _renamed(op: Op, names: dict[int, int]) -> Op:
    def rename(leaf: Any) -> Any:
        return leaf.renamed(names) if isinstance(leaf, Value) else leaf

    args, kwargs = pytree.tree_map(rename, (op.args, dict(op.kwargs)), is_leaf=_is_value)

    def renamed(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(names.get(b, b) for b in numbers)

    return replace(
        op,
        args=args,
        kwargs=kwargs,
        outputs=tuple(None if v is None else v.renamed(names) for v in op.outputs),
        reads=renamed(op.reads),
        writes=renamed(op.writes),
        changes=renamed(op.changes),
    )
