"""`L.Trainer(devices=2, strategy=OffloadDDPStrategy(budget="8GiB"))`: one plan a rank.

    rank 0   backward ..... share | all-reduce | clip  update        one graph, planned for
    rank 1   backward .. share    | all-reduce | clip  update        this rank alone (offload/ranks)

What torch's DDP does around a step is done here: equal parameters at the start, rank 0's buffers
before the first micro-batch of an update. Its wrapper, whose reducer holds all gradients once more,
is only made for a run that trains eagerly, and such a run is plain DDP.

All ranks plan, or all train eagerly: they ask each other before the first step. Later nobody asks:
a batch that one rank cannot plan ends the run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed
from torch.distributed.utils import (
    _sync_module_states,
    _sync_params_and_buffers,
    _verify_param_shape_across_processes,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offload import CaptureError, OffloadError, Plan
from offload.ranks import Ranks, contents_of, difference, together
from offload.training import parameters_of
from trainers.closure import Batch
from trainers.planned import Planned
from trainers.steps import Micro, Step
from trainers.target import Target

BROADCAST_BYTES = 250 << 20
"""Of buffers that torch's DDP sends at once."""
BUCKET_MIB = 25
"""Torch's own."""
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
"""Arguments of torch's DDP that a planned step keeps, or has no need of."""


class OffloadDDPStrategy(Planned, DDPStrategy):
    """On one device of each of several processes."""

    strategy_name = "offload_ddp"

    def _begin(self) -> None:
        super()._begin()
        self._agreed = False
        """Every rank could plan the first step."""
        self._buffers_due = True
        """As torch's DDP keeps it: rank 0's buffers are sent before the next forward pass."""
        self._blocked = False

    # ---- what Lightning calls -------------------------------------------------------------------

    def find_target(self) -> Target:
        target = super().find_target()
        if target.on_gpu:  # its buckets and all-reduces are those of the CPU (offload/ranks.py)
            raise OffloadError(
                "OffloadDDPStrategy runs on the CPU so far, and the trainer's device is"
                f" {target.device}: give Trainer(accelerator='cpu'), or on one GPU"
                " OffloadStrategy() with devices=1"
            )
        return target

    def configure_ddp(self) -> None:
        """All ranks begin with rank 0's values. Wrapped or not is known at the first step."""
        assert self.model is not None
        trainable: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        _verify_param_shape_across_processes(_group(), trainable)
        _sync_module_states(
            self.model, _group(), BROADCAST_BYTES, 0, {*()}, broadcast_buffers=self._sends_at_start
        )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around a micro-batch that is not the last, in the middle of which a run may turn out to
        be an eager one."""
        self._blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._blocked = False
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._planned():
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
        given = self._ddp_kwargs.get("broadcast_buffers")
        return "forward_sync_buffers" in self._ddp_kwargs or given is None or given

    @property
    def _sends_buffers(self) -> bool:
        given = self._ddp_kwargs.get("forward_sync_buffers")
        return self._sends_at_start if given is None else given

    def _send_buffers(self) -> None:
        """Rank 0's, as the wrapper does it; if it is there, it does it."""
        if isinstance(self.model, DistributedDataParallel) or not self._buffers_due:
            return
        self._buffers_due = False
        buffers = [buffer.detach() for buffer in self._module.buffers()]
        if buffers and self._sends_buffers:
            with torch.no_grad(), together(None):
                _sync_params_and_buffers(_group(), buffers, BROADCAST_BYTES, 0)

    # ---- one decision ---------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        mib = self._ddp_kwargs.get("bucket_cap_mb") or BUCKET_MIB
        return Ranks(self.world_size, tuple(self._module.parameters()), int(mib * (1 << 20)))

    def _why_not(self) -> str:
        why = super()._why_not() or next(self._reasons(), "")
        return _first(self._told(why))

    def plan_for(self, batch: Any, batch_idx: int = 0) -> Plan | None:
        raise OffloadError(
            "several ranks make their plans together, at the first step: ask for strategy.plan then"
        )

    def _reasons(self) -> Iterator[str]:
        if unknown := sorted(self._ddp_kwargs.keys() - KNOWN):
            yield f"{', '.join(unknown)} of torch's DistributedDataParallel is not known here"
        if self._ddp_comm_hook or self._ddp_comm_wrapper or self._ddp_comm_state:
            yield "a communication hook (ddp_comm_hook) is called by torch's reducer only"
        for name, part in self._module.named_modules():
            if isinstance(part, torch.nn.SyncBatchNorm):
                yield f"{name} is a SyncBatchNorm, which talks to the other ranks inside the step"
        if getattr(self._module, "_ddp_params_and_buffers_to_ignore", None):
            yield "some parameters are left to each rank (_ddp_params_and_buffers_to_ignore)"

    def _told(self, mine: Any) -> list[Any]:
        """What every rank has to say."""
        everybody: list[Any] = [None] * self.world_size
        distributed.all_gather_object(everybody, mine)
        return everybody

    def _captured(self, micro: Micro) -> tuple[Batch, Step]:
        if not self._agreed:
            found = self._together(lambda: super(OffloadDDPStrategy, self)._captured(micro))
            self._agreed = True
            return found
        try:
            return super()._captured(micro)
        except CaptureError as error:
            raise OffloadError(
                f"rank {self.global_rank} cannot plan this batch, and the first one it could:"
                f" {error}. The other ranks do not know, so this one cannot go on without a plan"
            ) from error

    def _together(self, plan: Callable[[], tuple[Batch, Step]]) -> tuple[Batch, Step]:
        """The first plan: what stops one rank stops all, and in the same way."""
        try:
            found = plan()
        except CaptureError as error:
            self._stop(self._told((f"{error}", ())), error)
            raise
        except Exception as error:
            self._told((f"{FATAL}{type(error).__name__}: {error}", ()))
            raise
        assert self._steps is not None and self._steps.plan is not None
        everybody = self._told(("", contents_of(self._steps.plan.graph)))
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
            raise OffloadError(f"another rank cannot go on: {why}") from error
        if error is None and (why := _first(said)):
            raise CaptureError(why)

    def _begin_eager(self) -> None:
        super()._begin_eager()
        if isinstance(self.model, L.LightningModule):
            super().configure_ddp()
            assert isinstance(self.model, DistributedDataParallel)
            self.model.require_backward_grad_sync = not self._blocked


FATAL = "! "


def _first(said: list[str]) -> str:
    return next((f"rank {rank}: {why}" for rank, why in enumerate(said) if why), "")


def _group() -> Any:
    return distributed.distributed_c10d._get_default_group()
