"""Adds the end of an optimizer step to a graph: gradients are clipped, and every parameter updated.

    |g| -> norm -> factor   g *= factor   update(p, g)

Only the norm waits for all gradients, and it reads a few bytes of each: no task holds all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch.optim import Optimizer

from offload.errors import CaptureError
from offload.graph.taskgraph import Role
from offload.optimizer.gradients import clamp, factor_of, norm_of, scale
from offload.optimizer.step_study import StepStudy
from offload.optimizer.step_updates import StepUpdate, settled
from offload.optimizer.updates import Update, advance, begin, runs_its_step, update_of
from offload.program.kernels import Call, Value
from offload.torch_seams import group_by_device_and_dtype
from offload.tracing.building import Build, PersistentBuffer
from offload.tracing.stand_ins import claim
from offload.tracing.tape import UPDATE

Parameter = torch.nn.Parameter


@dataclass(frozen=True, slots=True)
class Clip:
    """How gradients are clipped before the update."""

    limit: float
    by: str = "norm"
    """`norm`: the norm of all gradients together is limited; `value`: every number is."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """Where a parameter and its gradient lie."""

    group: int
    """Number of the optimizer's parameter group."""
    parameter: Parameter
    own: Value
    """Where the parameter lies; `value` says where its gradient lies."""
    value: Value


class UpdateTasks:
    """Adds to a graph what follows once the gradients are there."""

    def __init__(
        self,
        build: Build,
        optimizer: Optimizer,
        clip: Clip | None = None,
        called: str = "optimizer",
    ) -> None:
        """The names of its state begin with `called`."""
        self.build = build
        self.builder = build.builder
        self._optimizer = optimizer
        self._clip = clip
        self._study = StepStudy(optimizer, build.recorder.device)
        self._called = called
        self._updates: dict[Parameter, Update | StepUpdate] = {}
        self._states: dict[tuple[Parameter, str], Value] = {}

    def name(self, own: Value) -> str:
        return self.builder.buffers[own.buffer].name

    def task(
        self, name: str, call: Call, changes: Sequence[Value], reads: Sequence[Value] = ()
    ) -> None:
        """Add a task that works in place."""
        changed = [value.buffer for value in changes]
        touched = dict.fromkeys((*changed, *(value.buffer for value in reads)))
        traffic = sum(self.builder.buffers[b].nbytes for b in (*touched, *changed))
        self.build.task(name, touched, changed, call, phase=UPDATE, traffic=traffic)

    def update(self, ready: Sequence[Gradient]) -> None:
        """Clip these gradients, and update their parameters."""
        factor = self.factor([self.norm(one) for one in ready], ready) if self.by_norm else None
        for gradient in ready:
            self.clip(gradient, factor)
        for gradient in ready:
            self.update_one(gradient)
        self.advance(ready)

    def advance(self, ready: Sequence[Gradient]) -> None:
        """Have the optimizer's counters advance after every step."""
        found = [self._updates[gradient.parameter] for gradient in ready]
        counted = [update.parameter for update in found if isinstance(update, Update)]
        steps = [update for update in found if isinstance(update, StepUpdate)]
        if counted:
            self.build.after_step.append(advance(self._optimizer, counted))
        if steps:
            self.build.after_step.append(settled(steps))
        if not found:
            self.build.after_step.append(advance(self._optimizer, ()))

    def update_at(self, p: Parameter) -> Update | StepUpdate:
        """The last update of a parameter that was added."""
        return self._updates[p]

    # ---- clipping -------------------------------------------------------------------------------

    @property
    def by_norm(self) -> bool:
        """Whether the norm of all gradients together is limited."""
        return self._clip is not None and self._clip.by != "value"

    def norm(self, gradient: Gradient) -> Value:
        """Where the norm of a gradient lies."""
        name, g = f"{self.name(gradient.own)}.norm", gradient.value
        norm = Value(self.builder.buffer(name, g.dtype.itemsize), g.dtype, (), ())
        self.build.task(
            name, (g.buffer,), (norm.buffer,), Call(norm_of, (g,), outputs=(norm,)), phase=UPDATE,
            traffic=gradient.parameter.numel() * g.dtype.itemsize,
        )  # fmt: skip
        return norm

    def factor(self, norms: Sequence[Value], ready: Sequence[Gradient]) -> Value | None:
        """Where the number lies that the gradients with these norms are multiplied by."""
        if self._clip is None or not norms:
            return None
        # Torch combines the norms in groups of one device and dtype; all are on the step's device
        # here.
        place = self.build.recorder.device
        groups = group_by_device_and_dtype(
            [[claim(place, g.parameter.dtype) for g in ready]], with_indices=True
        )
        order = [n for _, numbers in groups.values() for n in numbers]
        dtype = reduce(torch.promote_types, [norm.dtype for norm in norms])
        factor = Value(self.builder.buffer("clip", dtype.itemsize), dtype, (), ())
        call = Call(
            partial(factor_of, limit=self._clip.limit),
            ([norms[n] for n in order],),
            outputs=(factor,),
        )
        read = [norm.buffer for norm in norms]
        self.build.task("clip", read, (factor.buffer,), call, phase=UPDATE)
        return factor

    def clip(self, gradient: Gradient, factor: Value | None) -> None:
        """Clip a gradient in place. `factor`: by the norm of all; None: by its values, if at
        all."""
        name, g = f"{self.name(gradient.own)}.clip", gradient.value
        if factor is not None:
            self.task(name, Call(scale, (g, factor)), (g,), (factor,))
        elif self._clip is not None:
            self.task(name, Call(partial(clamp, limit=self._clip.limit), (g,)), (g,))

    # ---- the update -----------------------------------------------------------------------------

    def _update_of(self, group: int, p: Parameter) -> Update | StepUpdate:
        if runs_its_step(self._optimizer, self._optimizer.param_groups[group], p):
            self._study.check()
            return self._study.update_of(group, p)
        return update_of(self._optimizer, group, p, self.build.recorder.device)

    def _after_others(self, update: Update | StepUpdate, name: str) -> Update | StepUpdate:
        """The update, if the optimizer has updated this parameter before in the same step."""
        before = self._updates.get(update.parameter)
        if before is None:
            return update
        if isinstance(before, Update) and isinstance(update, Update):
            return replace(update, ahead=before.ahead + 1)
        raise CaptureError(
            f"optimizer {type(self._optimizer).__name__} updates {name} twice in one step, and a"
            " captured step calls its step() once. Use SGD, Adam or AdamW, or make a training step"
            " of each"
        )

    def update_one(self, gradient: Gradient) -> None:
        """Update one parameter with its gradient."""
        p, own, g = gradient.parameter, gradient.own, gradient.value
        optimizer, name = self._optimizer, self.name(gradient.own)
        if not is_whole(p):
            raise CaptureError(
                f"{name} shares its storage with other tensors, and offload updates whole storages."
                " Give it memory of its own: nn.Parameter(p.detach().clone())"
            )
        update = self._after_others(self._update_of(gradient.group, p), name)
        self._updates[p] = update
        states: list[Value] = []
        for key in update.states:
            if (known := self._states.get((p, key))) is not None:
                states.append(known)
                continue
            # `load_state_dict` replaces the tensor, so look it up anew.
            live = partial(_live, optimizer, p, key, update=update)
            tensor = live()
            if not is_whole(tensor):
                raise CaptureError(
                    f"optimizer {type(optimizer).__name__}: its state {key!r} of {name} shares its"
                    " storage with other tensors, and offload moves whole storages. Keep a tensor"
                    " of its own: torch.zeros_like(p)"
                )
            nbytes = tensor.untyped_storage().nbytes()
            buffer = self.build.add_persistent(
                PersistentBuffer(f"{self._called}.{key}.{name}", Role.STATE, nbytes, live)
            )
            place = Value(buffer, tensor.dtype, tuple(tensor.size()), tensor.stride())
            states.append(self._states.setdefault((p, key), place))
        buffers = [v.buffer for v in states]
        changed = isinstance(update, Update) and update.changes_gradient
        self.build.task(
            f"{name}.update",
            (own.buffer, g.buffer, *buffers),
            (own.buffer, *buffers, *([g.buffer] if changed else [])),
            Call(update, (own, g, *states)),
            phase=UPDATE,
            traffic=p.numel() * p.element_size() * (3 + 2 * len(states)),
        )


def _live(
    optimizer: Optimizer, p: Parameter, key: str, *, update: Update | StepUpdate
) -> torch.Tensor:
    """The arguments by position tell that another graph means the same state (renaming.py)."""
    if isinstance(update, StepUpdate):
        return update.live(key)
    if optimizer.state[p].get(key) is None:  # somebody cleared the state, so it starts again
        begin(optimizer, optimizer.param_groups[update.group], p)
    return optimizer.state[p][key]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers its whole storage."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return span * tensor.element_size() == tensor.untyped_storage().nbytes()
