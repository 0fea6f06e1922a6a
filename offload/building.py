"""A tape, read once, op by op, into a graph.

    Tape (tracing.py)   --Build-->   tasks over buffers   --training.py adds gradients, updates-->

A storage of the tape is a buffer of the same number. One that the user's tensors share is
persistent and knows them; a tensor that the step's code writes down (a literal) is a constant.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from offload.kernels import Call, Program, Source, Value
from offload.seeds import at_run_time
from offload.surroundings import Surroundings
from offload.taskgraph import Role, TaskGraph
from offload.tracing import FORWARD, UPDATE, Op, Recorder, Tape


@dataclass(frozen=True, slots=True)
class Home:
    """What a persistent buffer is called and whose bytes it holds."""

    name: str
    role: Role
    nbytes: int
    source: Source


class Build:
    """Reads a tape once, op by op, into a graph."""

    def __init__(self, recorder: Recorder, around: Surroundings, outputs: tuple[Any, ...]) -> None:
        self.recorder = recorder
        self._outputs = pytree.tree_map_only(torch.Tensor, recorder.value, outputs)
        leaves = pytree.tree_leaves(self._outputs, is_leaf=_is_value)
        self.results = tuple(dict.fromkeys(v.buffer for v in leaves if _is_value(v)))
        """Buffers that the step returns."""
        self._tape: Tape = recorder.tape
        self._around = around
        self.graph = TaskGraph()
        self._tensors: dict[str, Source] = {}
        self._written: set[int] = set()
        self._random: tuple[int, ...] = ()
        self.after_step: list[Callable[[], None]] = []
        self._buffers()
        for op in self._tape.ops:
            self._op(op)

    def _buffers(self) -> None:
        """One for each storage, by the same number."""
        homes: dict[int, Home] = {}
        copied: list[int] = []
        for number, storage in enumerate(self._tape.storages):
            if storage.kind == "real":
                homes[number] = self._home(number)
            elif storage.kind == "literal":
                if storage.written:
                    copied.append(number)
                else:
                    homes[number] = _literal(number, storage)
        activations = _activations(self._tape)
        for number, storage in enumerate(self._tape.storages):
            if (home := homes.get(number)) is not None:
                self.persistent(home)
                continue
            role = Role.ACTIVATION if number in activations else Role.TEMPORARY
            role = Role.INPUT if storage.kind == "input" else role
            if role is Role.INPUT:
                self._written.add(number)
            self.graph.buffer(storage.name, storage.nbytes, role)
        for number in copied:
            self._copy_literal(number)

    def _home(self, number: int) -> Home:
        storage = self._tape.storages[number]
        tensor = _given(storage)
        unknown = (f"constant.{number}", tensor, False)
        key = tensor.untyped_storage()._cdata
        name, tensor, in_module = self._around.tensors.get(key, unknown)
        if isinstance(tensor, torch.nn.Parameter):
            role = Role.PARAMETER
        else:
            role = Role.BUFFER if storage.written or in_module else Role.CONSTANT
        # A view that stayed behind would not see what the step writes.
        sharing = {id(t): t for t in (*self._around.sharing.get(key, ()), _given(storage))}
        source = tuple(sharing.values()) if len(sharing) > 1 else tensor
        return Home(name, role, storage.nbytes, source)

    def persistent(self, home: Home) -> int:
        self._tensors[home.name] = home.source
        number = self.graph.buffer(home.name, home.nbytes, home.role)
        self._written.add(number)
        return number

    def _copy_literal(self, number: int) -> None:
        """The step changes it, so that it is made anew every step."""
        tensor = _given(self._tape.storages[number])
        source = self.persistent(_literal(number, self._tape.storages[number]))
        value = Value(source, tensor.dtype, tuple(tensor.size()), tensor.stride())
        copy = replace(value, buffer=number)
        self.task(f"literal.{number}.copy", (source,), (number,), copy_of(copy, value))

    def _op(self, op: Op) -> None:
        # Bytes that nobody has written yet are no contents that one could read.
        unborn = [b for b in op.reads if b not in self._written]
        reads = [b for b in op.reads if b in self._written]
        writes = dict.fromkeys((*op.writes, *unborn))
        number = self.task(
            op.name,
            reads,
            writes,
            Call(at_run_time(op.func, self.recorder.device), op.args, op.kwargs, op.outputs),
            phase=self._phase(op),
            after=self._random if op.random else (),
            flops=op.flops,
            traffic=op.traffic,
            repeatable=not op.changes and not op.random,
            random=op.random,
            pointwise=torch.Tag.pointwise in op.func.tags,
            where=op.where,
        )
        if op.random:
            self._random = (number,)

    def _phase(self, op: Op) -> str:
        parameters = any(self.graph.buffers[b].role is Role.PARAMETER for b in op.changes)
        return UPDATE if parameters else op.phase

    def task(
        self, name: str, reads: Iterable[int], writes: Iterable[int], kernel: Call, **more: Any
    ) -> int:
        writes = tuple(writes)
        self._written.update(writes)
        return self.graph.task(name, reads, writes, kernel=kernel, **more)

    def finish(self, recapture: Callable[..., Any]) -> TaskGraph:
        """Name what goes in and what comes out."""
        for buffer in self.results:
            self.graph.output(buffer)
        self.graph.program = Program(
            tuple(self.recorder.inputs),
            self._outputs,
            self._tensors,
            recapture,
            tuple(self.after_step),
            self.recorder.device,
        )
        self.graph.check()
        return self.graph


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def copy_of(to: Value, source: Value) -> Call:
    return Call(torch.ops.aten.copy_.default, (to, source))


def _given(storage: Any) -> torch.Tensor:
    assert storage.tensor is not None
    return storage.tensor


def _literal(number: int, storage: Any) -> Home:
    return Home(f"literal.{number}", Role.CONSTANT, storage.nbytes, _given(storage))


def _activations(tape: Tape) -> set[int]:
    made = {b for op in tape.ops if op.phase == FORWARD for b in op.writes}
    return made & {b for op in tape.ops if op.phase != FORWARD for b in op.reads}
