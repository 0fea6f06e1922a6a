"""What a graph fixes of an optimizer when it is captured; its other numbers are read at each step.

fixed: which tensors it updates, which kernels it calls, which state it has, its `step` method
read at each step: learning rates, weight decay, betas, a momentum that is not 0
"""

from typing import Any

from torch.optim import Optimizer

from offload.torch_seams import counts_steps

FLAGS = ("foreach", "fused", "amsgrad", "capturable", "differentiable")


def fixed_settings(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return what must be equal for a graph of this optimizer's step to be used again."""
    return (
        type(optimizer),
        vars(optimizer).get("step"),
        tuple(
            [
                (len(group["params"]), *[group.get(flag) for flag in FLAGS], _has_momentum(group))
                for group in optimizer.param_groups
            ]
        ),
    )


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
