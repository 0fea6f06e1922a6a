"""The lanes of a step by plain Lightning: forward and backward pass of one lane after the other.

    seed of (run, step, lane) -> buffers as committed -> training_step -> backward into the sums

A lane's loss is the mean over its samples. A lane that has fewer than the others, at the end of a
pass, counts by its share, so the step's gradient is the mean over all samples of all lanes.

Seeds are functions of the run's seed, the step and the lane. A lane draws the same numbers
whichever peer computes it, and after a step every peer is at the same seed.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from loaders.lanes.lane_loader import LaneBatch, LaneLoader
from trainers.elastic.deciding.header import LaneLogs, in_units, sum_of_units
from trainers.elastic.errors import CannotBeElastic, FixedPointError
from trainers.elastic.work.digests import Commit, digest_of, part_of_step
from trainers.elastic.work.gradient_sums import ExactSums, GradientSums

REFUSED = MappingProxyType(
    {
        "sync_dist": "the swarm reduces what is logged by itself: leave sync_dist out",
        "rank_zero_only": "what is logged must be equal at every peer: leave rank_zero_only out",
        "metric_attribute": "a metric object counts the samples of one peer only: log a number",
    }
)


class LogCatcher:
    """Stands in for `self.log` of one module while a lane is computed."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self._size = 0
        self._caught: list[tuple[tuple[str, str], Any, int]] = []
        """By name and options: a number, or a tensor that may wait for the lane's kernels, and the
        samples of its lane."""

    def begin(self) -> None:
        """Forget the step before."""
        self._caught = []

    @contextmanager
    def catching(self, size: int) -> Iterator[None]:
        """Catch what is logged of a lane with `size` samples."""
        self._size = size
        self._module.__dict__["log"] = self._catch
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def _catch(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self._check(name, args, options)
        if not isinstance(value, int | float | torch.Tensor) or torch.as_tensor(value).numel() != 1:
            raise CannotBeElastic(
                f"self.log({name!r}) of a {type(value).__name__}: a swarm logs single numbers"
            )
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        given = {key: option for key, option in options.items() if option is not None}
        key = name, json.dumps(given, sort_keys=True)
        self._caught.append((key, value, self._size))

    def _check(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Refuse what cannot be reduced over lanes, and take out what says nothing new."""
        if args:
            raise CannotBeElastic(f"self.log({name!r}): give its options by name, not by place")
        for option, why in REFUSED.items():
            if options.pop(option, None):
                raise CannotBeElastic(f"self.log({name!r}, {option}=...): {why}")
        if (how := options.pop("reduce_fx", "mean")) not in ("mean", torch.mean):
            raise CannotBeElastic(
                f"self.log({name!r}, reduce_fx={how!r}): lanes are reduced by their mean only"
            )
        size = options.pop("batch_size", None) or self._size
        if size != self._size:
            raise CannotBeElastic(
                f"self.log({name!r}, batch_size={size}) in a lane of size {self._size}: a swarm"
                " weights by samples; leave batch_size out"
            )

    @property
    def values(self) -> tuple[tuple[str, str, int | None], ...]:
        """What was logged, as `LaneLogs` has it."""
        sums: dict[tuple[str, str], int | None] = {}
        for key, value, size in self._caught:
            sums[key] = sum_of_units(sums.get(key, 0), in_units(float(value) * size))
        return tuple((*key, sums[key]) for key in sorted(sums))

    def log(self, logs: LaneLogs) -> None:
        """Log the means of a whole step."""
        for name, options, units in logs.values:
            known = json.loads(options)
            self._module.log(name, logs.mean(units), batch_size=logs.samples, **known)


@dataclass(frozen=True, slots=True)
class AddedLane:
    """A lane whose gradients are in the sums."""

    lane: int
    size: int
    loss: float


class StepLanes:
    """The lanes of one step, and what those that are computed here come to."""

    def __init__(
        self, number: int, batch_index: int, micro: int, sizes: Sequence[int] = ()
    ) -> None:
        """`batch_index`: the step's place in the pass. `micro`: the samples of a whole lane.
        `sizes`: those of every lane."""
        self.number = number
        self.batch_index = batch_index
        self.micro = micro
        self.sizes = sizes
        self.with_samples = tuple(lane for lane, size in enumerate(sizes) if size)
        self.samples = 0
        self.loss_units: int | None = 0
        """The sum of the losses, as `LaneLogs` has it."""
        self.doubts: dict[int, str] = {}
        """Which lanes cannot count, and why."""

    def add(self, added: AddedLane) -> None:
        """Add the samples and the loss of a lane."""
        if not math.isfinite(added.loss):
            self.doubts[added.lane] = "its loss is not finite"
        self.samples += added.size
        self.loss_units = sum_of_units(self.loss_units, in_units(added.loss * added.size))


class PlainWork:
    """What one peer computes of its steps."""

    def __init__(
        self,
        module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
        lanes: LaneLoader,
        training_step: Callable[[Any, int], Any],
        backward: Callable[[Tensor], None],
        *,
        exact: bool = False,
    ) -> None:
        """`training_step`, of a batch and its index, and `backward` are Lightning's, with its
        precision. `exact`: sums do not depend on who computed what."""
        self._module = module
        self._optimizer = optimizer
        self._lanes = lanes
        self._training_step = training_step
        self._backward = backward
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.gradients = self._make_sums(named)
        self._exact = ExactSums(self.gradients.flat.numel(), lanes.lanes) if exact else None
        self._parameters = tuple(module.parameters())
        self.catcher = LogCatcher(module)
        self.committed: list[Tensor] = []
        """The buffers with which every lane of a step begins; empty between two steps."""
        self._first_buffers: list[Tensor] = []
        self._step = StepLanes(0, 0, 0)

    def open(self, step: int, batch_index: int, micro: int) -> None:
        """Note which step the trainer is at, as of `StepLanes`."""
        self._step = StepLanes(step, batch_index, micro)

    def begin(self, step: int) -> None:
        """Begin a step: no lane is added yet."""
        now = self._step
        if step != now.number:
            raise CannotBeElastic(f"step {step} was asked for, and the trainer is at {now.number}")
        self.catcher.begin()
        self.committed, self._first_buffers = self._copy_buffers(), []
        sizes = self._lanes.sizes(self._lanes.position[1])
        self._step = StepLanes(now.number, now.batch_index, now.micro, sizes)
        self.gradients.begin()
        if self._exact is not None:
            self._exact.begin()

    def lanes(self) -> Sequence[int]:
        """Return the lanes that have samples in this step."""
        return self._step.with_samples

    def expect(self, lanes: Sequence[int]) -> None:
        """Prepare for these lanes, in this and the next steps, and for no others."""
        self._lanes.hold(lanes)

    def compute(self, lanes: Sequence[int]) -> int:
        """Add the gradients of the first lane or lanes to the sums, in their order. Return how many
        were added. `lanes`: all that this peer has still to compute."""
        self._restore_buffers()
        added = self._add_first(lanes)
        for lane in added:
            self._step.add(lane)
        if self._exact is not None:
            self._round_exactly(self._exact, added)
        if lanes[0] == self._step.with_samples[0]:
            self._first_buffers = self._copy_buffers()
        self._restore_buffers()
        return len(added)

    @property
    def sums(self) -> Tensor:
        """The sums of the lanes that were computed, flat, on the host."""
        if self._exact is not None:
            return self._exact.sums
        flat = self.gradients.flat
        return flat if flat.device.type == "cpu" else flat.cpu()

    def as_floats(self, total: Tensor) -> Tensor:
        """Return the gradients that a total of such sums stands for."""
        return total if self._exact is None else self._exact.floats(total)

    @property
    def logs(self) -> LaneLogs:
        """What the computed lanes logged."""
        step = self._step
        return LaneLogs(step.samples, step.loss_units, self.catcher.values, self.gradients.touched)

    def buffers(self) -> tuple[Tensor, ...]:
        """Return the buffers after the step's first lane, which was computed here."""
        return tuple(buffer.cpu() for buffer in self._first_buffers)

    def weights_digest(self, step: int) -> str:
        """Return the digest of the part of the weights that is compared in this step."""
        return digest_of(part_of_step(self._state_tensors(), step))

    def trouble(self) -> str:
        """Return which lane's numbers are not finite, or "" if all are finite."""
        step = self._step
        for lane, why in step.doubts.items():
            ids = self._lanes.ids(lane).ids.tolist()
            return f"step {step.number} cannot be made of lane {lane} with samples {ids}: {why}"
        if step.samples and (names := self.gradients.wrong_names()):
            some = ", ".join(names[:3])
            return f"gradients are not finite at step {step.number}, of parameters {some}"
        return ""

    def end(self) -> None:
        """Let go of the gradients, and leave all generators at the seed after the step."""
        self.gradients.end()
        self._restore_buffers()
        self.committed = []
        self._seed(seed_after(self._lanes.loader.seed, self._step.number))

    def apply_commit(self, commit: Commit) -> None:
        """Make a commit's mean gradient the parameters' gradients, and put its buffers in place."""
        # Divided on the host: a GPU multiplies by the inverse, which has other bits.
        mean = commit.total / (commit.logs.samples / self._step.micro)
        self.gradients.give(mean, commit.logs.touched)
        self._put_buffers(commit.buffers)

    def _copy_buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._module.buffers()]

    def _put_buffers(self, buffers: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self._module.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def _restore_buffers(self) -> None:
        if self.committed:
            self._put_buffers(self.committed)

    def _make_sums(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> GradientSums:
        return GradientSums(named)

    def _add_first(self, lanes: Sequence[int]) -> Sequence[AddedLane]:
        """Add the gradients of the first of these lanes, and leave its buffers in the module."""
        size, loss = self._add(lanes[0])
        return [AddedLane(lanes[0], size, float(loss))]

    def _add(self, lane: int) -> tuple[int, Tensor]:
        """Add the gradients of one lane. Return how many samples it has, and its loss."""
        taken = self._take(lane)
        size = len(taken.info.ids)
        self._seed(seed_of_lane(self._lanes.loader.seed, self._step.number, lane))
        with self.catcher.catching(size):
            loss = _loss_of(self._training_step(taken.batch, self._step.batch_index))
        share = size / self._step.micro
        self._backward(loss if share == 1.0 else loss * share)
        return size, loss.detach()

    def _take(self, lane: int) -> LaneBatch:
        return self._lanes.take(lane)

    def _round_exactly(self, exact: ExactSums, added: Sequence[AddedLane]) -> None:
        """Take the gradients of one lane, which are rounded by themselves."""
        [only] = added
        try:
            exact.take(self.gradients.flat, f"lane {only.lane}")
        except FixedPointError as error:
            # Others have to know of it: all stop, and not this peer alone.
            self._step.doubts.setdefault(only.lane, str(error))
        self.gradients.clear()

    def _state_tensors(self) -> list[Tensor]:
        tensors: list[Tensor] = [*self._parameters, *self._module.buffers()]
        for p in self._parameters:
            state = self._optimizer.state.get(p, {})
            tensors += [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        return tensors

    def _seed(self, seed: int) -> None:
        self._seed_torch(seed)
        random.seed(seed)
        np.random.seed(seed)

    def _seed_torch(self, seed: int) -> None:
        # torch.manual_seed takes a millisecond: for devices that nobody uses it keeps the stack.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise CannotBeElastic(
            f"training_step returned {type(output).__name__} without a loss, and a swarm cannot"
            " leave out a lane: return the loss, or a dict with the key 'loss'"
        )
    return loss


def seed_of_lane(seed: int, step: int, lane: int) -> int:
    """Return the seed with which a lane's micro-batch is computed."""
    return _digest_seed("lane", seed, step, lane)


def seed_after(seed: int, step: int) -> int:
    """Return the seed of whatever draws between this step and the next one."""
    return _digest_seed("after", seed, step, 0)


def _digest_seed(*parts: str | int) -> int:
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())
