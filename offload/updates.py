"""The optimizer's update as one task a parameter: torch's own kernel on planned addresses.

    (p, g, exp_avg, exp_avg_sq) -> Update(...) -> p, exp_avg, exp_avg_sq       one call a step
    p[a:b] g[a:b] chunk of each state -> the same call                          or one a chunk

Nothing is traced: the learning rate and the other numbers are read from the optimizer's live
`param_groups` when the task runs, and the kernel is the one that `optimizer.step()` would choose.
The step counter stays on the host: every call works on a copy of it, and it advances once a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from offload.errors import CaptureError
from offload.kept import Kept
from offload.kernels import CPU, Call, Value

KNOWN = (SGD, Adam, AdamW)
PIECE = 4096
EXACT = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """`update(p, g, *states)` changes all but `g` in place, element by element."""

    optimizer: Optimizer
    group: int
    """Which of the optimizer's parameter groups."""
    parameter: torch.nn.Parameter
    foreach: bool | None
    states: tuple[str, ...]
    """Keys of `optimizer.state[parameter]`."""
    device: torch.device = CPU
    """Where the step runs. The parameter may be at home elsewhere, and a call of the update may be
    for tensors of the host: it goes by its arguments."""
    elementwise: bool = True
    kept: Kept | None = None
    """The numbers of the step that it belongs to, where it runs in the next one."""

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for two that do the same to tensors of the same shape."""
        return Update, id(self.optimizer), self.group, self.foreach, self.states

    def __call__(self, p: torch.Tensor, g: torch.Tensor, *states: torch.Tensor) -> None:
        self.together([(p, g, *states)], [self.advancing(p)] if self.counts else [])

    def together(
        self, tensors: Sequence[Sequence[torch.Tensor]], counters: Sequence[torch.Tensor]
    ) -> None:
        """This update, and others that are `alike`, in one call. `counters` advance."""
        now = self.numbers()
        function = self._adam if self.counts else self._sgd
        if torch.is_grad_enabled():  # entering `no_grad` costs a tenth of a small update
            with torch.no_grad():
                function(now, tensors, counters)
        else:
            function(now, tensors, counters)

    @property
    def counts(self) -> bool:
        """Whether it has a step counter."""
        return type(self.optimizer) is not SGD

    def numbers(self) -> dict[str, Any]:
        """Of its group: those of today, or of the step that it belongs to."""
        if self.kept is not None:
            return self.kept.group(self.optimizer, self.group)
        return self.optimizer.param_groups[self.group]

    def counter(self) -> torch.Tensor:
        """How many steps there were: the optimizer's own tensor."""
        if self.kept is not None:
            return self.kept.counter(self.parameter)
        return self.optimizer.state[self.parameter]["step"]

    def advancing(self, p: torch.Tensor) -> torch.Tensor:
        """A copy of the counter, to be advanced. Fused kernels read it where the parameter is."""
        counter = self.counter()
        if not self.numbers()["fused"] or counter.device == p.device:
            return counter.clone()
        # Not `to`: it would wait until the device has done all that it was given.
        return torch.full((), counter.item(), dtype=counter.dtype, device=p.device)

    def _sgd(self, now: dict[str, Any], tensors: Sequence[Any], _: Any) -> None:
        p, g, *momentum = zip(*tensors, strict=True)
        sgd(
            [*p],
            [*g],
            [*momentum[0]] if momentum else [None] * len(p),
            has_sparse_grad=False,
            foreach=self.foreach,
            fused=now["fused"],
            weight_decay=now["weight_decay"],
            momentum=now["momentum"],
            lr=now["lr"],
            dampening=now["dampening"],
            nesterov=now["nesterov"],
            maximize=now["maximize"],
        )

    def _adam(self, now: dict[str, Any], tensors: Sequence[Any], counters: Any) -> None:
        beta1, beta2 = now["betas"]
        p, g, average, square, *largest = zip(*tensors, strict=True)
        adam(
            [*p],
            [*g],
            [*average],
            [*square],
            [*largest[0]] if largest else [],
            [*counters],
            foreach=self.foreach,
            fused=now["fused"],
            has_complex=torch.is_complex(p[0]),
            amsgrad=now["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=now["lr"],
            weight_decay=now["weight_decay"],
            eps=now["eps"],
            maximize=now["maximize"],
            decoupled_weight_decay=now["decoupled_weight_decay"],
        )


def update_of(
    optimizer: Optimizer, group: int, parameter: torch.nn.Parameter, device: torch.device = CPU
) -> Update:
    """For a step that runs on `device`, wherever the parameter is now. Its state is there
    afterwards, beside it, as the optimizer itself would have begun it."""
    settings = optimizer.param_groups[group]
    plain = all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in settings["params"])
    chosen = settings["foreach"]
    # Left alone, torch takes its foreach kernels for plain tensors only, and on no CPU. What it
    # would find out at every call is found out once; on a GPU it is left to it, as an update on
    # the host asks for tensors of the CPU.
    plain = plain and device.type != "cpu"
    foreach = chosen if plain or chosen is not None or settings["fused"] is not None else False
    states = begin(optimizer, settings, parameter)
    return Update(optimizer, group, parameter, foreach, states, device)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise `CaptureError` where an optimizer does what an `Update` does not."""
    name = type(optimizer).__name__
    if type(optimizer) not in KNOWN:
        raise CaptureError(
            f"optimizer {name}: only SGD, Adam and AdamW of torch.optim can be captured. Use one"
            " of them, or capture(step) without the update"
        )
    for number, settings in enumerate(optimizer.param_groups):
        for flag in ("capturable", "differentiable"):
            if settings.get(flag):
                raise CaptureError(
                    f"optimizer {name}: group {number} has {flag}=True, which keeps its numbers in"
                    f" tensors of the step. Make it with {flag}=False"
                )
        if settings.get("dampening") and settings["momentum"]:
            for p in settings["params"]:
                if p.requires_grad and optimizer.state.get(p, {}).get("momentum_buffer") is None:
                    raise CaptureError(
                        f"optimizer {name}: group {number} has dampening="
                        f"{settings['dampening']} and no momentum yet, and the first step is"
                        " unlike the others. Take one step with it first, or set dampening=0"
                    )
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(hooks):
        raise CaptureError(
            f"optimizer {name}: it has step hooks, which nothing would call. Remove them, or call"
            " them yourself around the step"
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise CaptureError(f"optimizer {name}: a GradScaler cannot be captured. Use bfloat16")


def advance(optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
    """What `optimizer.step()` does once a step on the host."""

    def after_step() -> None:
        for p in parameters:
            counter = optimizer.state.get(p, {}).get("step")
            if counter is not None:
                counter.add_(1)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # for learning rate schedulers

    return after_step


def begin(
    optimizer: Optimizer, settings: dict[str, Any], parameter: torch.nn.Parameter
) -> tuple[str, ...]:
    """Its state, where it has none; the keys of it."""
    if type(optimizer) is SGD and settings["momentum"] == 0:
        return ()
    state = optimizer.state[parameter]
    if type(optimizer) is SGD:
        if state.get("momentum_buffer") is None:
            # mu * -0.0 + g is g to the bit, as in the first step, where the buffer begins as g.
            state["momentum_buffer"] = torch.zeros_like(parameter).neg_().detach()
        return ("momentum_buffer",)
    keys = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else []))
    if len(state) == 0:
        wide = torch.get_default_dtype() == torch.float64 and not settings["fused"]
        state["step"] = torch.zeros(
            (),
            dtype=torch.float64 if wide else torch.float32,
            device=parameter.device if settings["fused"] else "cpu",
        )
        for key in keys:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    return keys


def sliced(call: Call, start: int, stop: int, states: Sequence[Value]) -> Call:
    """The same update on elements [start, stop) of `p` and `g`, in the order of memory, with
    these pieces of the states."""
    p, g, *_ = call.args
    return replace(call, args=(_flat(p, start, stop), _flat(g, start, stop), *states))


def is_sliceable(call: Call) -> bool:
    """Whether pieces give the bits of the whole: all its tensors are laid out alike, without holes.

    On a CPU the last elements of a thread's share go by another loop than the others, and for half
    precision that one rounds differently: there the pieces would have to be the threads'.
    """
    first, update = call.args[0], call.op
    assert isinstance(update, Update)
    exact = first.dtype in EXACT or update.device.type != "cpu"
    alike = all(value.size == first.size and value.stride == first.stride for value in call.args)
    return exact and alike and _is_dense(first)


def chunk_borders(numel: int, at_most: int) -> list[int]:
    """Where to cut `numel` elements into pieces of about `at_most`: [0, ..., numel].

    Only at multiples of `PIECE`: the fused kernels round the last elements, fewer than a vector,
    differently from the others, so that a piece must end where a vector ends.
    """
    step = max(at_most - at_most % PIECE, PIECE)
    return [*range(0, max(numel, 1), step), numel]


def _flat(value: Value, start: int, stop: int) -> Value:
    return replace(value, size=(stop - start,), stride=(1,), offset=value.offset + start)


def _is_dense(value: Value) -> bool:
    step = 1
    for stride, size in sorted(zip(value.stride, value.size, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return step == prod(value.size)
