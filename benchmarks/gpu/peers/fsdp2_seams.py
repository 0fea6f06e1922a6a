"""FSDP2 with one rank whose copies run ahead of the compute, which torch's own do not.

With one rank torch copies a block's weights where they are waited for, on the stream that computes
(`FSDPParamGroup.wait_for_unshard`), so no copy is hidden behind work (pytorch issue 178861). Here
they begin where torch says that a block is to come, on a stream of their own:

    compute   | block i        | wait | block i+1
    copies    | block i+1 ->          |            begun before block i's kernels were queued

The only names that torch does not document are those of this module.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import alloc_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


@contextmanager
def copies_ahead(device: str) -> Iterator[None]:
    """While it lasts, every module that is sharded over one rank copies in this way."""
    ours = _Copies(device)
    theirs = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def unshard(self: FSDPParamGroup, async_op: bool = False) -> None:
        assert not async_op, "with one rank nobody asks for this"
        ours.begin(self)

    def wait_for_unshard(self: FSDPParamGroup) -> None:
        ours.finish(self)

    FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard = unshard, wait_for_unshard
    try:
        yield
    finally:
        FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard = theirs


class _Copies:
    def __init__(self, device: str) -> None:
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        self.begun: dict[int, Any] = {}
        """The event after its copies (None: on a CPU), by the id of a group."""

    def begin(self, group: Any) -> None:
        if id(group) in self.begun or group.is_unsharded:
            return
        if not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD:
            return
        # The place is taken on the stream that computes, and may be in use by what is queued there.
        for parameter in group.fsdp_params:
            given = parameter._sharded_param_data
            parameter.init_all_gather_outputs([given.numel()], [given.dtype], 1, group.device)
            alloc_storage(parameter.all_gather_outputs[0])
        event = None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with self._on_stream():
            for parameter in group.fsdp_params:
                place = parameter.all_gather_outputs[0]
                with _unsafe_preserve_version_counter(place):
                    place.copy_(parameter._sharded_param_data, non_blocking=True)
            if self.stream is not None:
                event = self.stream.record_event()
        self.begun[id(group)] = event

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def finish(self, group: Any) -> None:
        if id(group) not in self.begun:
            return
        event = self.begun.pop(id(group))
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param()
        group._to_unsharded()
