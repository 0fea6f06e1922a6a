"""`L.Trainer(devices=2, strategy=LiveOffloadDDPStrategy(budget="8GiB"))` has one plan per rank.

    a step, on every rank    rank 0's buffers | forward | backward | averages | clip | update

It does what torch's DDP does around a module: all ranks start with equal parameters, rank 0's
buffers are sent before the first micro-batch of an update, and gradients are averaged at the end of
the backward pass. All of it is part of the live step, so each rank has plans of its own
(offload/live). It is on the way to be `OffloadDDPStrategy` (docs/decisions/0041).
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any
from uuid import uuid4

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed

from offload import OffloadError, StepError
from offload.live.core import why_no_core
from offload.torch_seams import (
    at_end_of_backward,
    default_group,
    default_store,
    left_to_each_rank,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shapes,
)
from offload.tracing.collectives import together
from offload.tracing.ranks import Parameter, Ranks
from trainers.lightning_seams import ddp_arguments, has_communication_hook
from trainers.offloading.ddp_strategy import BROADCAST_BYTES, BUCKET_MIB, KNOWN
from trainers.offloading.hardware.target import Target
from trainers.offloading.live_fit import LiveFit


class LiveOffloadDDPStrategy(LiveFit, DDPStrategy):
    """Plans and offloads the steps of several processes, whose Python runs in every step."""

    strategy_name = "offload_ddp_live"

    def _begin(self) -> None:
        super()._begin()
        self._refusal = ""
        """Why this fit has no live steps; the same on all ranks."""
        self._fit = ""
        """A name of this fit, under which a rank tells the others why it ends."""
        self._sends_buffers = self._buffers_due = True
        """Whether rank 0's buffers are sent at all, and before the next forward pass."""
        self._blocked = False
        """Whether this micro-batch is not the last of its update."""
        self._is_queued = False
        """Whether gradients are averaged at the end of this backward pass."""
        self._hooks: list[Any] = []
        self._changed: dict[Parameter, None] = {}
        """The parameters whose gradients have changed since they were averaged."""

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
        """Give all ranks rank 0's values, or wrap the module if there are no live steps."""
        assert self.model is not None
        everybody = self._gather((next(self._reasons(), ""), uuid4().hex))
        said = [f"rank {rank}: {why}" for rank, (why, _) in enumerate(everybody) if why]
        self._refusal, self._fit = "".join(said[:1]), everybody[0][1]
        self._buffers_due, self._blocked, self._changed = True, False, {}
        if self._refusal:
            self._request.check_eager(self._refusal)
            return super().configure_ddp()
        trainable: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        asked, group = ddp_arguments(self), default_group()
        at_start = "forward_sync_buffers" in asked or asked.get("broadcast_buffers") in (None, True)
        given = asked.get("forward_sync_buffers")
        self._sends_buffers = at_start if given is None else given
        verify_param_shapes(group, trainable)
        sync_module_states(self.model, group, BROADCAST_BYTES, 0, {*()}, broadcast_buffers=at_start)

    def _why_not(self) -> str:
        return self._refusal or super()._why_not()

    def _reasons(self) -> Iterator[str]:
        yield from filter(None, [why_no_core()])
        if unknown := sorted(ddp_arguments(self).keys() - KNOWN):
            yield (
                f"OffloadDDPStrategy does not know the argument {', '.join(unknown)} of torch's"
                " DistributedDataParallel"
            )
        if has_communication_hook(self):
            yield "only torch's own reducer calls a communication hook (ddp_comm_hook)"
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

    def on_exception(self, exception: BaseException) -> None:
        """Tell the others what ends this rank. Where it is another one, say what that one told."""
        with suppress(RuntimeError):  # rank 0, who keeps the store, may have ended
            if self._fit and not isinstance(exception, StepError):
                said = f"rank {self.global_rank}: {type(exception).__name__}: {exception}"
                default_store().set(self._fit, said)
            elif self._fit and default_store().check([self._fit]):
                exception.add_note(default_store().get(self._fit).decode())
        super().on_exception(exception)

    # ---- gradients ------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._blocked = True
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._blocked = False

    def _begin_step(self, name: str, given: Any) -> None:
        super()._begin_step(name, given)
        if self._eager or self._module.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._buffers_due:
            self._send_buffers()
        if name == "training_step":
            self._buffers_due, self._is_queued = not self._blocked, False
            self._unhook()
            for parameter in filter(lambda p: p.requires_grad, self._module.parameters()):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))

    def _close(self) -> None:
        self._unhook()
        super()._close()

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, parameter: Any) -> None:
        if not self._blocked and not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._average)
        self._changed[parameter] = None

    def _average(self) -> None:
        self._is_queued = False
        changed, self._changed = self._changed, {}
        names = {p: name for name, p in self._module.named_parameters()}
        if ddp_arguments(self).get("find_unused_parameters"):  # one rank may have used others
            used = {*chain(*self._gather([names[p] for p in changed]))}
            for p in [p for p, name in names.items() if name in used and p not in changed]:
                p.grad, changed[p] = torch.zeros_like(p), None
        mib = ddp_arguments(self).get("bucket_cap_mb") or BUCKET_MIB
        ranks = Ranks(self.world_size, tuple(names), int(mib * (1 << 20)))
        with torch.no_grad():
            ranks.average({p: p.grad for p in changed if p.grad is not None}, names)

    def _send_buffers(self) -> None:
        """Send rank 0's buffers to all."""
        self._buffers_due = False
        buffers = [buffer.detach() for buffer in self._module.buffers()]
        if buffers and self._sends_buffers:
            with torch.no_grad(), together(None):
                sync_params_and_buffers(default_group(), buffers, BROADCAST_BYTES, 0)
