"""Two trainings on one stage, each going on in the tails of the other: bits of plain PyTorch."""

import copy
import threading
from dataclasses import dataclass
from typing import Any

import torch
from support import stage_jobs as jobs
from torch import nn

import offload
from offload.planning.host_tails import host_tail
from offload.running.runner import Runner

STEPS = 5
LONG = 60.0


@dataclass
class Trained:
    module: nn.Module
    optimizer: torch.optim.Optimizer
    plan: offload.Plan
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    losses: list[torch.Tensor]
    end: dict[str, Any]

    def step(self, runner: Runner, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
        torch.manual_seed(number)
        [loss] = runner(*self.batches[number])
        assert torch.equal(loss, self.losses[number]), number

    def is_right(self) -> bool:
        found = states(self.module, self.optimizer)
        return found.keys() == self.end.keys() and all(
            torch.equal(found[name], self.end[name]) for name in found
        )


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: t.clone() for name, t in module.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{key}": torch.as_tensor(t).clone() for key, t in state.items()}
    return found


def trained(seed: int, wide: int, drop: float) -> Trained:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(16, wide), nn.ReLU(), nn.Dropout(drop), nn.Linear(wide, wide), nn.ReLU(),
        nn.Linear(wide, 4),
    )  # fmt: skip
    twin = copy.deepcopy(module)
    optimizer, plain = (torch.optim.AdamW(m.parameters(), foreach=False) for m in (module, twin))
    batches = [(torch.randn(8, 16), torch.randn(8, 4)) for _ in range(STEPS)]
    losses = []
    for number, (x, y) in enumerate(batches):
        plain.param_groups[0]["lr"] = 1e-3 / (1 + number)
        torch.manual_seed(number)
        plain.zero_grad()
        loss = nn.functional.mse_loss(twin(x), y)
        loss.backward()
        plain.step()
        losses.append(loss.detach())
    graph = offload.capture_training_step(module, nn.functional.mse_loss, optimizer, *batches[0])
    whole = offload.plan(graph, optimizer="host")
    plan = offload.plan(graph, whole.smallest_bytes, optimizer="host")
    assert host_tail(plan.memgraph)
    return Trained(module, optimizer, plan, batches, losses, states(twin, plain))


class Baton:
    """One job at a time; whoever gives it away lets the other one in first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder = 0
        self.given = 0

    def take(self, name: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._holder == name, LONG)

    def give(self, name: int) -> None:
        with self._changed:
            assert self._holder == name
            self._holder, self.given = 1 - name, self.given + 1
            self._changed.notify_all()


class Turns:
    def __init__(self, baton: Baton, name: int) -> None:
        self.baton, self.name = baton, name

    def on_tail(self) -> None:
        self.baton.give(self.name)

    def tail_over(self) -> None:
        self.baton.take(self.name)


def test_two_trainings_that_go_on_in_each_others_tails_are_plain_pytorchs() -> None:
    found = [trained(1, 48, 0.0), trained(2, 64, 0.5)]
    baton, wrong = Baton(), []

    def train(name: int, runner: Runner) -> None:
        try:
            baton.take(name)
            runner.tails = Turns(baton, name)
            for number in range(STEPS):
                found[name].step(runner, number)
        except BaseException as error:
            wrong.append(error)
        baton.give(name)

    with jobs.stage("threads") as stage:
        runners = [Runner(one.plan, stage=stage, poison=True) for one in found]
        threads = [threading.Thread(target=train, args=given) for given in enumerate(runners)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
        assert not wrong and baton.given == 2 * STEPS + 2
        for runner in runners:
            runner.close()
    assert [one.is_right() for one in found] == [True, True]
