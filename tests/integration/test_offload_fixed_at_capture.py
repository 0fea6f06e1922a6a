"""A captured graph is static: a runner refuses to run once something has changed, by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import StepError

SCALE = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
        self.cfg = {"beta": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.cfg["beta"] * SCALE


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


def patch_step(optimizer: Any) -> None:
    optimizer.step = lambda closure=None: None


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "eval": (lambda net, _: net.eval(), "training is False after True"),
    "frozen": (lambda net, _: net.layers[0].weight.requires_grad_(False), "requires_grad"),
    "a dropout's p": (lambda net, _: setattr(net.layers[1], "p", 0.1), r"p is 0\.1 after 0\.5"),
    "a hook": (
        lambda net, _: net.layers[0].register_forward_hook(lambda *_: None),
        "_forward_hooks",
    ),
    "a gradient's hook": (
        lambda net, _: net.layers[0].weight.register_hook(lambda g: g * 2),
        "the hooks of tensors",
    ),
    "a submodule": (lambda net, _: net.layers.append(nn.ReLU()), "_modules"),
    "a submodule, replaced": (
        lambda net, _: net.layers.__setitem__(1, nn.Identity()),
        r"Dropout|_modules\['1'\]|layers\.1",
    ),
    "a value in a dict": (lambda net, _: net.cfg.update(beta=0.1), r"beta'\] is 0\.1 after 0\.5"),
    "a global": (lambda net, _: set_scale(0.25), r"SCALE is 0\.25 after 0\.5"),
    "momentum": (
        lambda _, optimizer: optimizer.param_groups[0].update(momentum=0.9),
        "the optimizer",
    ),
    "a patched step": (lambda _, optimizer: patch_step(optimizer), "the optimizer"),
    "another group": (
        lambda _, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "the optimizer",
    ),
    "the default dtype": (
        lambda *_: torch.set_default_dtype(torch.float64),
        "torch's settings",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_fixed_at_capture_may_not_change(name: str) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    batch = torch.randn(2, 4), torch.tensor([0, 1])
    loss = nn.functional.cross_entropy
    graph = offload.capture_training_step(net, loss, optimizer, *batch)
    change, said = CHANGES[name]
    with offload.Runner(offload.plan(graph)) as runner:
        runner(*batch)
        optimizer.param_groups[0].update(lr=0.05, weight_decay=0.1)  # read in every step
        runner(*batch)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        try:
            change(net, optimizer)
            with pytest.raises(StepError, match=said) as refused:
                runner(*batch)
        finally:
            set_scale(0.5)
            torch.set_default_dtype(torch.float32)
        assert "Capture it again" in str(refused.value)
        after = net.state_dict()
        assert all(torch.equal(value, after[key]) for key, value in before.items())
