"""Copies of an optimizer that have a few of its parameters and share everything else with it.

    optimizer   groups [w1 w2] [b1 b2]     settings, attributes, class
    copy        groups [v]     []          the same ones, read at this moment     v: a view of w1

The copy runs the optimizer's own `step()` on tensors that lie where a plan put them. All groups are
there, and in the same order, because a step may name them by number.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from offload.torch_seams import without_step_hooks

Settings = Mapping[str, Any]


def copy_with(
    optimizer: Optimizer,
    groups: Sequence[Settings],
    parameters: Mapping[int, Sequence[torch.Tensor]],
    state: Mapping[torch.Tensor, dict[str, Any]],
) -> Optimizer:
    """An optimizer of the same class and with the same attributes, which has these parameters.

    `groups`: the settings of all groups; `parameters`: by the number of their group."""
    copy: Any = object.__new__(type(optimizer))
    attributes = dict(vars(optimizer))
    attributes.pop("step", None)  # a learning rate schedule's wrapper: it counts the calls
    attributes["param_groups"] = [
        {**settings, "params": list(parameters.get(number, ()))}
        for number, settings in enumerate(groups)
    ]
    attributes["state"] = defaultdict(dict, state)
    copy.__dict__.update(attributes)
    return copy


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The `step` of the optimizer's class, without the hooks of torch around it."""
    return without_step_hooks(type(optimizer).step)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether `step` is a function of torch.optim, perhaps inherited."""
    return own_step(optimizer).__module__.startswith("torch.optim.")
