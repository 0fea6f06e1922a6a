"""Records one update of a LightningModule for a device that need not be here. Nothing has bytes.

    record_update(module, loader, "cuda:0")
        a copy of the module on `meta` --> Lightning's own fit --> the graphs of its second update

The first update makes the optimizer's states. The module itself is left alone.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.optim import Optimizer

from offload import CaptureError, OffloadError, TaskGraph
from offload.estimating.shadow_session import ShadowSession
from offload.live.session import LiveSession
from trainers.lightning_seams import make_update
from trainers.offloading.devices import drop_results, set_device
from trainers.offloading.planned_strategy import PlannedStrategy
from trainers.offloading.run import StrategyRun
from trainers.one_device import OneDeviceStrategy
from trainers.steps.plan_request import PlanRequest
from trainers.steps.target import Target


class ShadowRun(StrategyRun):
    """A strategy's run whose session is of shadows."""

    def __init__(self, request: PlanRequest, capability: tuple[int, int]) -> None:
        super().__init__(request)
        self._capability = capability

    def open(self, optimizers: Sequence[Optimizer], device: torch.device) -> ShadowSession:
        """Return the session, which is opened once."""
        live = self._open(optimizers, device)
        assert isinstance(live, ShadowSession)
        return live

    def _open(
        self, optimizers: Sequence[Optimizer], device: torch.device, *, runs: bool = True
    ) -> LiveSession:
        del runs

        def create() -> LiveSession:
            self._planner = self.planner_for(self.request)
            return ShadowSession(
                self.module, *optimizers, device=device, capability=self._capability
            )

        return self.session.open(create, optimizers)


class ShadowStrategy(PlannedStrategy, OneDeviceStrategy):
    """Begins and ends steps as `OffloadStrategy` does. The trainer's accelerator is the CPU."""

    strategy_name = "shadow"

    def __init__(
        self,
        device: torch.device | str = "cpu",
        capability: tuple[int, int] = (8, 0),
        **options: Any,
    ) -> None:
        self._device, self._capability = torch.device(device), capability
        super().__init__(**options)

    def _start_run(self, request: PlanRequest) -> None:
        super()._start_run(request)
        self._run = ShadowRun(request, self._capability)
        self._run.connected = self.lightning_module

    def setup_environment(self) -> None:
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision):
            plugin.device = self._device.type
        self._run.request = replace(self._run.request, target=self.find_target())

    def find_target(self) -> Target:
        return Target(self._device, gate=self._run.gate)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Only say where the module is: it is on `meta`, and stays there."""
        set_device(self._run.module, self._device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        own = {*self._run.module.parameters()}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if any(parameter not in own for group in groups for parameter in group["params"]):
            raise OffloadError(
                "an optimizer has parameters that are not the module's, such as those of the module"
                " that was copied for the estimate: make it from self.parameters()"
            )

    def _train_eagerly(self, reason: str) -> None:
        raise CaptureError(f"a step cannot be estimated here: {reason}")

    def teardown(self) -> None:
        """Close the session. There is no tensor to bring back to the host."""
        self._close_for_good()
        if self._run.connected is not None:
            drop_results(self._run.module.trainer)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Only from here on, tensors on the device are made: the session makes them."""
        assert isinstance(self._run, ShadowRun)
        self._root_device = self._device
        return self._run.open(self.optimizers, self._device).without_bytes(batch)

    def take_graphs(self) -> list[TaskGraph]:
        """The graphs of the steps since they were taken last."""
        assert isinstance(self._run.session.live, ShadowSession)
        return self._run.session.live.take_graphs()


class _FitLeft(Exception):
    """Leaves the fit, because its update is recorded."""


class RecordUpdate(L.Callback):
    """Records two updates with the first batch of a fit, and ends it."""

    def __init__(self) -> None:
        self.graphs: list[TaskGraph] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ShadowStrategy)
        for _ in range(2):
            strategy.take_graphs()
            make_update(trainer, batch, batch_idx)
        self.graphs = strategy.take_graphs()
        raise _FitLeft


def record_fit(trainer: L.Trainer, fit: Callable[[], None]) -> list[TaskGraph]:
    """Return the graphs of an update of this fit, whose trainer has a `ShadowStrategy`: one of each
    of its batches, where gradients are accumulated."""
    recorder = RecordUpdate()
    trainer.callbacks.append(recorder)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.loggers = []
    try:
        fit()
    except _FitLeft:
        return recorder.graphs
    raise OffloadError("the loader has no batch, so there is no step to estimate")


def record_update(
    module: L.LightningModule,
    loader: Iterable[Any],
    device: torch.device | str,
    capability: tuple[int, int] = (8, 0),
    options: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> list[TaskGraph]:
    """`options`: of `OffloadStrategy`. `trainer`: arguments of `L.Trainer` that change a step, such
    as `precision`, `accumulate_grad_batches` and `gradient_clip_val`."""
    strategy = ShadowStrategy(device, capability, **(options or {}))
    fit = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        max_epochs=1,
        **trainer,
    )
    first_again = itertools.cycle(itertools.islice(loader, 1))
    return record_fit(fit, lambda: fit.fit(copy_to_meta(module), first_again))


def copy_to_meta(module: L.LightningModule) -> L.LightningModule:
    """A copy of a module on `meta`: none of its weights is copied."""
    tensors = dict.fromkeys((*module.parameters(), *module.buffers()))
    known = {id(tensor): _meta_like(tensor) for tensor in tensors}
    try:
        return copy.deepcopy(module, known)
    except Exception as error:
        raise OffloadError(
            f"{type(module).__name__} cannot be copied, so its step cannot be estimated without"
            f" touching it: {type(error).__name__}: {error}. Make the module anew, within"
            " torch.device('meta')"
        ) from error


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 1 and not isinstance(tensor, torch.nn.Parameter):
        return tensor.clone()  # a counter, whose value the step's code may ask for
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made
