"""`L.Trainer(devices=2, strategy=OffloadDDPStrategy(budget="8GiB"))` makes one plan per rank.

    rank 0   backward ..... share | all-reduce | clip  update        one graph, planned for
    rank 1   backward .. share    | all-reduce | clip  update        this rank alone (offload/ranks)

This strategy does what torch's DDP does around a step: all ranks start with equal parameters, and
rank 0's buffers are sent before the first micro-batch of an update. The DDP wrapper itself holds
all gradients a second time, so it is only made for a run that trains eagerly: that run is plain
DDP.

Either all ranks plan or all train eagerly. They agree on it before the first step and never
afterwards: a later batch that one rank cannot plan ends the run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offload import CaptureError, OffloadError, Plan
from offload.torch_seams import (
    default_group,
    left_to_each_rank,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shapes,
)
from offload.tracing.ranks import Ranks, contents_of, difference, together
from offload.tracing.training import parameters_of
from trainers.lightning_seams import ddp_arguments, has_communication_hook
from trainers.offloading.hardware.target import Target
from trainers.offloading.planned_fit import PlannedFit
from trainers.offloading.steps.micro_batch import MicroBatch, StepGraph
from trainers.offloading.tracing.batch_parts import BatchParts

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
"""The arguments of torch's DDP that a planned step obeys or does not need."""


class OffloadDDPStrategy(PlannedFit, DDPStrategy):
    """Plans and offloads the steps of several processes, each on a device of its own."""

    strategy_name = "offload_ddp"

    def _reset(self) -> None:
        super()._reset()
        self._agreed = False
        """Whether every rank has planned the first step."""
        self._buffers_due = True
        """Whether rank 0's buffers are sent before the next forward pass, as torch's DDP does."""
        self._blocked = False
        """Whether this micro-batch is not the last of its update."""

    # ---- what Lightning calls -------------------------------------------------------------------

    def find_target(self) -> Target:
        target = super().find_target()
        if (
            target.on_gpu
        ):  # its buckets and all-reduces are those of the CPU (offload/tracing/ranks.py)
            raise OffloadError(
                "OffloadDDPStrategy runs on the CPU so far, and the trainer's device is"
                f" {target.device}: give Trainer(accelerator='cpu'), or on one GPU"
                " OffloadStrategy() with devices=1"
            )
        return target

    def configure_ddp(self) -> None:
        """Give all ranks rank 0's values. The first step decides whether the module is wrapped."""
        assert self.model is not None
        trainable: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        verify_param_shapes(default_group(), trainable)
        sync_module_states(
            self.model,
            default_group(),
            BROADCAST_BYTES,
            0,
            {*()},
            broadcast_buffers=self._sends_at_start,
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Surround a micro-batch that is not the last. The run may become an eager one inside it,
        so the wrapper that is made then is told here to synchronize again."""
        self._blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._blocked = False
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_planned():
            self._send_buffers()
            self._buffers_due = not self._blocked
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._expected is not None and not self._blocked:
            found = [p for _, p in parameters_of(self.optimizers[0])]
            with torch.no_grad():
                self._ranks().average({p: p.grad for p in found if p.grad is not None})
        return loss

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._send_buffers()
        return super().validation_step(*args, **kwargs)

    # ---- buffers --------------------------------------------------------------------------------

    @property
    def _sends_at_start(self) -> bool:
        given = ddp_arguments(self).get("broadcast_buffers")
        return "forward_sync_buffers" in ddp_arguments(self) or given is None or given

    @property
    def _sends_buffers(self) -> bool:
        given = ddp_arguments(self).get("forward_sync_buffers")
        return self._sends_at_start if given is None else given

    def _send_buffers(self) -> None:
        """Send rank 0's buffers to all, as the DDP wrapper does. If there is a wrapper, it does."""
        if isinstance(self.model, DistributedDataParallel) or not self._buffers_due:
            return
        self._buffers_due = False
        buffers = [buffer.detach() for buffer in self._module.buffers()]
        if buffers and self._sends_buffers:
            with torch.no_grad(), together(None):
                sync_params_and_buffers(default_group(), buffers, BROADCAST_BYTES, 0)

    # ---- one decision ---------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        mib = ddp_arguments(self).get("bucket_cap_mb") or BUCKET_MIB
        return Ranks(self.world_size, tuple(self._module.parameters()), int(mib * (1 << 20)))

    def _why_not(self) -> str:
        why = super()._why_not() or next(self._reasons(), "")
        return _first(self._gather(why))

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        raise OffloadError(
            "OffloadDDPStrategy has no plan before the first step, because all ranks make their"
            " plans together there: read strategy.plan after it"
        )

    def _reasons(self) -> Iterator[str]:
        if unknown := sorted(ddp_arguments(self).keys() - KNOWN):
            yield (
                f"OffloadDDPStrategy does not know the argument {', '.join(unknown)} of torch's"
                " DistributedDataParallel"
            )
        if has_communication_hook(self):
            yield "only torch's own reducer calls a communication hook (ddp_comm_hook)"
        for name, part in self._module.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                yield f"{name} is a SyncBatchNorm, which talks to the other ranks inside the step"
        if left_to_each_rank(self._module):
            yield (
                "the module excludes some parameters from synchronization"
                " (_ddp_params_and_buffers_to_ignore)"
            )

    def _gather(self, mine: Any) -> list[Any]:
        """Collect `mine` of every rank, in the order of the ranks."""
        everybody: list[Any] = [None] * self.world_size
        distributed.all_gather_object(everybody, mine)
        return everybody

    def _capture(self, micro: MicroBatch) -> tuple[BatchParts, StepGraph]:
        if not self._agreed:
            found = self._capture_first(lambda: super(OffloadDDPStrategy, self)._capture(micro))
            self._agreed = True
            return found
        try:
            return super()._capture(micro)
        except CaptureError as error:
            raise OffloadError(
                f"rank {self.global_rank} cannot plan this batch, although it planned the first"
                f" one: {error}. The other ranks go on with their plans, so this rank cannot train"
                " eagerly alone, and the run ends. Change what is named, or give"
                " DDPStrategy() in place of OffloadDDPStrategy()"
            ) from error

    def _capture_first(
        self, plan: Callable[[], tuple[BatchParts, StepGraph]]
    ) -> tuple[BatchParts, StepGraph]:
        """Make the first plan. An error of one rank becomes the same error on all ranks."""
        try:
            found = plan()
        except CaptureError as error:
            self._stop(self._gather((f"{error}", ())), error)
            raise
        except Exception as error:
            self._gather((f"{FATAL}{type(error).__name__}: {error}", ()))
            raise
        assert self._steps is not None and self._steps.plan is not None
        everybody = self._gather(("", contents_of(self._steps.plan.graph)))
        self._stop(everybody)
        if why := difference([contents for _, contents in everybody]):
            raise CaptureError(why)
        return found

    def _stop(
        self, everybody: list[tuple[str, tuple[str, ...]]], error: CaptureError | None = None
    ) -> None:
        said = [why for why, _ in everybody]
        fatal = [line.removeprefix(FATAL) if line.startswith(FATAL) else "" for line in said]
        if why := _first(fatal):
            raise OffloadError(f"the first step cannot be planned: {why}") from error
        if error is None and (why := _first(said)):
            raise CaptureError(why)

    def _begin_eager(self) -> None:
        super()._begin_eager()
        if isinstance(self.model, L.LightningModule):
            super().configure_ddp()
            assert isinstance(self.model, DistributedDataParallel)
            self.model.require_backward_grad_sync = not self._blocked


FATAL = "! "
"""This prefix marks an error after which no rank trains, not even eagerly."""


def _first(said: list[str]) -> str:
    return next((f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")
