"""Computes the vocabulary loss by rows, so that the logits never exist as a whole. By name only.

    h W -> logits -> log_softmax -> loss   ... -> d logits -> d W, d h   four tensors of size [T, V]
    forward   every chunk of rows:  h W -> logits -> log_softmax -> loss +=
    backward  every chunk of rows:  h W -> logits -> log_softmax -> d logits -> d W +=, d h rows

The backward pass computes the logits again, so the loss may be used in any way. The loss and d W
are sums over chunks, in another order than eager's, so the last bits differ.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from offload.errors import GraphError
from offload.graph.taskgraph import Buffer, Task, TaskGraph
from offload.lowering.merging import held_in_order
from offload.program.kernels import Call, Value
from offload.torch_seams import log_softmax, log_softmax_backward

aten = torch.ops.aten
ABSENT = "chunked_loss: the graph has no cross entropy over mm(h, W) that can be cut into rows"
MEAN, SUM = 1, 2
INNER = ("mm", "softmax", "nll_backward", "softmax_backward")
"""Tasks whose results are as large as the logits."""


def chunked_loss(graph: TaskGraph, rows: int | None = None) -> TaskGraph:
    """Compute the vocabulary loss `rows` at a time; by default as many as fill 32 MiB of logits."""
    loss = _Loss.of(graph)
    total, words = loss.logits.size
    if rows is None:
        rows = max(1, (32 << 20) // (words * loss.logits.dtype.itemsize))
    borders = [*range(0, total, max(1, rows)), total]
    if len(borders) < 3:
        note = f"chunked_loss: {total} rows of {words} logits fit into one chunk; nothing to do"
        return graph.with_tasks(graph.tasks, None, note)
    work = _Chunks(graph, loss, list(graph.buffers))
    forward, backward = list(work.forward(borders)), list(work.backward(borders))
    gone = {*loss.at.values()}
    tasks: list[Task] = []
    place: list[int] = []
    for number, task in enumerate(graph.tasks):
        place.append(len(tasks))
        if number == loss.at["nll"]:
            tasks.extend(forward)
        elif number == loss.at["nll_backward"]:
            tasks.extend(backward)
        elif number not in gone:
            tasks.append(replace(task, after=tuple(place[a] for a in task.after)))
    note = (
        f"chunked_loss: {total} rows of {words} logits are cut into {len(borders) - 1} chunks; sums"
        " are added in another order than eager's, so the last bits differ"
    )
    return graph.with_tasks(tasks, work.buffers, note)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The seven tasks of a vocabulary loss, by name, and their calls."""

    at: dict[str, int]
    call: dict[str, Call]

    @property
    def logits(self) -> Value:
        return self.call["softmax"].args[0]

    @classmethod
    def of(cls, graph: TaskGraph) -> "_Loss":
        users: dict[int, list[int]] = {}
        for number, task in enumerate(graph.tasks):
            for b in task.touches:
                users.setdefault(b, []).append(number)
        starts = [n for n, t in enumerate(graph.tasks) if _op(t) is log_softmax]
        for start in starts:
            found = _found(graph, users, start)
            if found is not None:
                return found
        raise GraphError(ABSENT)


def _found(graph: TaskGraph, users: dict[int, list[int]], start: int) -> _Loss | None:
    """The loss whose log_softmax is task `start`; None if the pattern is another one."""

    def value(number: int, position: int = 0) -> int:
        made = graph.tasks[number].kernel.outputs[position]
        return -1 if made is None else made.buffer

    def ops(numbers: list[int]) -> list[Any]:
        return [_op(graph.tasks[n]) for n in numbers]

    logits = graph.tasks[start].kernel.args[0].buffer
    makers, middle = users[logits], users[value(start)]
    wanted = [
        log_softmax, aten.nll_loss_forward.default,
        aten.nll_loss_backward.default, log_softmax_backward,
    ]  # fmt: skip
    if ops(makers) != [aten.mm.default, wanted[0]] or ops(middle) != wanted:
        return None
    nll_backward, softmax_backward = middle[2:]
    last = users[value(softmax_backward)]
    if ops(last) != [wanted[3], aten.mm.default, aten.mm.default]:
        return None
    if users[value(nll_backward)] != [nll_backward, softmax_backward]:
        return None
    grad = value(softmax_backward)
    first = [graph.tasks[n].kernel.args[0] for n in last[1:]]
    size = graph.tasks[start].kernel.args[0].size
    if sorted(v.size for v in first if isinstance(v, Value)) != sorted([size, size[::-1]]):
        return None
    by_size = {v.size: n for v, n in zip(first, last[1:], strict=True) if v.buffer == grad}
    if len(by_size) < 2:  # also with as many rows as words: they cannot be told apart
        return None
    names = ("mm", "softmax", "nll", "nll_backward", "softmax_backward", "dw", "dh")
    numbers = (makers[0], *middle, by_size[size[::-1]], by_size[size])
    loss = _Loss(
        dict(zip(names, numbers, strict=True)),
        {n: graph.tasks[at].kernel for n, at in zip(names, numbers, strict=True)},
    )
    return loss if _can_be_cut(graph, users, loss) else None


def _can_be_cut(graph: TaskGraph, users: dict[int, list[int]], loss: _Loss) -> bool:
    """Whether no other task reads what vanishes, and what is read again is unchanged by then."""
    call, at = loss.call, loss.at
    dh, dw = call["dh"].outputs[0], call["dw"].outputs[0]
    if dh is None or dw is None or held_in_order(graph).intersection(at.values()):
        return False
    (hidden, weight), target = call["mm"].args, call["nll"].args[1]
    until = max(at.values())
    unchanged = not any(
        at["mm"] < number < until and value.buffer in graph.tasks[number].writes
        for value in (hidden, weight, target, call["dh"].args[1])
        for number in users[value.buffer]
    )
    inner = {b for name in INNER for b in graph.tasks[at[name]].writes}
    return (
        unchanged
        and inner.isdisjoint(graph.outputs)
        and all(users[v.buffer][0] == at[name] for v, name in ((dh, "dh"), (dw, "dw")))
        and call["softmax"].args[1] in (1, -1)
        and call["nll"].args[2] is None
        and call["nll"].args[3] in (MEAN, SUM)
        and call["dw"].args[1] == hidden
    )


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Makes the tasks of rows [start, stop)."""

    graph: TaskGraph
    loss: _Loss
    buffers: list[Buffer]

    def forward(self, borders: list[int]) -> Iterator[Task]:
        nll = self.loss.call["nll"]
        loss, weight = nll.outputs
        assert loss is not None and weight is not None
        for rows in pairwise(borders):
            logs = yield from self._logs(rows)
            made = [loss, weight]
            if rows[0]:
                made = [self._fresh(v, v.size) for v in made]
            args = (logs, _rows(nll.args[1], rows), None, SUM, nll.args[4])
            yield self._task("nll", rows, Call(nll.op, args, {}, tuple(made)))
            if rows[0]:
                for into, more in zip((loss, weight), made, strict=True):
                    yield self._task("nll", rows, Call(aten.add_.Tensor, (into, more)), into)
        if nll.args[3] == MEAN:
            yield self._task("nll", (0, 0), Call(aten.div_.Tensor, (loss, weight)), loss)

    def backward(self, borders: list[int]) -> Iterator[Task]:
        call = self.loss.call
        nll, softmax, dw, dh = (call[n] for n in ("nll_backward", "softmax_backward", "dw", "dh"))
        into_dw, into_dh = dw.outputs[0], dh.outputs[0]
        assert into_dw is not None and into_dh is not None
        hidden = call["mm"].args[0]
        for rows in pairwise(borders):
            logs = yield from self._logs(rows, " again")
            back, grad = self._fresh(logs, logs.size), self._fresh(logs, logs.size)
            args = (nll.args[0], logs, _rows(nll.args[2], rows), *nll.args[3:])
            yield self._task("nll_backward", rows, Call(nll.op, args, {}, (back,)))
            args = (back, logs, *softmax.args[2:])
            yield self._task("softmax_backward", rows, Call(softmax.op, args, {}, (grad,)))
            pair = (
                replace(grad, size=grad.size[::-1], stride=grad.stride[::-1]),
                _rows(hidden, rows),
            )
            if rows[0] == 0:
                yield self._task("dw", rows, Call(dw.op, pair, {}, (into_dw,)))
            else:
                yield self._task("dw", rows, Call(aten.addmm_.default, (into_dw, *pair)), into_dw)
            out = {"out": _rows(into_dh, rows)}
            made = Call(aten.mm.out, (grad, dh.args[1]), out)
            yield self._task("dh", rows, made, into_dh, begins=rows[0] == 0)

    def _logs(self, rows: tuple[int, int], again: str = "") -> Iterator[Any]:
        """Compute the log_softmax of some rows and return it."""
        mm, softmax = self.loss.call["mm"], self.loss.call["softmax"]
        size = (rows[1] - rows[0], self.loss.logits.size[1])
        logits = self._fresh(self.loss.logits, size)
        made = softmax.outputs[0]
        assert made is not None
        logs = self._fresh(made, size)
        args = (_rows(mm.args[0], rows), mm.args[1])
        yield self._task("mm", rows, Call(mm.op, args, {}, (logits,)), again=again)
        args = (logits, *softmax.args[1:])
        yield self._task("softmax", rows, Call(softmax.op, args, {}, (logs,)), again=again)
        return logs

    def _fresh(self, like: Value, size: tuple[int, ...]) -> Value:
        of = self.buffers[like.buffer]
        nbytes = math.prod(size) * like.dtype.itemsize
        self.buffers.append(replace(of, name=f"{of.name} rows", nbytes=nbytes))
        stride = tuple(math.prod(size[n + 1 :]) for n in range(len(size)))
        return Value(len(self.buffers) - 1, like.dtype, size, stride)

    def _task(
        self,
        name: str,
        rows: tuple[int, int],
        call: Call,
        into: Value | None = None,
        begins: bool = False,
        again: str = "",
    ) -> Task:
        """`into`: what the call changes in place; `begins`: nothing is in it yet."""
        of = self.graph.tasks[self.loss.at[name]]
        reads = [v.buffer for v in call.args if isinstance(v, Value)]
        writes = [v.buffer for v in call.outputs if v is not None]
        if into is not None:
            writes = [into.buffer]
            reads = reads if begins else [*reads, into.buffer]
        share = (rows[1] - rows[0]) / self.loss.logits.size[0]
        return replace(
            of,
            name=f"{of.name} rows {rows[0]}{again}",
            phase="backward" if again else of.phase,
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(writes),
            flops=of.flops * share,
            traffic=int(of.traffic * share),
            seconds=None if of.seconds is None else of.seconds * share,
            repeatable=into is None,
            kernel=call,
        )


def _rows(value: Value, rows: tuple[int, int]) -> Value:
    start, stop = rows
    size = (stop - start, *value.size[1:])
    return replace(value, size=size, offset=value.offset + start * value.stride[0])


def _op(task: Task) -> Any:
    return task.kernel.op if isinstance(task.kernel, Call) else None
