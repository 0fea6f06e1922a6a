"""A peer that fills sums by groups of micro-batches and single ones, and updates by a step of its
own; and what plain torch makes of the same batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import offload
from offload import BudgetTooSmall, Clip, Runner, TaskGraph

WIDTH, K, COUNT = 160, 3, 7
DEALS = ((K, K, 1), (K, 1, 1, 1), (1, K), (1, 1, 1), (K, K, 1))
"""What the peer does in each global step: groups of `K` micro-batches, and single ones."""
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.02),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.02, fused=True),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
}
CLIPS = {"norm": Clip(0.005), "value": Clip(2e-4, "value"), "none": None}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(self.inner(x).relu()))


class Trained:
    """Statistics, random numbers, a weight that is used twice, one that no gradient reaches."""

    def __init__(self, optimizer: str, device: str = "cpu") -> None:
        self.device = device
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        blocks[-1].inner.weight = blocks[0].inner.weight
        self.module = nn.Sequential(*blocks)
        self.module.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.module.to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        torch.manual_seed(1)
        self.data = [
            [
                (torch.randn(8, WIDTH).to(device), torch.randn(8, WIDTH).to(device))
                for _ in range(sum(deal))
            ]
            for deal in DEALS
        ]

    def begin(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.8 + 0.1 * step

    def state(self) -> dict[str, torch.Tensor]:
        found = dict(self.module.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number} {key}": t for key, t in state.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def seed(step: int, number: int) -> int:
    return 1000 * step + number


def number_of(count: int, device: str) -> Any:
    """What a total is divided by. A GPU that is given a plain number multiplies by 1 / number."""
    return count if device == "cpu" else torch.tensor(count, device=device)


def eager(optimizer: str, clip: Clip | None, device: str = "cpu") -> list[Any]:
    """The losses and the state after each global step."""
    one, found = Trained(optimizer, device), []
    for step, data in enumerate(one.data):
        one.begin(step)
        one.optimizer.zero_grad()
        for number, (x, y) in enumerate(data):
            torch.manual_seed(seed(step, number))
            loss = functional.mse_loss(one.module(x), y)
            loss.backward()
            found.append(loss.detach())
        used = [p for p in one.module.parameters() if p.grad is not None]
        for p in used:
            assert p.grad is not None
            p.grad = p.grad.div(number_of(COUNT + step, device))
        if clip is not None and clip.by == "norm":
            nn.utils.clip_grad_norm_(used, clip.limit)
        elif clip is not None:
            nn.utils.clip_grad_value_(used, clip.limit)
        one.optimizer.step()
        found.append(one.state())
    return found


class Peer(Trained):
    """A module, and all graphs that a peer ever needs."""

    def __init__(self, optimizer: str, clip: Clip | None, device: str = "cpu") -> None:
        super().__init__(optimizer, device)
        self.sums: dict[Any, torch.Tensor] = {}
        first, more = self.captured(True), self.captured(False)
        self.totals = {p: torch.zeros_like(total) for p, total in self.sums.items()}
        self.draws = [torch.Generator(device) for _ in range(K)]
        self.graphs: dict[Any, TaskGraph] = {
            (K, True): offload.in_turn([first, *[more] * (K - 1)], self.draws),
            (K, False): offload.in_turn([more] * K, self.draws),
            (1, True): first,
            (1, False): more,
            "update": offload.capture_update_step(self.module, self.optimizer, self.totals, clip),
        }

    def captured(self, first: bool) -> TaskGraph:
        batch = self.data[0][0]
        return offload.capture_micro_batch(
            self.module, functional.mse_loss, self.optimizer, self.sums, *batch, first=first
        )

    def runner(self, share: float | None, engine: str = "threads", **more: Any) -> Runner:
        main, *others = self.graphs.values()
        main = offload.beside(main, *others)
        budget = None
        if share is not None:
            whole = offload.plan(main, **more)
            least = max(needed(graph, **more) for graph in (main, *others))
            budget = max(least, int(whole.peak_bytes * share) + whole.reserve)
        plan = offload.plan(main, budget, **more)
        runner = Runner(plan, engine, "random", 5, poison=True, key=(K, True))
        for key, graph in [*self.graphs.items()][1:]:
            runner.add(key, graph)
        return runner

    def global_step(self, runner: Runner, step: int) -> list[Any]:
        found: list[Any] = []
        self.begin(step)
        done = 0
        for size in DEALS[step]:
            batch = self.data[step][done : done + size]
            if size == 1:
                torch.manual_seed(seed(step, done))
            else:
                for number, generator in enumerate(self.draws):
                    generator.manual_seed(seed(step, done + number))
            found += runner.run((size, done == 0), *(t for pair in batch for t in pair))
            done += size
        for p, total in self.totals.items():
            total.copy_(self.sums[p])
        before = [total.clone() for total in self.totals.values()]
        assert runner.run("update", torch.tensor(COUNT + step, dtype=torch.float64)) == ()
        after = self.totals.values()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return [*found, self.state()]


def needed(graph: TaskGraph, **more: Any) -> int:
    """The smallest budget. It is one byte where the host does all the work of an update."""
    try:
        offload.plan(graph, 1, **more)
    except BudgetTooSmall as refused:
        return refused.needed
    return 1


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, torch.Tensor):
            assert torch.equal(a, b), n
            continue
        assert a.keys() == b.keys()
        assert [name for name in b if not torch.equal(a[name], b[name])] == [], n
