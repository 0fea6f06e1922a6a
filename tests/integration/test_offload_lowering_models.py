"""Captured forward and backward passes after every pass over their graphs: eager's bits."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.offload_reference import Reference
from torch import nn
from torch.nn import functional as F

from offload.graph.costs import Costs
from offload.live.function_capture import capture_kernels
from offload.lowering.passes import lower
from offload.lowering.sums import add_in_place
from offload.planning.recompute import find_candidates, recompute_buffers


class Language(nn.Module):
    """A tied embedding, a residual branch, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)
        return F.linear(x, self.embedding.weight).flatten(0, 1)


def pictures() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    module = nn.Sequential(*layers, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 64, 10))
    return module, (torch.randn(4, 3, 12, 12), torch.randint(10, (4,)))


def language() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Language(), (torch.randint(500, (2, 32)), torch.randint(500, (64,)))


def backward(module: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    """Adds to the gradients that are there."""
    loss = F.cross_entropy(module(*batch[:-1]), batch[-1])
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("model", [pictures, language])
def test_after_all_passes_the_bits_are_eagers(
    model: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]],
) -> None:
    torch.manual_seed(0)
    module, batch = model()
    twin = copy.deepcopy(module)
    for p in (*module.parameters(), *twin.parameters()):
        p.grad = torch.ones_like(p)
    graph = capture_kernels(lambda *batch: backward(module, *batch), *batch)
    lowered = lower(add_in_place(graph, nbytes=1 << 10))
    again = recompute_buffers(lowered, [c.buffer for c in find_candidates(lowered, Costs(), 1)])
    again.check()
    assert len(again.tasks) > len(lowered.tasks)
    for made in (graph, lowered, again):
        torch.manual_seed(1)
        found = Reference(made)(*batch)[0]
        torch.manual_seed(1)
        assert torch.equal(found, backward(twin, *batch))
    pairs = zip(module.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)
    assert all(map(torch.equal, module.buffers(), twin.buffers()))


def test_a_tied_gradient_is_added_in_place() -> None:
    module, batch = language()
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    graph = capture_kernels(lambda *batch: backward(module, *batch), *batch)
    changed = add_in_place(graph, nbytes=100 << 10)
    assert len(changed.notes) == 1 + len(graph.notes)
    assert sum(changed.live_bytes()) < sum(graph.live_bytes())
