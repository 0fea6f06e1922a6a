"""Two trainings on one stage, each going on in the tails of the other: bits of plain PyTorch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from support import offload_models as models
from support import offload_training as training
from support import stage_jobs as jobs
from torch import nn

import offload
from offload.live.core import why_no_core
from offload.planning.host_tails import host_tail
from offload.running.runner import Runner

LONG = 60.0


@pytest.fixture(autouse=True)
def core() -> None:
    if why := why_no_core():
        pytest.skip(why)


def trained(wide: int, drop: float) -> training.Training:
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, wide), nn.ReLU(), nn.Dropout(drop), nn.Linear(wide, wide), nn.ReLU(),
            nn.Linear(wide, 4),
        )  # fmt: skip

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), foreach=False)

    def batch() -> models.Batch:
        return torch.randn(8, 16), torch.randn(8, 4)

    return training.trained(models.Case(net, adamw, batch, nn.functional.mse_loss))


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


@contextmanager
def in_turns(baton: Baton, name: int, runner: Runner) -> Iterator[None]:
    runner.tails = Turns(baton, name)
    yield
    runner.tails = None


def test_two_trainings_that_go_on_in_each_others_tails_are_plain_pytorchs() -> None:
    found = [trained(48, 0.0), trained(64, 0.5)]
    baton, wrong = Baton(), []

    def train(name: int, stage: jobs.Stage) -> None:
        own, whole = found[name], offload.plan(found[name].graph, optimizer="host")
        plan = offload.plan(own.graph, whole.smallest_bytes, optimizer="host")
        assert host_tail(plan.memgraph)
        try:
            baton.take(name)
            with own.stepping(
                plan, partial(in_turns, baton, name), stage=stage, poison=True
            ) as step_of:
                for step, batch in enumerate(own.batches):
                    training.rated(own.optimizer, step)
                    torch.manual_seed(step)
                    loss, *_ = step_of(*batch)
                    assert torch.equal(loss, own.losses[step]), step
                assert host_tail(step_of.planner.plans[-1].memgraph)
            own.compare()
        except BaseException as error:
            wrong.append(error)
        baton.give(name)

    with jobs.stage("threads") as stage:
        threads = [threading.Thread(target=train, args=(name, stage)) for name in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LONG)
        assert not wrong
        assert baton.given == 2 * training.STEPS + 2
