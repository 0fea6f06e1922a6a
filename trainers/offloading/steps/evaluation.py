"""Validation, test and prediction steps run as graphs, too: weights are streamed as in training.

    validation_step(batch)   key: method, stage, loader, shapes, Python values  -->  a graph
                             run it without autograd, then make the deferred log and metric calls

    during training   the graph joins the training steps in their runner: one budget, the same homes
    otherwise         a runner of its own, up to the first training step or the end of the run

Lightning is in inference mode here, and tensors that are made in it cannot be trained. So the
arenas and the homes, which stay, are made outside of it; what metrics and loggers keep is made in
it, as in plain Lightning. A step that cannot be captured runs on the host's tensors, which needs no
memory of the device and therefore keeps any budget.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn

from offload import (
    BudgetTooSmall,
    CaptureError,
    Plan,
    Runner,
    TaskGraph,
)
from offload.measuring.fake_answers import Learned
from offload.program.assumptions import Number
from offload.sizes import is_share
from offload.torch_seams import pytree
from offload.tracing.capture import capture, retraced
from offload.tracing.questions import AssumedValues
from trainers.offloading.hardware.devices import all_on, move, tensors_of
from trainers.offloading.steps.answers import Answers
from trainers.offloading.steps.graph_cache import GraphCache
from trainers.offloading.steps.graph_validity import GraphValidity, Retraced
from trainers.offloading.steps.plan_request import PlanRequest
from trainers.offloading.tracing.batch_parts import PLAIN, BatchParts, NamesRead
from trainers.offloading.tracing.closure import CONTEXTS, StepArguments, StepRecipe, TracedStep
from trainers.offloading.tracing.refusals import user_error
from trainers.offloading.tracing.side_effects import DeferredResult
from trainers.offloading.tracing.step_traits import StepTraits

Traced = TypeVar("Traced")
HOST = torch.device("cpu")
FAST = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
DOING = MappingProxyType(
    {"validation_step": "validates", "test_step": "tests", "predict_step": "predicts"}
)


class EvaluationStep(TracedStep):
    """An evaluation step under a tracer: `tensors = step(*tensors)`."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, notes = self._call(tensors)
        for leaf in pytree.tree_leaves(output):
            if not isinstance(leaf, (torch.Tensor, DeferredResult, *PLAIN)):
                raise CaptureError(
                    f"{self._given.kind} returns a {type(leaf).__name__}, which a graph cannot"
                    " return. Return tensors, numbers and text in dicts, lists and tuples"
                )
        return notes.checked()


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationGraph:
    """The graph of an evaluation step. This object is also its key in the runner."""

    validity: GraphValidity
    graph: TaskGraph

    @property
    def recipe(self) -> StepRecipe:
        return self.validity.recipe

    @property
    def assumed(self) -> Sequence[Number]:
        """What the graph assumes of the values that the step asks for."""
        return self.graph.program.assumed


class Evaluation:
    """Captures and runs the evaluation steps of one run of the trainer."""

    def __init__(
        self,
        module: L.LightningModule,
        request: PlanRequest,
        training: Callable[[], Runner | None],
        trained_with: int | None = None,
    ) -> None:
        """`training` returns the runner of the training steps, once there is one. `trained_with`:
        the bytes that their budget came to."""
        self.plan: Plan | None = None
        """The plan of the first step in a runner of its own."""
        self._module = module
        self._is_share = is_share(request.budget)
        self._request = request if trained_with is None else replace(request, budget=trained_with)
        self._training = training
        self._own_runner: Runner | None = None
        self._runner: Runner | None = None
        """The runner that has the graphs: the own one or that of the training steps."""
        self._cache = self._empty_cache()
        self._learned = Learned(request.cache)
        self._answers = Answers()
        self._traits: dict[Any, StepTraits] = {}
        """By method and loader."""
        self._on_host: set[str] = set()
        """The methods of which a step could not be captured."""
        self._warned: set[str] = set()
        self._names: dict[Any, NamesRead] = {}
        """By method and loader: whether its steps read the names in their batches."""

    def step(self, kind: str, eager: Callable[..., Any], *args: Any) -> Any:
        """Return what the module's method `kind` returns. `eager` calls it as Lightning does."""
        if kind in self._on_host:
            return self._eager(eager, *args)
        if (runner := self._current_runner()) is not None and (name := runner.astray()):
            why = (
                f"{name} was pointed to other memory since the last step (p.data = ...), and its"
                " old values must stay as they are. Copy the new values into it"
                " (p.data.copy_(...))"
            )
            return self._run_on_host(kind, why, eager, *args)
        try:
            with _apart():
                given = self._given(kind, *args)
                outputs, recipe = self._answers.settled(lambda: self._run(given))
        except CaptureError as error:
            self._on_host.add(kind)
            return self._run_on_host(kind, str(error), eager, *args, mistake=user_error(error))
        except BudgetTooSmall as error:
            if self._module.trainer.state.fn != TrainerFn.FITTING:
                raise
            self._on_host.add(kind)
            return self._run_on_host(kind, str(error), eager, *args)
        context = getattr(self._module.trainer.precision_plugin, CONTEXTS[kind])
        return recipe.serve(outputs, given.batch.given, context)

    def close(self) -> None:
        """Close the own runner, which gives its tensors memory of their own."""
        self._runner, own, self._own_runner = None, self._own_runner, None
        self._cache = self._empty_cache()
        if own is not None:
            with _apart():
                own.close()

    def abandon(self) -> None:
        """Drop the own runner without touching its device, which is lost."""
        self._runner, own, self._own_runner = None, self._own_runner, None
        if own is not None:
            own.abandon()

    def _current_runner(self) -> Runner | None:
        """Return the runner that has the graphs; None if there is none yet."""
        training = self._training()
        if training is not None and training is not self._runner:
            self.close()
            self._runner = training
        return self._runner

    def _empty_cache(self) -> GraphCache[EvaluationGraph]:
        return GraphCache("the evaluation", self._forget)

    def _forget(self, step: EvaluationGraph) -> None:
        assert self._runner is not None
        self._runner.forget(step)

    def _given(self, kind: str, batch: Any, *more: Any) -> StepArguments:
        method = getattr(self._module, kind)
        if is_param_in_hook_signature(method, "dataloader_iter", explicit=True):
            raise CaptureError(f"{kind} takes the loader's iterator (dataloader_iter)")
        # Lightning decides in this way whether to give batch_idx.
        if more and is_param_in_hook_signature(method, "batch_idx", min_args=2):
            return StepArguments(kind, BatchParts.of(batch), more[0], more[1:])
        return StepArguments(kind, BatchParts.of(batch), None, more)

    def _run(self, given: StepArguments) -> tuple[Sequence[Any], StepRecipe]:
        step = self._step_for(given)
        assert self._runner is not None
        with self._answers.told(step, self._request.target.device):
            outputs = self._runner.run(step, *given.batch.tensors)
        self._cache.ran(step)
        return outputs, step.recipe

    def _step_for(self, given: StepArguments) -> EvaluationGraph:
        state = self._module.trainer.state
        loader = given.kind, given.more, state.stage
        situation = (*loader, state.fn, torch.is_autocast_enabled(self._request.target.device.type))
        names = self._names.setdefault(loader, NamesRead(given.kind))
        batch = names.of(given.batch)
        key = (*situation, batch.key)
        if (known := self._cache.find(key, self._answers.fit)) is not None:
            return known
        if not self._answers.known and (known := self._renewed(key, given, batch)) is not None:
            return known
        surprise = self._answers.surprise
        self._cache.warn_if_many((*situation, given.batch.key), given.batch.loose, loader, surprise)
        graph, step = names.capture(
            given.batch, lambda batch: self._trace(replace(given, batch=batch))
        )
        if self._runner is None:
            self.plan = self._plan_of(graph)
            self._own_runner = self._runner = self._request.target.runner(self.plan, step)
        else:
            self._runner.add(step, graph)
        self._cache.put((*situation, names.of(given.batch).key), step)
        return step

    def _plan_of(self, graph: TaskGraph) -> Plan:
        """Plan an evaluation step. A budget that is a share means a share of a training step, which
        has many large tasks. Here it is raised to what the largest task needs."""
        try:
            return self._request.plan(graph)
        except BudgetTooSmall as error:
            if not self._is_share:
                raise
            return replace(self._request, budget=error.needed).plan(graph)

    def _by_traits(self, given: StepArguments, trace: Callable[[StepArguments], Traced]) -> Traced:
        traits = self._traits.setdefault((given.kind, given.more), StepTraits(gathers=True))
        return traits.trace(lambda: trace(replace(given, traits=traits)))

    def _trace(self, given: StepArguments) -> tuple[TaskGraph, EvaluationGraph]:
        return self._by_traits(given, self._traced_once)

    def _traced_once(self, given: StepArguments) -> tuple[TaskGraph, EvaluationGraph]:
        _check_fast_path(self._module)
        step = EvaluationStep(self._module, given)
        graph = capture(
            step,
            *given.batch.tensors,
            reaches={"": self._module},
            device=self._request.target.device,
            reads=step.reads,
            learned=self._learned,
            assumed=AssumedValues(self._answers.for_capture()),
        )
        _check_inference(graph)
        return graph, EvaluationGraph(GraphValidity(step.recipe(), graph.program.sketch), graph)

    def _renewed(self, key: Any, given: StepArguments, batch: BatchParts) -> EvaluationGraph | None:
        """Return a graph that does what the step does now, although a value has changed."""

        def retrace(given: StepArguments) -> Retraced:
            step = EvaluationStep(self._module, given)
            sketch = retraced(
                step,
                *batch.tensors,
                reads=step.reads,
                learned=self._learned,
                reaches={"": self._module},
                device=self._request.target.device,
                assumed=AssumedValues(),
            )
            return Retraced(sketch, step.recipe())

        loose = replace(given, batch=batch)
        return self._cache.renewed(key, lambda: self._by_traits(loose, retrace))

    def _run_on_host(
        self,
        kind: str,
        why: str,
        eager: Callable[..., Any],
        *args: Any,
        mistake: BaseException | None = None,
    ) -> Any:
        """Run the step as Lightning does, and warn once."""
        if mistake is not None:
            output = self._eager(eager, *args)  # this usually raises the user's own error
            self._warn_once(kind, why)
            return output
        self._warn_once(kind, why)
        return self._eager(eager, *args)

    def _eager(self, eager: Callable[..., Any], *args: Any) -> Any:
        """Run the step eagerly. On a CPU the tensors stay where they are. Otherwise all are on the
        GPU, or on the host if a budget must be kept; then the results are on the host as well."""
        target = self._request.target
        if not target.on_gpu:
            return eager(*args)
        if self._request.budget is None:  # a plan without a budget keeps all tensors there
            move(tensors_of(self._module), target.device)
            return eager(*args)
        with all_on(self._module, HOST):
            return eager(*move_data_to_device(args, HOST))

    def _warn_once(self, kind: str, why: str) -> None:
        """Warn once for each method that its steps are not offloaded."""
        if kind not in self._warned:
            self._warned.add(kind)
            target = self._request.target
            where = "device" if target.on_gpu and self._request.budget is None else "host"
            rank_zero_warn(
                f"OffloadStrategy {DOING[kind]} on the {where}, without offloading: {why}"
            )


def _check_inference(graph: TaskGraph) -> None:
    """Refuse tensors that were made in inference mode, because a runner could not keep them."""
    for name, source in graph.program.tensors.items():
        for tensor in source if isinstance(source, tuple) else (source,):
            if isinstance(tensor, torch.Tensor) and tensor.is_inference():
                raise CaptureError(
                    f"the step reads {name}, which was made in inference mode. Keep what a step"
                    " reads in a buffer, or give the Trainer inference_mode=False"
                )


def _check_fast_path(module: torch.nn.Module) -> None:
    """Refuse torch's own attention layers in evaluation: under a tracer they use other kernels."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for path, part in module.named_modules():
        if isinstance(part, FAST) and not part.training:
            raise CaptureError(
                f"{path} ({type(part).__name__}) has a fast path for evaluation, which it does not"
                " take while it is captured and which rounds differently. Call"
                " torch.backends.mha.set_fastpath_enabled(False), which switches the fast path off"
            )


@contextmanager
def _apart() -> Iterator[None]:
    """Leave Lightning's inference mode, but keep autograd as it is."""
    autograd = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(autograd):
        yield
