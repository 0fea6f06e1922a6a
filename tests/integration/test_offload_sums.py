"""One peer of many: groups of micro-batches and single ones fill sums, a step of its own updates.

deal        group of K, group of K, single ...  -> sums -> totals -> update        one runner
reference   backward() of each, .grad.div(N), clip_grad_norm_, optimizer.step()    plain torch
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from products import every_value
from torch import nn
from torch.nn import functional

import offload
from offload import BudgetTooSmall, Clip, Runner, TaskGraph
from offload.tracing.recorder import Recorder

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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(3)]
        blocks[-1].inner.weight = blocks[0].inner.weight
        self.module = nn.Sequential(*blocks)
        self.module.register_parameter("unused", nn.Parameter(torch.ones(3)))
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters())
        torch.manual_seed(1)
        self.data = [
            [(torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(sum(deal))]
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


def eager(optimizer: str, clip: Clip | None) -> list[Any]:
    """The losses and the state after each global step."""
    one, found = Trained(optimizer), []
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
            p.grad = p.grad.div(COUNT + step)
        if clip is not None and clip.by == "norm":
            nn.utils.clip_grad_norm_(used, clip.limit)
        elif clip is not None:
            nn.utils.clip_grad_value_(used, clip.limit)
        one.optimizer.step()
        found.append(one.state())
    return found


class Peer(Trained):
    """A module, and all graphs that a peer ever needs."""

    def __init__(self, optimizer: str, clip: Clip | None) -> None:
        super().__init__(optimizer)
        self.sums: dict[Any, torch.Tensor] = {}
        first, more = self.captured(True), self.captured(False)
        self.totals = {p: torch.zeros_like(total) for p, total in self.sums.items()}
        self.draws = [torch.Generator() for _ in range(K)]
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
        assert runner.run("update", torch.tensor(COUNT + step)) == ()
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


@pytest.mark.parametrize(
    "optimizer, clip, share, engine, where",
    every_value(
        [*OPTIMIZERS], [*CLIPS], [None, 0.6, 0.0], ["threads", "serial"], ["device", "host"]
    ),
)
def test_a_peer_has_the_bits_of_plain_accumulation(
    optimizer: str, clip: str, share: float | None, engine: str, where: str
) -> None:
    expected = eager(optimizer, CLIPS[clip])
    peer = Peer(optimizer, CLIPS[clip])
    found: list[Any] = []
    with peer.runner(share, engine, optimizer=where) as runner:
        for step in range(len(DEALS)):
            found += peer.global_step(runner, step)
    assert_equal(found, expected)


def test_another_deal_captures_nothing_and_moves_no_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Peer("adamw", Clip(0.005))
    made: list[str] = []
    monkeypatch.setattr(Recorder, "run", noting(made, "capture", Recorder.run))
    with peer.runner(0.5) as runner:
        monkeypatch.setattr(offload.Plan, "replan", noting(made, "plan", offload.Plan.replan))
        peer.global_step(runner, 0)
        homes = addresses(peer)
        for step in range(1, len(DEALS)):
            peer.global_step(runner, step)
            assert addresses(peer) == homes
    assert made == []


def noting(made: list[str], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(what)
        return function(*args, **kwargs)

    return noted


def addresses(peer: Peer) -> list[int]:
    states = [t for state in peer.optimizer.state.values() for t in state.values() if t.dim()]
    tensors = [*peer.module.parameters(), *peer.module.buffers(), *states]
    return [t.data_ptr() for t in (*tensors, *peer.sums.values(), *peer.totals.values())]
