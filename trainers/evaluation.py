"""Validation, test and prediction steps as graphs: weights are streamed as in training.

    validation_step(batch)   key: method, stage, loader, shapes, python values  -->  a graph
                             run it without autograd, then self.log and metrics for real

    while it trains   the graph joins the training steps in their runner: one budget, the same homes
    before, without   a runner of its own, up to the first training step or the end of the run

Lightning is in inference mode here, where every tensor that is made is of no use to training.
Whatever stays (the arenas, the homes) is made outside of it; what metrics and loggers keep is made
in it, as ever. A step that cannot be captured runs on the host's tensors, which needs nothing of
the device, and so it does under any budget.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils import _pytree as pytree

from offload import BudgetTooSmall, CaptureError, Plan, Runner, TaskGraph, capture
from offload.sizes import is_share
from trainers.closure import CONTEXTS, PLAIN, Batch, Given, Recipe, Traced
from trainers.collected import gathered
from trainers.devices import all_on, move, tensors_of
from trainers.fallback import user_error
from trainers.kept import MANY, Kept
from trainers.logged import Deferred, Notes
from trainers.steps import Asked

HOST = torch.device("cpu")
FAST = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
DOING = MappingProxyType(
    {"validation_step": "validates", "test_step": "tests", "predict_step": "predicts"}
)


class Look(Traced):
    """`tensors = look(*tensors)`: a step without a loss, to be traced."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, notes = self._call(tensors)
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, (torch.Tensor, Deferred, *PLAIN)):
                raise CaptureError(
                    f"{self._given.kind} returns a {type(leaf).__name__}, which cannot be taken"
                    " apart. Return tensors, numbers and text in dicts, lists and tuples"
                )
        return notes.checked()

    @contextmanager
    def _around(self, notes: Notes, second: bool) -> Iterator[None]:
        with super()._around(notes, second), gathered(self._module, notes) as names:
            yield
        self._reads.forget(self._module, names)


@dataclass(frozen=True, slots=True, eq=False)
class Glance:
    """A graph in the runner, by itself as the key."""

    recipe: Recipe


class Evaluation:
    """Of one run of the trainer's."""

    def __init__(
        self, module: L.LightningModule, asked: Asked, training: Callable[[], Runner | None]
    ) -> None:
        """`training`: the runner of the training steps, once there is one."""
        self.plan: Plan | None = None
        """Of the first step in a runner of its own."""
        self._module = module
        self._asked = asked
        self._training = training
        self._own: Runner | None = None
        self._runner: Runner | None = None
        """The one that has the graphs."""
        self._kept = self._nothing()
        self._on_host: set[str] = set()
        """Methods of which a step could not be captured."""
        self._said: set[str] = set()
        self._reading: dict[Any, int] = {}
        """By method and loader: those that look at the batch's text, and for how many."""

    def step(self, kind: str, eager: Callable[..., Any], *args: Any) -> Any:
        """What the module's method of this name returns; `eager` calls it as Lightning does."""
        if kind in self._on_host:
            return self._eager(eager, *args)
        if (runner := self._where()) is not None and (name := runner.astray()):
            why = (
                f"{name} was pointed to other memory since the last step (p.data = ...), and what"
                " it was before must stay as it is. Copy the values into it (p.data.copy_(...))"
            )
            return self._host(kind, why, eager, *args)
        try:
            with _apart():
                given = self._given(kind, *args)
                outputs, recipe = self._run(given)
        except CaptureError as error:
            self._on_host.add(kind)
            return self._host(kind, str(error), eager, *args, mistake=user_error(error))
        except BudgetTooSmall as error:
            if self._module.trainer.state.fn != TrainerFn.FITTING:
                raise
            self._on_host.add(kind)
            return self._host(kind, str(error), eager, *args)
        context = getattr(self._module.trainer.precision_plugin, CONTEXTS[kind])
        return recipe.serve(outputs, given.batch.given, context)

    def close(self) -> None:
        """Memory of their own for all tensors that are in a runner of ours."""
        self._runner, own, self._own = None, self._own, None
        self._kept = self._nothing()
        if own is not None:
            with _apart():
                own.close()

    def abandon(self) -> None:
        """The device is lost."""
        self._runner, own, self._own = None, self._own, None
        if own is not None:
            own.abandon()

    def _where(self) -> Runner | None:
        """The runner that the graphs are in, or will be; None: there is none yet."""
        training = self._training()
        if training is not None and training is not self._runner:
            self.close()
            self._runner = training
        return self._runner

    def _nothing(self) -> Kept[Glance]:
        return Kept("the evaluation", self._forget)

    def _forget(self, step: Glance) -> None:
        assert self._runner is not None
        self._runner.forget(step)

    def _given(self, kind: str, batch: Any, *more: Any) -> Given:
        method = getattr(self._module, kind)
        if is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
            raise CaptureError(f"{kind} takes the loader's iterator (dataloader_iter)")
        # As Lightning decides whether to give it.
        if more and is_param_in_hook_signature(method, "batch_idx", min_args=2):
            return Given(kind, Batch.of(batch), more[0], more[1:])
        return Given(kind, Batch.of(batch), None, more)

    def _run(self, given: Given) -> tuple[Sequence[Any], Recipe]:
        step = self._step_for(given)
        assert self._runner is not None
        return self._runner.run(step, *given.batch.tensors), step.recipe

    def _step_for(self, given: Given) -> Glance:
        state = self._module.trainer.state
        loader = given.kind, given.more, state.stage
        situation = (*loader, state.fn, torch.is_autocast_enabled(self._asked.target.device.type))
        for batch in (given.batch.loose, given.batch):
            if (known := self._kept.find((*situation, batch.key))) is not None:
                return known
        self._kept.say_many((*situation, given.batch.key), given.batch.loose, loader)
        graph, step, batch = self._captured(given)
        if self._runner is None:
            self.plan = self._planned(graph)
            self._own = self._runner = self._asked.target.runner(self.plan, step)
        else:
            self._runner.add(step, graph)
        self._kept.put((*situation, batch.key), step)
        return step

    def _captured(self, given: Given) -> tuple[TaskGraph, Glance, Batch]:
        """For any text in the batch, if the step only hands it on."""
        loose = given.batch.loose
        if loose is not given.batch and (given.kind, given.more) not in self._reading:
            try:
                return *self._traced(replace(given, batch=loose)), loose
            except CaptureError:
                self._reading[given.kind, given.more] = 0
        if loose is not given.batch:
            self._reading[given.kind, given.more] += 1
            if self._reading[given.kind, given.more] > MANY:
                raise CaptureError(
                    f"the text of the batch is another every time, and {given.kind} looks at it"
                )
        return *self._traced(given), given.batch

    def _planned(self, graph: TaskGraph) -> Plan:
        """A share is meant of a training step, which has more than one large task: here it is at
        least the largest."""
        try:
            return self._asked.plan(graph)
        except BudgetTooSmall as error:
            if not is_share(self._asked.budget):
                raise
            return replace(self._asked, budget=error.needed).plan(graph)

    def _traced(self, given: Given) -> tuple[TaskGraph, Glance]:
        _check_fast_path(self._module)
        look = Look(self._module, given)
        graph = capture(
            look, *given.batch.tensors, reaches={"": self._module}, device=self._asked.target.device
        )
        return graph, Glance(look.recipe())

    def _host(
        self,
        kind: str,
        why: str,
        eager: Callable[..., Any],
        *args: Any,
        mistake: BaseException | None = None,
    ) -> Any:
        """As Lightning does it."""
        if mistake is not None:
            output = self._eager(eager, *args)  # which makes the same mistake, as a rule
            self._say(kind, why)
            return output
        self._say(kind, why)
        return self._eager(eager, *args)

    def _eager(self, eager: Callable[..., Any], *args: Any) -> Any:
        """On the tensors where they are, or all in one place: on a GPU, but where a budget is to be
        kept. There they are on the host for that long, and so is what comes of it."""
        target = self._asked.target
        if not target.on_gpu:
            return eager(*args)
        if self._asked.budget is None:  # all that a plan has is there already
            move(tensors_of(self._module), target.device)
            return eager(*args)
        with all_on(self._module, HOST):
            return eager(*move_data_to_device(args, HOST))

    def _say(self, kind: str, why: str) -> None:
        """Once."""
        if kind not in self._said:
            self._said.add(kind)
            target = self._asked.target
            where = "device" if target.on_gpu and self._asked.budget is None else "host"
            rank_zero_warn(
                f"OffloadStrategy {DOING[kind]} on the {where}, without offloading: {why}"
            )


def _check_fast_path(module: torch.nn.Module) -> None:
    """Torch's own attention asks whether it is traced, and takes other kernels then."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for path, part in module.named_modules():
        if isinstance(part, FAST) and not part.training:
            raise CaptureError(
                f"{path} ({type(part).__name__}) has a fast path for evaluation that it does not"
                " take while it is captured, and whose last bits are others. With"
                " torch.backends.mha.set_fastpath_enabled(False) there is one path for both"
            )


@contextmanager
def _apart() -> Iterator[None]:
    """Out of Lightning's inference mode, still without autograd."""
    autograd = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(autograd):
        yield
