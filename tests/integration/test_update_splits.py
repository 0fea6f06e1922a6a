"""The update of one parameter is one task, and that of a large one several: with the same bits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import offload
from offload.lowering import update_splits

X, Y = torch.randn(16, 64), torch.randint(10, (16,))
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"foreach": False}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "fused momentum": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "channels last": (torch.optim.AdamW, {}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 33, 3, padding=1)
        self.wide, self.head = nn.Linear(33 * 4, 203), nn.Linear(203, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x.view(len(x), 16, 2, 2)).flatten(1)
        return self.head(self.wide(x).relu())


def trained(name: str, budget: str | None, device: str = "cpu") -> tuple[list[Any], Any]:
    """The weights and states after four steps, and the plan."""
    torch.manual_seed(0)
    kind, options = OPTIMIZERS[name]
    net, x, y = Net().to(device), X.to(device), Y.to(device)
    if name == "channels last":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer: Any = kind(net.parameters(), lr=1e-2, **options)

    def steps() -> None:
        for _ in range(4):
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    if budget is None:
        steps()
        return [net.state_dict(), optimizer.state_dict()], None
    with offload.within(budget, net, optimizer) as session:
        steps()
        plan = session.plan
    return [net.state_dict(), optimizer.state_dict()], plan


def leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_chunks_have_the_bits_of_whole_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks(name, "cpu", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["foreach", "fused"])
def test_a_gpus_updates_in_chunks_count_a_step_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks(name, "cuda", monkeypatch)


def check_chunks(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_splits, "most_bytes", lambda graph: 64 << 10)
    chunked, plan = trained(name, "75%", device)
    plain, _ = trained(name, None, device)
    assert any("updates are cut into" in note for note in plan.graph.notes)
    for one, other in zip(leaves(chunked), leaves(plain), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_what_updates_one_parameter_is_one_task() -> None:
    _, plan = trained("adamw", "100%")
    updates = [task for task in plan.graph.tasks if task.phase == "update"]
    for name in ("conv.weight", "wide.weight", "head.weight"):
        mine = {b.name for b in plan.graph.buffers if b.tensor.startswith(name)}
        using = [t for t in updates if mine & {plan.graph.buffers[b].name for b in t.touches}]
        assert len(using) == 1, [task.name for task in using]


def test_the_plan_of_a_session_is_that_of_a_step_that_comes_again() -> None:
    _, plan = trained("adamw", "100%")
    made = [call.of_torch for task in plan.graph.tasks for call in task.kernel.calls]
    assert torch.ops.aten.zeros_like.default not in made, "the first step makes the states"
