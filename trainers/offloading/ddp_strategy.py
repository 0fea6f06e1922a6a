"""`L.Trainer(devices=2, strategy=OffloadDDPStrategy(budget="8GiB"))` has one plan per rank.

    a step, on every rank    rank 0's buffers | forward | backward | averages | clip | update

It does what torch's DDP does around a module: all ranks start with equal parameters, rank 0's
buffers are sent before the first micro-batch of an update, and gradients are averaged at the end of
the backward pass. All of it is part of the live step, so each rank has plans of its own
(offload/live).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from offload import OffloadError, StepError
from offload.live.collectives import naming_lost_ranks
from offload.live.core import why_no_core
from offload.torch_seams import (
    default_group,
    default_store,
    left_to_each_rank,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shapes,
)
from trainers.lightning_seams import ddp_arguments, has_communication_hook
from trainers.offloading.planned_strategy import PlannedStrategy
from trainers.offloading.ranks import GradientAverages, gather_objects
from trainers.steps.plan_request import PlanRequest
from trainers.steps.target import Target

BROADCAST_BYTES = 250 << 20
"""Torch's DDP sends so many bytes of buffers at once."""
BUCKET_MIB = 25
"""The default of torch's DDP."""
KNOWN = frozenset(
    {
        "broadcast_buffers",
        "bucket_cap_mb",
        "find_unused_parameters",
        "forward_sync_buffers",
        "gradient_as_bucket_view",
        "static_graph",
    }
)
"""The arguments of torch's DDP that a planned step follows or does not need."""


class OffloadDDPStrategy(PlannedStrategy, DDPStrategy):
    """Plans and offloads the steps of several processes, whose Python runs in every step."""

    strategy_name = "offload_ddp"

    def _start_run(self, request: PlanRequest) -> None:
        super()._start_run(request)
        self._refusal = ""
        """Why this fit cannot be planned; the same on all ranks."""
        self._fit_key = ""
        """The key of the store under which a rank reports to the others why it ends."""
        self._sends_buffers = self._are_buffers_due = True
        """Whether rank 0's buffers are sent at all, and before the next forward pass."""
        self._averages: GradientAverages | None = None

    def find_target(self) -> Target:
        target = super().find_target()
        if target.on_gpu:  # a collective on a GPU would cut every step
            raise OffloadError(
                "OffloadDDPStrategy runs on the CPU so far, and the trainer's device is"
                f" {target.device}: give Trainer(accelerator='cpu'), or on one GPU"
                " OffloadStrategy() with devices=1"
            )
        return target

    # ---- one decision ---------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Give all ranks rank 0's values, or wrap the module if this fit cannot be planned."""
        assert self.model is not None
        reports = gather_objects((next(self._reasons(), ""), uuid4().hex))
        refusals = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(reports) if why]
        self._refusal, self._fit_key = "".join(refusals[:1]), reports[0][1]
        if self._refusal:
            self._run.request.check_eager(self._refusal)
            return super().configure_ddp()
        trainable: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        arguments, group = ddp_arguments(self), default_group()
        self._averages = GradientAverages(
            self.model,
            int((arguments.get("bucket_cap_mb") or BUCKET_MIB) * (1 << 20)),
            searches=bool(arguments.get("find_unused_parameters")),
        )
        self._are_buffers_due = True
        at_start = "forward_sync_buffers" in arguments or arguments.get("broadcast_buffers") in (
            None,
            True,
        )
        given = arguments.get("forward_sync_buffers")
        self._sends_buffers = at_start if given is None else given
        verify_param_shapes(group, trainable)
        sync_module_states(self.model, group, BROADCAST_BYTES, 0, {*()}, broadcast_buffers=at_start)

    def _eager_reason(self) -> str:
        return self._refusal or super()._eager_reason()

    def _reasons(self) -> Iterator[str]:
        yield from filter(None, [why_no_core()])
        if unknown := sorted(ddp_arguments(self).keys() - KNOWN):
            yield (
                f"OffloadDDPStrategy does not know the argument {', '.join(unknown)} of torch's"
                " DistributedDataParallel"
            )
        if has_communication_hook(self):
            yield "only torch's own reducer calls a communication hook (ddp_comm_hook)"
        if left_to_each_rank(self._run.module):
            yield (
                "the module excludes some parameters from synchronization"
                " (_ddp_params_and_buffers_to_ignore)"
            )

    def on_exception(self, exception: BaseException) -> None:
        """Report to the other ranks what ends this one. If another rank has failed before, add its
        report to the error."""
        with suppress(RuntimeError):  # rank 0, which keeps the store, may have ended
            if self._fit_key and not isinstance(exception, StepError):
                report = f"rank {self.global_rank}: {type(exception).__name__}: {exception}"
                default_store().set(self._fit_key, report)
            elif self._fit_key and default_store().check([self._fit_key]):
                exception.add_note(default_store().get(self._fit_key).decode())
        super().on_exception(exception)

    # ---- steps ----------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        averages = self._averages
        with super().block_backward_sync():
            if averages is None:
                yield
                return
            averages.blocked = True
            try:
                yield
            finally:
                averages.blocked = False

    def _begin_step(self, name: str, inputs: Any) -> None:
        super()._begin_step(name, inputs)
        if self._averages is None or self._run.module.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._are_buffers_due and self._sends_buffers:
            buffers = [buffer.detach() for buffer in self._run.module.buffers()]
            with torch.no_grad(), naming_lost_ranks(None):
                sync_params_and_buffers(default_group(), buffers, BROADCAST_BYTES, 0)
        self._are_buffers_due = name == "training_step" and not self._averages.blocked
        if name == "training_step":
            self._averages.begin()

    def _close(self) -> None:
        if self._averages is not None:
            self._averages.end()
            self._averages = None
        super()._close()
