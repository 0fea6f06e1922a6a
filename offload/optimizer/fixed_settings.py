"""What a graph fixes of an optimizer when it is captured; its other numbers are read at each step.

fixed: which tensors it updates, which kernels it calls, which state it has, its `step` method
read at each step: learning rates, weight decay, betas, a momentum that is not 0
"""

from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from offload.torch_seams import counts_steps

KNOWN = (SGD, Adam, AdamW)
"""Optimizers whose kernels are known here; the `step()` of any other runs as it is."""
UNREAD = ("params", "initial_lr")
"""What is in a group and is read by no step: a learning rate schedule adds the latter."""
FLAGS = ("foreach", "fused", "amsgrad", "capturable", "differentiable")


def fixed_settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return what must be equal for a graph of this optimizer's step to be used again."""
    return (
        type(optimizer),
        vars(optimizer).get("step"),
        tuple(
            [
                (
                    len(group["params"]),
                    *[group.get(flag) for flag in FLAGS],
                    _has_momentum(group),
                    *([] if type(optimizer) in KNOWN else _branches(group)),
                )
                for group in optimizer.param_groups
            ]
        ),
    )


def _branches(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the `step()` of any optimizer may branch on: flags, names, and which numbers are 0."""
    return [(key, _branch(key, value)) for key, value in group.items() if key not in UNREAD]


def _branch(key: str, value: Any) -> Any:
    if isinstance(value, bool | str | None):
        return value
    # A schedule may begin with a learning rate of 0.
    return value != 0 if isinstance(value, int | float) and key != "lr" else type(value)


def _has_momentum(group: dict[str, Any]) -> bool:
    return bool(group.get("momentum"))


def is_patched(optimizer: Optimizer) -> bool:
    """Whether somebody has replaced `optimizer.step`. A learning rate schedule's wrapper around the
    class's own method, which only counts the calls, is no replacement."""
    step = vars(optimizer).get("step")
    while step is not None and counts_steps(step):
        step = getattr(step, "__wrapped__", None)
    own = getattr(type(optimizer), "step", None)
    return step is not None and getattr(step, "__func__", step) is not own
