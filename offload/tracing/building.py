"""Reads a tape, op by op, and builds a graph from it.

    Tape (tape.py)   --Build-->   tasks over buffers   --training.py adds gradients, updates-->

Storage n of the tape becomes buffer n. If the user's tensors lie in it, the buffer is persistent
and knows them. A tensor that the step's code writes down (a literal) is a constant.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.graph.builder import GraphBuilder
from offload.graph.taskgraph import RANKS, Role, TaskGraph
from offload.program.kernels import Call, Program, Source, Value
from offload.torch_seams import pytree, storage_key
from offload.tracing.checked import Checked, copy_of
from offload.tracing.collectives import is_collective
from offload.tracing.recorder import Recorder
from offload.tracing.run_time_ops import at_run_time
from offload.tracing.surroundings import Surroundings
from offload.tracing.tape import FORWARD, UPDATE, Op, StepMark, Tape


@dataclass(frozen=True, slots=True)
class PersistentBuffer:
    """What a persistent buffer is called and whose bytes it holds."""

    name: str
    role: Role
    nbytes: int
    source: Source


class Build:
    """Reads a tape once, op by op, into a graph."""

    def __init__(
        self,
        recorder: Recorder,
        around: Surroundings,
        outputs: tuple[Any, ...],
        add_step: Callable[["Build", StepMark], None] | None = None,
        sums: Collection[int] = (),
    ) -> None:
        """`add_step` adds the tasks of an optimizer's step that the tape marks. `sums`: storages of
        the user's tensors that are sums of gradients."""
        self._add_step = add_step
        self._sums = sums
        self.recorder = recorder
        self._outputs = pytree.tree_map_only(torch.Tensor, recorder.value, outputs)
        leaves = pytree.tree_leaves(self._outputs, is_leaf=_is_value)
        self.results = tuple(dict.fromkeys(v.buffer for v in leaves if _is_value(v)))
        """Buffers that hold what the step returns."""
        self._tape: Tape = recorder.tape
        self._around = around
        self.builder = GraphBuilder()
        self._tensors: dict[str, Source] = {}
        self._written: set[int] = set()
        self._random: tuple[int, ...] = ()
        self.latest_collective: tuple[int, ...] = ()
        self.after_step: list[Callable[[], None]] = []
        self._buffers()
        self._ops()

    def _buffers(self) -> None:
        """Make one buffer for each storage, with the same number."""
        persistent: dict[int, PersistentBuffer] = {}
        copied: list[int] = []
        for number, storage in enumerate(self._tape.storages):
            if storage.kind == "real":
                persistent[number] = self._persistent(number)
            elif storage.kind == "literal":
                if storage.written:
                    copied.append(number)
                else:
                    persistent[number] = _literal(number, storage)
        activations = _activations(self._tape)
        for number, storage in enumerate(self._tape.storages):
            if (given := persistent.get(number)) is not None:
                self.add_persistent(given)
                continue
            role = Role.ACTIVATION if number in activations else Role.TEMPORARY
            role = Role.INPUT if storage.kind == "input" else role
            if role is Role.INPUT:
                self._written.add(number)
            self.builder.buffer(storage.name, storage.nbytes, role)
        for number in copied:
            self._copy_literal(number)

    def _persistent(self, number: int) -> PersistentBuffer:
        storage = self._tape.storages[number]
        tensor = _given(storage)
        unknown = (f"constant.{number}", tensor, False)
        key = storage_key(tensor)
        name, tensor, in_module = self._around.tensors.get(key, unknown)
        if key in self._sums:
            role = Role.SUM
        elif isinstance(tensor, torch.nn.Parameter):
            role = Role.PARAMETER
        else:
            role = Role.BUFFER if storage.written or in_module else Role.CONSTANT
        # All tensors of the storage must move together: a view left behind would miss the writes.
        sharing = {id(t): t for t in (*self._around.sharing.get(key, ()), _given(storage))}
        source = tuple(sharing.values()) if len(sharing) > 1 else tensor
        return PersistentBuffer(name, role, storage.nbytes, source)

    def add_persistent(self, given: PersistentBuffer) -> int:
        self._tensors[given.name] = given.source
        number = self.builder.buffer(given.name, given.nbytes, given.role)
        self._written.add(number)
        return number

    def _copy_literal(self, number: int) -> None:
        """Copy a literal at every step, because the step changes it."""
        tensor = _given(self._tape.storages[number])
        source = self.add_persistent(_literal(number, self._tape.storages[number]))
        value = Value(source, tensor.dtype, tuple(tensor.size()), tensor.stride())
        copy = replace(value, buffer=number)
        self.task(f"literal.{number}.copy", (source,), (number,), copy_of(copy, value))

    def _ops(self) -> None:
        checked = Checked(self, self._tape)
        for number, op in enumerate(self._tape.ops):
            self._steps(number, checked)
            self._op(checked.before(number, op), checked.latest)
        self._steps(len(self._tape.ops), checked)
        checked.end()

    def _steps(self, number: int, checked: Checked) -> None:
        """Add the steps of optimizers before op `number`. Nothing is asked after a step."""
        for mark in self._tape.steps:
            if mark.after == number:
                assert self._add_step is not None
                checked.end(number)
                self._add_step(self, mark)

    def _op(self, op: Op, after: tuple[int, ...]) -> None:
        # An op cannot depend on bytes that nobody has written yet.
        unborn = [b for b in op.reads if b not in self._written]
        reads = [b for b in op.reads if b in self._written]
        writes = dict.fromkeys((*op.writes, *unborn))
        shared = is_collective(op.func)
        chain = self._random if op.random else self.latest_collective if shared else ()
        number = self.task(
            op.name,
            reads,
            writes,
            Call(
                at_run_time(op.func, self.recorder.device, op.autograd),
                op.args,
                op.kwargs,
                op.outputs,
            ),
            lane=RANKS if shared else "compute",
            phase=self._phase(op),
            after=tuple(sorted({*after, *chain})),
            flops=op.flops,
            traffic=op.traffic,
            repeatable=not op.changes and not op.random and not shared,
            unplaced=sum(self.builder.buffers[v.buffer].nbytes for v in op.outputs if v and shared),
            random=op.random,
            pointwise=torch.Tag.pointwise in op.func.tags,
            where=op.where,
        )
        if op.random:
            self._random = (number,)
        if shared:
            self.latest_collective = (number,)

    def _phase(self, op: Op) -> str:
        parameters = any(self.builder.buffers[b].role is Role.PARAMETER for b in op.changes)
        return UPDATE if parameters else op.phase

    def task(
        self, name: str, reads: Iterable[int], writes: Iterable[int], kernel: Call, **more: Any
    ) -> int:
        writes = tuple(writes)
        self._written.update(writes)
        return self.builder.task(name, reads, writes, kernel=kernel, **more)

    def finish(self, recapture: Callable[..., Any]) -> TaskGraph:
        """Name the inputs and outputs, check the graph and return it."""
        for buffer in self.results:
            self.builder.output(buffer)
        program = Program(
            tuple(self.recorder.inputs),
            self._outputs,
            self._tensors,
            recapture,
            tuple(self.after_step),
            self.recorder.device,
            assumed=tuple(assumption.value for *_, assumption in self._tape.assumptions),
        )
        graph = self.builder.graph(program)
        graph.check()
        return graph


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


def _given(storage: Any) -> torch.Tensor:
    assert storage.tensor is not None
    return storage.tensor


def _literal(number: int, storage: Any) -> PersistentBuffer:
    return PersistentBuffer(f"literal.{number}", Role.CONSTANT, storage.nbytes, _given(storage))


def _activations(tape: Tape) -> set[int]:
    made = {b for op in tape.ops if op.phase == FORWARD for b in op.writes}
    return made & {b for op in tape.ops if op.phase != FORWARD for b in op.reads}
