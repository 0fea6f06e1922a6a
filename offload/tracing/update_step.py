"""A step that only updates: totals of gradients / their count -> clip -> update.

    total 1 / n  -> norm 1           the quotients for the norm are dropped again
    total 2 / n  -> norm 2  -> factor
    total 1 / n  -> g 1  g 1 *= factor  update(p 1, g 1)   and so on, one gradient at a time

Somebody else has added the gradients up: several micro-batches of this process, or of many peers.
The totals are only read. They are divided twice where gradients are clipped by their norm, because
a gradient that waits for the norm of all would take as much memory again as the totals do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.gate import only_python
from offload.graph.taskgraph import Role, TaskGraph
from offload.measuring.fake_answers import Learned
from offload.optimizer.gradients import divide
from offload.optimizer.updates import check_settings
from offload.program.kernels import Call, Value
from offload.torch_seams import storage_key
from offload.tracing.building import Build, PersistentBuffer
from offload.tracing.fixed_at_capture import FixedAtCapture
from offload.tracing.guards import check_batch, guarded_trace
from offload.tracing.stand_ins import device_of
from offload.tracing.surroundings import Surroundings, surroundings
from offload.tracing.training import parameters_of
from offload.tracing.updating import Clip, Gradient, Parameter, UpdateTasks, is_whole
from offload.watching.state_reads import StateReads

Totals = Mapping[Parameter, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateStep:
    """What an update needs besides the number of gradients in each total."""

    module: torch.nn.Module
    """It names the parameters."""
    optimizer: Optimizer
    totals: Totals
    """The sums of gradients. A parameter without one is not updated."""
    clip: Clip | None = None


def traced_update(
    step: UpdateStep, count: torch.Tensor, device: torch.device | str | None = None
) -> TaskGraph:
    """The graph of the update before lowering. Its only input is a single number: by how much the
    totals are divided."""
    check_batch((count,))
    check_settings(step.optimizer)
    parameters = parameters_of(step.optimizer)
    changing = [p for _, p in parameters if p in step.totals]
    around = surroundings({"": step.module}).with_others([p for _, p in parameters])
    _check_totals(step, count, changing, around)
    place = device_of(device, (count,), around.reachable())
    noted = StateReads()
    recorder, *_ = guarded_trace(lambda _: (), (count,), around, place, noted, Learned())
    with only_python():
        places = {p: recorder.value(p) for p in changing}
        build = Build(recorder, around, ())
        _Quotients(build, step, recorder.inputs[0]).update(
            [(group, p, places[p]) for group, p in parameters if p in places]
        )
        graph = build.finish(lambda other: traced_update(step, other, place))
    tensors = [t for _, t, in_module in around.tensors.values() if in_module]
    fixed = FixedAtCapture.of(noted.state(), tensors, step.optimizer)
    return replace(graph, program=replace(graph.program, changed=fixed.changed))


def _check_totals(
    step: UpdateStep, count: torch.Tensor, changing: list[Parameter], around: Surroundings
) -> None:
    if count.dim() != 0 or count.is_complex():
        raise CaptureError(
            f"the count is {count.dtype} of size {tuple(count.size())}: give a single number, such"
            " as torch.tensor(64.0, dtype=torch.float64)"
        )
    if not changing:
        raise CaptureError("no parameter of the optimizer has a total: there is nothing to update")
    if len(changing) < len(step.totals):
        left = len(step.totals) - len(changing)
        raise CaptureError(
            f"{left} of {len(step.totals)} totals are of tensors that the optimizer does not"
            " update. Leave them out"
        )
    seen: set[int] = set()
    for p in changing:
        total = step.totals[p]
        name, *_ = around.tensors.get(storage_key(p), ("a parameter",))
        if (total.dtype, total.size()) != (p.dtype, p.size()):
            raise CaptureError(
                f"the total of {name} is {total.dtype} {tuple(total.size())}, and the parameter is"
                f" {p.dtype} {tuple(p.size())}. Give a total like it: torch.zeros_like(p)"
            )
        if not is_whole(total) or storage_key(total) in seen:
            raise CaptureError(
                f"the total of {name} shares its storage with other tensors, and offload moves"
                " whole storages. Give it memory of its own: torch.zeros_like(p)"
            )
        seen.add(storage_key(total))


class _Quotients:
    """Adds the tasks of an update to its graph."""

    def __init__(self, build: Build, step: UpdateStep, count: Value) -> None:
        self._build = build
        self._step = step
        self._count = count
        self._tasks = UpdateTasks(build, step.optimizer, step.clip)
        self._totals: dict[Parameter, Value] = {}

    def update(self, found: list[tuple[int, Parameter, Value]]) -> None:
        for _, p, own in found:
            self._totals[p] = self._total(p, own)
        factor = None
        if self._tasks.by_norm:
            ready = [self._quotient(*one, "share", Role.TEMPORARY) for one in found]
            factor = self._tasks.factor([self._tasks.norm(one) for one in ready], ready)
        done: list[Gradient] = []
        for one in found:
            gradient = self._quotient(*one, "gradient", Role.GRADIENT)
            self._tasks.clip(gradient, factor)
            self._tasks.update_one(gradient)
            done.append(gradient)
        self._tasks.advance(done)

    def _total(self, p: Parameter, own: Value) -> Value:
        total = self._step.totals[p]
        nbytes = total.untyped_storage().nbytes()
        name = f"total.{self._tasks.name(own)}"
        number = self._build.add_persistent(PersistentBuffer(name, Role.SUM, nbytes, total))
        return Value(number, total.dtype, tuple(total.size()), total.stride())

    def _quotient(self, group: int, p: Parameter, own: Value, what: str, role: Role) -> Gradient:
        """The total divided by the count, with the layout of the parameter."""
        name = f"{self._tasks.name(own)}.{what}"
        nbytes = self._tasks.builder.buffers[own.buffer].nbytes
        g = replace(own, buffer=self._tasks.builder.buffer(name, nbytes, role), offset=0)
        total = self._totals[p]
        # Not of phase "update": it would be made before the updates that it is not needed for.
        self._build.task(
            name, (total.buffer, self._count.buffer), (g.buffer,),
            Call(divide, (g, total, self._count)), phase="backward", pointwise=True,
            traffic=2 * nbytes,
        )  # fmt: skip
        return Gradient(group, p, own, g)
