"""What test_live_collectives.py runs in two processes: loops whose steps have collectives in them.

python live_ranks.py FOLDER models      every rank writes what came, by loop, to FOLDER/rankN.json
                            calls
                            others
"""
# pyright: reportArgumentType=false, reportPrivateImportUsage=false

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from support import collective_ranks, gloo_ranks
from support.live_loops import Loop
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from offload.errors import OffloadError
from offload.graph.costs import Costs
from offload.graph.taskgraph import RANKS
from offload.live.session import LiveSession

STEPS = 5


class OfRanks(Loop):
    """Each rank has batches of its own."""

    DEVICE = "cpu"

    def __init__(self) -> None:
        super().__init__(self.DEVICE)
        del self.net.blocks[2:]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.rank = distributed.get_rank()
        torch.manual_seed(self.rank)
        self.batches = [(torch.randn_like(x), y) for x, y in self.batches[:STEPS]]


class Summed(torch.autograd.Function):
    """A sum over all ranks whose gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x, "sum", distributed.group.WORLD) * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return functional.all_reduce(gradients[0], "avg", distributed.group.WORLD) * 1


class TensorParallel(OfRanks):
    """Each rank has a part of every layer."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.net.first(x)
        for block in self.net.blocks:
            hidden = F.gelu(Summed.apply(block(hidden)))
        return F.cross_entropy(self.net.last(hidden), y)


class Wrapped(OfRanks):
    """torch's DDP around the module: it sends statistics, and leaves gradients to the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.parallel.DistributedDataParallel(self.net)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        with self.outer.no_sync():
            loss = F.cross_entropy(self.outer(x), y)
            loss.backward()
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())


class Synced(Wrapped):
    """The same, but it averages the gradients itself."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(self.outer(x), y).backward()


class Pairs(OfRanks):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(collective_ranks.sent(x), y)


class Broadcast(OfRanks):
    """Rank 0's weights and statistics replace the others' in the middle of a step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for tensor in (self.net.first.weight, self.net.norm.running_mean):
            assert tensor is not None
            distributed.broadcast(tensor.detach(), 0)
        return super().loss(x, y)


class Unused(OfRanks):
    """Nobody reads what they make."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x.clone())
        functional.all_reduce(x, "sum", distributed.group.WORLD)
        return super().loss(x, y)


class Branches(OfRanks):
    """A rank goes another way in some steps, with the same collectives."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.rank and self.calls in (2, 4):
            x = x.abs().sqrt()
        everybody = functional.all_gather_tensor(x, 0, distributed.group.WORLD)
        out = super().loss(x + everybody.mean(0), y)
        total = out.detach() * 2
        distributed.all_reduce(total)
        return out * 2 + total if self.rank and self.calls == 3 else out


class ItemBetween(OfRanks):
    """A rank reads a value between two collectives, in every other step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        first = loss.detach() * 1
        distributed.all_reduce(first)
        if self.rank and self.calls % 2:
            self.seen.append(first.item())
        second = first * x.mean()
        distributed.all_reduce(second, distributed.ReduceOp.MAX)
        return loss * second


class Raises(OfRanks):
    """A rank's step raises after it has issued what the other one waits for."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        try:
            super().step(x, y)
        except ValueError:
            self.optimizer.zero_grad()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        everybody = x * 1
        distributed.all_reduce(everybody)
        if self.rank and self.calls == 3:
            raise ValueError("of the user's own")
        return super().loss(x + everybody, y)


class EveryKind(OfRanks):
    """All collectives that there are, one after the other."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        group = distributed.group.WORLD
        for change in collective_ranks.FORWARD.values():
            x = x + 0.1 * change(x)
        one, other = functional.all_reduce_coalesced([x, x * 2], "sum", group)
        whole = functional.all_gather_into_tensor_coalesced([one, other], group)
        halves = functional.reduce_scatter_tensor_coalesced(whole, "sum", [0, 0], group)
        parts = [torch.zeros_like(x) for _ in range(gloo_ranks.WORLD)]
        distributed.gather(x, parts if self.rank == 0 else None, 0)
        distributed.scatter(y * 1, [y * 1, y * 1] if self.rank == 0 else None, 0)
        distributed.reduce_scatter(x := x * 1, parts)
        distributed.reduce_scatter_tensor(x, torch.cat([x, x]))
        return super().loss(x + halves[0].tanh() + whole[0][:8].tanh(), y)


class AsIssued(EveryKind):
    """Something that no plan can have comes after them."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(x + torch._efficientzerotensor(x.shape).clone(), y)


class OfParts(OfRanks):
    """Each rank has a part of every weight."""

    def optimize(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2)

    def result(self) -> list[Any]:
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.seen, *self.net.state_dict().values(), *states]
        return [t.to_local().tolist() if hasattr(t, "to_local") else t.tolist() for t in tensors]


class Sharded(OfParts):
    """By torch's FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (gloo_ranks.WORLD,))
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        self.optimize()


class Parallelized(OfParts):
    """By torch's tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 4))
        mesh = init_device_mesh("cpu", (gloo_ranks.WORLD,))
        kinds = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        self.net: Any = parallelize_module(layers, mesh, kinds)
        self.optimize()


MODELS = (TensorParallel, Wrapped, Sharded, Parallelized)
CALLS = (Broadcast, Unused, Branches, ItemBetween, Raises, EveryKind)
ALONE = (TensorParallel, Branches, EveryKind)
"""Loops that are also run with a session on one of the ranks only."""


def run(loop: Loop, session: LiveSession | None) -> list[Any]:
    with session or nullcontext():
        for x, y in loop.batches:
            with session.step() if session else nullcontext():
                loop.step(x, y)
    return loop.result()


def session_of(loop: Loop, budget: str | None = "100%") -> LiveSession:
    device = "cuda:0" if loop.device == "cuda" else "cpu"
    return LiveSession(loop.net, loop.optimizer, budget=budget, device=device, costs=Costs())


def compared(kind: type[OfRanks], budget: str | None, *, alone: bool = False) -> list[Any]:
    """Whether a loop is equal without us and with us, how many steps ran by a plan, and how many
    tasks of the largest plan are for all ranks."""
    plain = run(kind(), None)
    loop = kind()
    session = session_of(loop, budget)
    found = run(loop, None if alone and loop.rank == 0 else session)
    tasks = () if session.plan is None else session.plan.graph.tasks
    return [found == plain, session.planned_steps, sum(task.lane == RANKS for task in tasks)]


def refused(kind: type[OfRanks], device: str = "") -> str:
    """With which words, at the first step at the latest."""
    loop = kind()
    loop.device = device or loop.device
    try:
        with session_of(loop) as session, session.step():
            loop.step(*loop.batches[0])
    except (RuntimeError, OffloadError) as error:
        return str(error)
    return "it is planned"


def planned(kinds: Sequence[type[OfRanks]]) -> gloo_ranks.Told:
    # Each rank has plans of its own.
    return lambda rank, folder: {
        kind.__name__: compared(kind, "100%" if rank else "90%") for kind in kinds
    }


def others(rank: int, folder: Path) -> dict[str, Any]:
    return {
        "alone": [compared(kind, "100%", alone=True) for kind in ALONE],
        "as issued": compared(AsIssued, "100%"),
        "without a budget": compared(EveryKind, None if rank else "100%"),
        "pairs": refused(Pairs),
        "DDP": refused(Synced),
        "elsewhere": refused(Parallelized, "cuda"),
    }


if __name__ == "__main__":
    told = {"models": planned(MODELS), "calls": planned(CALLS), "others": others}
    gloo_ranks.main(told[sys.argv[2]])
