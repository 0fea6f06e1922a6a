"""Captured steps of real optimizers after every pass: eager's bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offload.graph.costs import Costs
from offload.graph.taskgraph import TaskGraph
from offload.lowering.passes import add_in_place, lower, split_updates
from offload.planning.recompute import variants
from offload.program.kernels import Value
from offload.tracing.capture import traced_training_step as capture_training_step


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


def run(graph: TaskGraph, *batch: torch.Tensor) -> Any:
    """One step in program order, in buffers of its own, then written back."""
    program = graph.program
    memory = [torch.full((b.nbytes,), 0xFF, dtype=torch.uint8) for b in graph.buffers]

    def view(value: Value) -> torch.Tensor:
        raw = memory[value.buffer].untyped_storage()
        return torch.empty(0, dtype=value.dtype).set_(raw, value.offset, value.size, value.stride)

    homes: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    for number, buffer in enumerate(graph.buffers):
        if buffer.persistent:
            source = program.tensors[buffer.tensor]
            tensor = source() if callable(source) else source
            home = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            homes.append(
                (memory[number], home[buffer.start : buffer.start + buffer.nbytes], number)
            )
            memory[number].copy_(homes[-1][1])
    for value, tensor in zip(program.inputs, batch, strict=True):
        view(value).copy_(tensor)
    for task in graph.tasks:
        for b in {*task.writes} - {*task.reads}:
            memory[b].fill_(0xFF)
        for call in task.kernel.calls:
            args, kwargs = call.arguments(view)
            made = pytree.tree_leaves(call.op(*args, **kwargs))
            for value, tensor in zip(call.outputs, made, strict=False):
                if value is not None:
                    view(value).copy_(tensor)
    used = {b for task in graph.tasks for b in task.touches}
    for mine, home, number in homes:
        if number in used:  # A state that was cut into pieces has no user.
            home.copy_(mine)
    for call in program.after_step:
        call()
    return view(program.outputs[0]).clone()


OPTIMIZERS = (
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
)


def lowered(graph: TaskGraph) -> TaskGraph:
    """All passes, with bounds that find work in a small model."""
    return lower(split_updates(add_in_place(graph, nbytes=1 << 10), nbytes=100 << 10))


def most_recomputed(graph: TaskGraph) -> TaskGraph:
    *_, (_, last) = variants(graph, Costs())
    return last


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "adamw", "fused", "adam"])
@pytest.mark.parametrize("model", [pictures, language])
def test_three_steps_after_all_passes_are_eagers_to_the_bit(
    optimizer: Callable[..., Any],
    model: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]],
) -> None:
    left: list[list[torch.Tensor]] = []
    for eager in (True, False):
        torch.manual_seed(0)
        module, batch = model()
        tuned = optimizer(module.parameters())
        losses = []
        graph = None
        if not eager:
            captured = capture_training_step(module, F.cross_entropy, tuned, *batch)
            graph = most_recomputed(lowered(captured))
            graph.check()
        torch.manual_seed(1)
        for _ in range(3):
            if graph is not None:
                losses.append(run(graph, *batch))
                continue
            loss = F.cross_entropy(module(*batch[:-1]), batch[-1])
            tuned.zero_grad()
            loss.backward()
            tuned.step()
            losses.append(loss.detach())
        state = [t for s in tuned.state.values() for t in s.values() if t is not None]
        left.append([*losses, *module.parameters(), *module.buffers(), *state])
    assert len(left[0]) == len(left[1])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_the_state_of_a_large_parameter_is_cut_into_pieces_that_lie_side_by_side() -> None:
    module, batch = language()
    graph = capture_training_step(
        module, F.cross_entropy, torch.optim.AdamW(module.parameters()), *batch
    )
    cut = split_updates(graph, nbytes=200 << 10)
    cut.check()
    chunks = [task for task in cut.tasks if task.name.startswith("embedding.weight.update")]
    assert [task.name[-3:] for task in chunks] == [f"{n}/8" for n in range(1, 9)]
    pieces = [
        b
        for b in cut.buffers[len(graph.buffers) :]
        if b.tensor.endswith("exp_avg.embedding.weight")
    ]
    starts = [b.start for b in pieces]
    assert starts == [sum(b.nbytes for b in pieces[:n]) for n in range(len(pieces))]
    assert all(start % 64 == 0 for start in starts)
    assert sum(b.nbytes for b in pieces) == 500 * 64 * 4
    assert cut.buffers[: len(graph.buffers)] == graph.buffers


def test_a_tied_gradient_is_added_in_place() -> None:
    module, batch = language()
    graph = capture_training_step(
        module, F.cross_entropy, torch.optim.SGD(module.parameters(), lr=0.1), *batch
    )
    changed = add_in_place(graph, nbytes=100 << 10)
    assert len(changed.notes) == 1
    assert sum(changed.live_bytes()) < sum(graph.live_bytes())
