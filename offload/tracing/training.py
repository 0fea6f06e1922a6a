"""A training step: forward pass, gradients, clipping and update.

    first of several     g1 -> sum                                      nothing is updated
    one in the middle    sum += g2
    the last one         g3 += sum   |g| -> norm -> factor   g *= factor   update(p, g)
                                 mean over all ranks before that (ranks.py)

Each gradient has tasks of its own. Only the norm waits for all of them, and it reads a few bytes of
each: no task holds all gradients. The arithmetic and its order are those of `backward()` into
`.grad`, of torch's `clip_grad_norm_` and `clip_grad_value_` and of the optimizer, so all bits
agree.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import Optimizer

from offload.graph.taskgraph import Role
from offload.program.kernels import Call, Value
from offload.tracing.building import Build, PersistentBuffer, copy_of
from offload.tracing.ranks import Ranks, averaged
from offload.tracing.tape import UPDATE
from offload.tracing.updating import Clip, Gradient, Parameter, UpdateTasks

Add = torch.ops.aten.add_.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStep:
    """One micro-batch: what it computes, and what happens to its gradients."""

    forward: Callable[..., tuple[torch.Tensor, Any]]
    """`loss, more = forward(*batch)`; `more`: whatever else the step returns."""
    optimizer: Optimizer
    reaches: Mapping[str, Any]
    """What `forward` reaches besides its arguments, by name: modules, functions."""
    update: bool = True
    """Whether the optimizer steps, or only gradients are added up."""
    sums: MutableMapping[Parameter, torch.Tensor] = field(default_factory=dict)
    """Gradients added up over the micro-batches so far. A step without update fills them."""
    held: frozenset[Parameter] = frozenset()
    """The parameters whose sum already holds something; none at the first micro-batch."""
    clip: Clip | None = None
    after: Callable[[], Any] | None = None
    """Called after the backward pass, with the gradients in `.grad`. What it leaves there is
    clipped and used. The step also returns what it returns."""
    ranks: Ranks | None = None
    """Other processes, whose gradients are averaged with these before they are clipped."""


def parameters_of(optimizer: Optimizer) -> list[tuple[int, Parameter]]:
    """Every parameter that the optimizer changes, once, with the number of its group."""
    found = {
        id(p): (number, p)
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if p.requires_grad
    }
    return list(found.values())


class Gradients:
    """Adds to a graph what follows the backward pass."""

    def __init__(
        self,
        build: Build,
        step: TrainingStep,
        parameters: Sequence[tuple[int, Parameter]],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        self._build = build
        self._builder = build.builder
        self._step = step
        self._tasks = UpdateTasks(build, step.optimizer, step.clip)
        self._found = [
            (group, p, build.recorder.value(p), None if g is None else build.recorder.value(g))
            for (group, p), g in zip(parameters, gradients, strict=True)
            if g is not None or p in step.held
        ]
        buffers = [g.buffer for *_, g in self._found if g is not None]
        self._shared = (
            {b for b in buffers if buffers.count(b) > 1} if step.clip or step.sums else {*()}
        )
        # Make all gradients before the first parameter changes: a gradient may lie in a parameter.
        if step.update:
            self._tasks.update(self._averaged([self._whole(*found) for found in self._found]))
        else:
            for found in self._found:
                self._add_up(*found)

    def _whole(self, group: int, p: Parameter, own: Value, g: Value | None) -> Gradient:
        """The gradient summed over all micro-batches."""
        if p not in self._step.held:
            assert g is not None
            changes = self._step.clip is not None and self._step.ranks is None
            return Gradient(group, p, own, self._laid_out(own, g, changes))
        total = self._sum(p, own)
        if g is None:
            return Gradient(group, p, own, total)
        g = self._laid_out(own, g, changes=True)
        self._tasks.task(
            f"{self._tasks.name(own)}.gradient.sum", Call(Add, (g, total)), (g,), (total,)
        )
        return Gradient(group, p, own, g)

    def _averaged(self, ready: Sequence[Gradient]) -> Sequence[Gradient]:
        """The gradients averaged over all ranks."""
        if self._step.ranks is None or not ready:
            return ready
        given = {gradient.parameter: (gradient.own, gradient.value) for gradient in ready}
        places = averaged(self._build, self._step.ranks, given)
        return [replace(gradient, value=places[gradient.parameter]) for gradient in ready]

    def _add_up(self, group: int, p: Parameter, own: Value, g: Value | None) -> None:
        if g is None:
            return
        total, name = self._sum(p, own), f"{self._tasks.name(own)}.gradient.sum"
        if p in self._step.held:
            self._tasks.task(name, Call(Add, (total, g)), (total,), (g,))
        else:
            self._build.task(
                name, (g.buffer,), (total.buffer,), copy_of(total, g), phase=UPDATE,
                traffic=2 * p.numel() * p.element_size(),
            )  # fmt: skip

    def _sum(self, p: Parameter, own: Value) -> Value:
        """The buffer in which the gradients of a parameter are added up."""
        if p not in self._step.sums:
            self._step.sums[p] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
        total = self._step.sums[p]
        buffer = PersistentBuffer(
            f"gradient.{self._tasks.name(own)}", Role.SUM, total.untyped_storage().nbytes(), total
        )
        number = self._build.add_persistent(buffer)
        return replace(own, buffer=number, stride=total.stride(), offset=0)

    def _laid_out(self, own: Value, g: Value, changes: bool) -> Value:
        """The gradient with the layout of its parameter, as eager's `.grad` has it.

        It is copied if it has another layout or lies in a persistent buffer. If it will change, it
        is also copied where something else uses its buffer."""
        buffer = self._builder.buffers[g.buffer]
        steps = [(a, b) for a, b, n in zip(own.stride, g.stride, g.size, strict=True) if n > 1]
        alike = all(a == b for a, b in steps) and g.dtype == own.dtype
        taken = buffer.persistent or buffer.role is Role.INPUT
        if changes:
            taken = taken or g.buffer in self._shared or g.buffer in self._build.results
        if alike and not taken:
            if buffer.role is Role.TEMPORARY:
                self._builder.buffers[g.buffer] = replace(buffer, role=Role.GRADIENT)
            return replace(g, stride=own.stride)
        name = f"{self._tasks.name(own)}.gradient"
        nbytes = self._builder.buffers[own.buffer].nbytes
        number = self._builder.buffer(name, nbytes, Role.GRADIENT)
        copy = replace(own, buffer=number)
        self._build.task(name, (g.buffer,), (number,), copy_of(copy, g), phase="backward")
        return copy
