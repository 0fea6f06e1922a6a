"""Traces a user's code that reads and changes `.grad` between the backward pass and the update.

    backward -> gradients --into .grad--> after()  .grad.mul_(0.5)   p.grad = None  --> clip, update
                             as backward() leaves them

A gradient has no value while a step is traced; what the code does to it becomes tasks. Every
`.grad` is a tensor of its own, as after `backward()`. All are empty again when the trace is over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offload.errors import CaptureError
from offload.program.frames import say_frame, user_frame
from offload.torch_seams import storage_key
from offload.tracing.recorder import Recorder
from offload.tracing.tape import UPDATE

Gradient = torch.Tensor | None


@contextmanager
def empty_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Empty every `.grad`, as at the beginning of a step, and put the old ones back at the end."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient


def changed_gradients(
    recorder: Recorder,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[Gradient],
    after: Callable[[], Any],
    returned: Sequence[torch.Tensor],
) -> tuple[list[Gradient], Any]:
    """The gradients that `after()` leaves in `.grad`, and what it returns.

    `returned`: the tensors that the step returns so far."""
    storages = [storage_key(t) for t in (*gradients, *returned) if t is not None]
    shared = {key for key in storages if storages.count(key) > 1}
    given = [
        None if g is None else _left_by_backward(recorder, p, g, shared)
        for p, g in zip(parameters, gradients, strict=True)
    ]
    try:
        _assign(parameters, given)
        recorder.phase = UPDATE  # each of these ops may run as soon as its gradient is there
        with _AssignableGradients(parameters):
            more = after()
        return [p.grad for p in parameters], more
    finally:
        _assign(parameters, [None] * len(parameters))


def _left_by_backward(
    recorder: Recorder, p: torch.nn.Parameter, g: torch.Tensor, shared: set[int]
) -> torch.Tensor:
    """The gradient as `backward()` leaves it: laid out like its parameter, in memory of its own."""
    alike = g.dtype == p.dtype and all(
        a == b for a, b, n in zip(g.stride(), p.stride(), p.size(), strict=True) if n > 1
    )
    if alike and recorder.makes(g) and storage_key(g) not in shared:
        return g
    own = torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device=p.device)
    return own.copy_(g)


def _assign(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Gradient]) -> None:
    with torch.DisableTorchFunction():  # the trace forbids everybody else to assign .grad
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


class _AssignableGradients(TorchFunctionMode):
    """Allows code to assign `.grad` of the optimizer's parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.grad.__set__:  # type: ignore[attr-defined]
            if id(args[0]) not in self._known:
                raise CaptureError(
                    f"{say_frame(user_frame())}: the step assigns .grad of a tensor that the"
                    " optimizer does not train. Keep that value in another attribute or a buffer"
                )
            with torch.DisableTorchFunction():
                return func(*args)
        return func(*args, **(kwargs or {}))
