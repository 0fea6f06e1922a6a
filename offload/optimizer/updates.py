"""The optimizer's update as one task a parameter, run by torch's own kernel.

    (p, g, exp_avg, exp_avg_sq) -> Update(...) -> p, exp_avg, exp_avg_sq       one call a step
    p[a:b] g[a:b] chunk of each state -> the same call                          or one call a chunk

Nothing is traced. The task reads the learning rate and the other numbers from the optimizer's live
`param_groups`, and calls the kernel that `optimizer.step()` would choose. The step counter stays on
the host: every call works on a copy of it, and it advances once a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from offload.errors import CaptureError
from offload.optimizer.fixed_settings import KNOWN, is_patched
from offload.optimizer.step_study import StepStudy
from offload.optimizer.step_updates import StepUpdate
from offload.program.kernels import CPU, Call, Value
from offload.torch_seams import has_step_hooks, mark_stepped

PIECE = 4096
EXACT = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """`update(p, g, *states)` changes all but `g` in place, element by element; some kernels change
    `g`, too."""

    optimizer: Optimizer
    group: int
    """Number of the optimizer's parameter group."""
    parameter: torch.nn.Parameter
    foreach: bool | None
    states: tuple[str, ...]
    """Keys of `optimizer.state[parameter]`."""
    device: torch.device = CPU
    """Where the step runs. The parameter may live elsewhere, and the update may be called with
    tensors of the host: it uses the device of its arguments."""
    elementwise: bool = True
    ahead: int = 0
    """How often the optimizer has stepped before in the same captured step."""

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for two updates that do the same to tensors of the same shape."""
        return Update, id(self.optimizer), self.group, self.foreach, self.states

    def __call__(self, p: torch.Tensor, g: torch.Tensor, *states: torch.Tensor) -> None:
        self.together([(p, g, *states)], [self.advancing(p)] if self.counts else [])

    def together(
        self, tensors: Sequence[Sequence[torch.Tensor]], counters: Sequence[torch.Tensor]
    ) -> None:
        """Run this update and others that are `alike` in one call, and advance the `counters`."""
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

    @property
    def changes_gradient(self) -> bool:
        """Whether the kernel adds the momentum to the gradient itself: torch's of many tensors for
        Nesterov's momentum, where it has made no copy of it."""
        now = self.numbers()
        of_many = self.foreach or (self.foreach is None and self.device.type == "cuda")
        return bool(
            of_many and not self.counts and now["nesterov"] and not now["fused"]
            and not now["weight_decay"] and not now["maximize"]
        )  # fmt: skip

    def numbers(self) -> dict[str, Any]:
        """The present settings of its group."""
        return self.optimizer.param_groups[self.group]

    def counter(self) -> torch.Tensor:
        """The tensor that counts steps: the optimizer's own, or a new one that is `ahead` of it."""
        counter = self.optimizer.state[self.parameter]["step"]
        return counter + self.ahead if self.ahead else counter

    def advancing(self, p: torch.Tensor) -> torch.Tensor:
        """A copy of the counter for the kernel to advance, on the parameter's device if it is
        fused."""
        counter = self.counter()
        if not self.numbers()["fused"] or counter.device == p.device:
            return counter.clone()
        # `to` would wait until the device has done all its work.
        return torch.full((), counter.item(), dtype=counter.dtype, device=p.device)

    def _sgd(self, now: dict[str, Any], tensors: Sequence[Any], _: Any) -> None:
        p, g, *momentum = zip(*tensors, strict=True)
        sgd(
            [*p],
            [*g],
            [*momentum[0]] if momentum else [None] * len(p),
            has_sparse_grad=False,
            foreach=self.changes_gradient or self.foreach,  # on the host, too
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
    """The update of a parameter in a step that runs on `device`, wherever the parameter is now.

    It also makes the state that the optimizer would make at its first step, beside the
    parameter."""
    settings = optimizer.param_groups[group]
    plain = all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in settings["params"])
    chosen = settings["foreach"]
    # By default torch uses its foreach kernels for plain tensors only, and never on a CPU. It finds
    # that out at every call; here it is found out once. On a GPU torch still decides, because an
    # update on the host is called with tensors of the CPU.
    plain = plain and device.type != "cpu"
    foreach = chosen if plain or chosen is not None or settings["fused"] is not None else False
    states = begin(optimizer, settings, parameter)
    return Update(optimizer, group, parameter, foreach, states, device)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise `CaptureError` if an optimizer does something that a captured step would not do."""
    check_settings(optimizer)
    if any(
        runs_its_step(optimizer, settings, p)
        for settings in optimizer.param_groups
        for p in settings["params"]
    ):
        StepStudy(optimizer).check()


def check_settings(optimizer: Optimizer) -> None:
    """Raise `CaptureError` for flags, hooks and replaced methods; the step itself is not looked
    at."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise CaptureError(
            f"optimizer {name}: its step calls its closure several times, and a captured step runs"
            " it once. Use another optimizer, or capture(step) and update outside of it"
        )
    for number, settings in enumerate(optimizer.param_groups):
        for flag in ("capturable", "differentiable"):
            if settings.get(flag):
                raise CaptureError(
                    f"optimizer {name}: group {number} has {flag}=True, which moves numbers of the"
                    f" optimizer into the traced step. Make it with {flag}=False"
                )
    if is_patched(optimizer):
        raise CaptureError(
            f"optimizer {name}: its step method was replaced, and a captured step never calls it."
            " Do in a hook what the new method does besides"
        )
    if has_step_hooks(optimizer):
        raise CaptureError(
            f"optimizer {name} has step hooks, and a captured step never calls them. Remove them,"
            " or call them yourself around the step"
        )
    if getattr(optimizer, "grad_scale", None) is not None:
        raise CaptureError(f"optimizer {name}: a GradScaler cannot be captured. Use bfloat16")


def runs_its_step(
    optimizer: Optimizer, settings: dict[str, Any], parameter: torch.nn.Parameter
) -> bool:
    """Whether the optimizer's own `step()` makes the update of a parameter, not a kernel that is
    known here: that of SGD with dampening begins otherwise."""
    if type(optimizer) not in KNOWN:
        return True
    if type(optimizer) is not SGD or not (settings["momentum"] and settings["dampening"]):
        return False
    return optimizer.state.get(parameter, {}).get("momentum_buffer") is None


def advance(optimizer: Optimizer, parameters: Sequence[torch.nn.Parameter]) -> Callable[[], None]:
    """A function that does what `optimizer.step()` does once a step on the host."""

    def after_step() -> None:
        for p in parameters:
            counter = optimizer.state.get(p, {}).get("step")
            if counter is not None:
                counter.add_(1)
        mark_stepped(optimizer)  # for learning rate schedulers

    return after_step


def begin(
    optimizer: Optimizer, settings: dict[str, Any], parameter: torch.nn.Parameter
) -> tuple[str, ...]:
    """Make a parameter's state if it has none. Returns the keys of the state."""
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
    """The same update on elements [start, stop) of `p` and `g`, in the order of memory, with these
    pieces of the states."""
    p, g, *_ = call.args
    return replace(call, args=(_flat(p, start, stop), _flat(g, start, stop), *states))


def is_sliceable(call: Call) -> bool:
    """Whether updating piece by piece gives the bits of the whole update.

    All its tensors must have one layout without holes. And a CPU rounds half precision differently
    in the loop for the last elements of each thread's share, so there the pieces would have to be
    the threads' shares."""
    first, update = call.args[0], call.op
    assert isinstance(update, Update | StepUpdate)
    exact = first.dtype in EXACT or update.device.type != "cpu"
    alike = all(value.size == first.size and value.stride == first.stride for value in call.args)
    return exact and alike and _is_dense(first)


def chunk_borders(numel: int, at_most: int) -> list[int]:
    """Where to cut `numel` elements into pieces of about `at_most`: [0, ..., numel].

    Cuts lie at multiples of `PIECE`. The fused kernels round the last elements, those that fill no
    whole vector, differently from the others, so every piece must end where a vector ends.
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
