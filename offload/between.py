"""What comes between backward pass and update: a user's code that looks at `.grad`, and changes it.

    backward -> gradients --into .grad--> after()  .grad.mul_(0.5)   p.grad = None  --> clip, update
                             as backward() leaves them

While a step is traced a gradient has no value, and what is done to it becomes tasks. Every `.grad`
is a tensor of its own, as after `backward()`, and empty again when the trace is over.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offload.errors import CaptureError
from offload.frames import say_frame, user_frame
from offload.tracing import UPDATE, Recorder

Gradient = torch.Tensor | None


@contextmanager
def empty_gradients(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """As at a step's begin. What was there comes back."""
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
    """What `after()` leaves in `.grad`, and what it returns. `returned`: by the step so far."""
    storages = [_storage(t) for t in (*gradients, *returned) if t is not None]
    shared = {key for key in storages if storages.count(key) > 1}
    given = [
        None if g is None else _left_by_backward(recorder, p, g, shared)
        for p, g in zip(parameters, gradients, strict=True)
    ]
    try:
        _assign(parameters, given)
        recorder.phase = UPDATE  # each of them as soon as its gradient is there
        with _Assigning(parameters):
            more = after()
        return [p.grad for p in parameters], more
    finally:
        _assign(parameters, [None] * len(parameters))


def _left_by_backward(
    recorder: Recorder, p: torch.nn.Parameter, g: torch.Tensor, shared: set[int]
) -> torch.Tensor:
    """Laid out as the parameter is, and nobody else's: changed in place it changes nothing else."""
    alike = g.dtype == p.dtype and all(
        a == b for a, b, n in zip(g.stride(), p.stride(), p.size(), strict=True) if n > 1
    )
    if alike and recorder.makes(g) and _storage(g) not in shared:
        return g
    own = torch.empty_strided(p.size(), p.stride(), dtype=p.dtype, device=p.device)
    return own.copy_(g)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _assign(parameters: Sequence[torch.nn.Parameter], gradients: Sequence[Gradient]) -> None:
    with torch._C.DisableTorchFunction():  # what the trace forbids to others
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


class _Assigning(TorchFunctionMode):
    """Lets `.grad` of the optimizer's parameters be assigned, too."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__()
        self._known = {id(p) for p in parameters}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.grad.__set__:  # type: ignore[attr-defined]
            if id(args[0]) not in self._known:
                raise CaptureError(
                    f"{say_frame(user_frame())}: the .grad of a tensor is assigned that is no"
                    " parameter of the optimizer's. Keep such a tensor elsewhere"
                )
            with torch._C.DisableTorchFunction():
                return func(*args)
        return func(*args, **(kwargs or {}))
