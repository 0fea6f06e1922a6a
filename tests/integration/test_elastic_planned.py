"""A peer whose lanes and updates run as plans has the bits of one without a budget.

one peer with a budget   =   one peer without: logs, weights, optimizer state, digests of commits
two peers, one of each kind, a kill, a newcomer  =  their replay without a budget
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.elastic_swarms import HEARTBEAT, assert_exact, by_step, fault, hold
from support.planned_peer import CLIPS, Classifier, alone, assert_equal, replayed

from benchmarks.swarms.swarm import Nursery, Process, Swarm
from offload import BudgetTooSmall

pytestmark = [pytest.mark.filterwarnings("ignore")]


# ---- one peer -----------------------------------------------------------------------------------


def least(out: Path, **more: Any) -> int:
    """Return the smallest budget. The refusals of smaller ones name what a lane needs, and what the
    update does if that is more."""
    nbytes, refused = 64, True
    while refused:
        try:
            alone(out, nbytes, 1, **more)
            refused = False
        except BudgetTooSmall as error:
            assert "raise the budget to" in str(error) and error.needed > nbytes
            nbytes = error.needed
    assert nbytes > 64
    return nbytes


@pytest.mark.parametrize(
    "optimizer, clip, budget",
    [("sgd", "norm", "70%"), ("adamw", "value", "100%"), ("adamw", "norm", "least")],
)
def test_a_peer_with_a_budget_has_the_bits_of_one_without(
    optimizer: str, clip: str, budget: str, tmp_path: Path
) -> None:
    more = {"optimizer": optimizer, **CLIPS[clip]}
    nbytes: Any = least(tmp_path / "refused", **more) if budget == "least" else budget
    plain = alone(tmp_path / "plain", None, **more)
    planned = alone(tmp_path / "planned", nbytes, **more)
    assert_equal(planned, plain)
    assert planned.digests == plain.digests
    assert any("val_loss" in logs for logs in plain.watch.logs)


class ChannelsLast(Classifier):
    """Its convolutions keep their channels together, as those of our picture models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Unflatten(1, (2, 2, 2)), torch.nn.Conv2d(2, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.Flatten(), torch.nn.Linear(128, 4),
        ).to(memory_format=torch.channels_last)  # fmt: skip


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_weights_with_channels_last_have_the_same_sums_with_a_budget(
    clip: str, tmp_path: Path
) -> None:
    more = {"module": ChannelsLast(), **CLIPS[clip]}
    assert any(not p.is_contiguous() for p in more["module"].parameters())
    plain = alone(tmp_path / "plain", None, 4, **more)
    planned = alone(tmp_path / "planned", "80%", 4, **more | {"module": ChannelsLast()})
    assert planned.digests == plain.digests
    assert_equal(planned, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_peer_with_a_gpu_and_a_budget_has_the_bits_of_one_without(
    optimizer: str, tmp_path: Path
) -> None:
    more = {"optimizer": optimizer, "accelerator": "gpu", "device": "cuda:0", **CLIPS["norm"]}
    plain = alone(tmp_path / "plain", None, **more)
    planned = alone(tmp_path / "planned", "100%", **more)
    assert planned.digests == plain.digests
    assert planned.watch.logs == plain.watch.logs
    for a, b in zip(planned.watch.states, plain.watch.states, strict=True):
        assert [name for name in a if not torch.equal(a[name].cpu(), b[name].cpu())] == []


def test_exact_sums_and_a_replay_have_the_same_bits_with_a_budget(tmp_path: Path) -> None:
    plain = alone(tmp_path / "plain", None, sum="exact")
    planned = alone(tmp_path / "planned", "60%", sum="exact")
    assert_equal(planned, plain)
    assert planned.digests == plain.digests
    log = tmp_path / "plain" / "elastic" / "one.jsonl"
    again = replayed(tmp_path / "again", [log], "60%")
    assert again.strategy.replayed.compared == len(plain.digests)
    assert_equal(again, plain)


def test_a_checkpoint_of_a_peer_with_a_budget_goes_on_without_and_the_other_way(
    tmp_path: Path,
) -> None:
    whole = alone(tmp_path / "whole", None, 6)
    for first, then in (("60%", None), (None, "60%")):
        folder = tmp_path / f"{first}"
        begun = alone(folder, first, 4)
        path = folder / "four.ckpt"
        begun.trainer.save_checkpoint(path)
        goes_on = alone(tmp_path / f"{first} {then}", then, 6, checkpoint=path)
        for name, tensor in goes_on.watch.states[-1].items():
            assert torch.equal(tensor, whole.watch.states[-1][name]), name


# ---- what outside code does ----------------------------------------------------------------------


class ReadsGradients(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack([g.norm() for g in found]).norm().item())


class ReadsItsLoss(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        return {"loss": found["loss"] * (2.0 if found["loss"].item() > 1.2 else 1.0)}


class Halved(Classifier):
    """Half of its weights are nobody's."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[0].parameters(), 0.1)


class DrawsByItself(Classifier):
    """It has a generator of its own, and draws on the host, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        noise = torch.rand(inputs.shape, generator=self.dice) * torch.rand(1).item()
        scale = random.random() + np.random.rand()
        return super().training_step((inputs * scale + noise, labels), batch_idx)


@pytest.mark.parametrize("kind", [ReadsGradients, ReadsItsLoss, Halved, DrawsByItself])
def test_what_python_does_in_a_step_is_done_in_every_lane(
    kind: type[Classifier], tmp_path: Path
) -> None:
    plain = alone(tmp_path / "plain", None, 4, module=kind())
    planned = alone(tmp_path / "planned", "80%", 4, module=kind())
    assert planned.digests == plain.digests
    assert_equal(planned, plain)


class Mistaken(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("the user's own")


def test_the_error_of_a_users_own_code_comes_through(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="the user's own"):
        alone(tmp_path, "60%", 2, module=Mistaken())


# ---- several peers ------------------------------------------------------------------------------

STEPS = 24
MIXED = {"val": True, "trainer": {"val_check_interval": 4}}
PLANNED = {**MIXED, "steps": STEPS, "strategy": {"budget": "60%"}}


@pytest.fixture(scope="module")
def mixed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[Process]:
    """Two begin, one of them with a budget; the other one is killed in the middle of a reduce; one
    with a budget comes. Then their replay, without one."""
    begin = hold(0, 2)
    with Swarm(tmp_path_factory.mktemp("mixed"), nursery, heartbeat=HEARTBEAT) as swarm:
        # Nobody gives its state away right after a validation, which is at every fourth step.
        stays = swarm.peer("a", **PLANNED, faults=[begin, hold(9, 2)])
        dies = [begin, fault("kill", "mid_reduce", 5, members=2)]
        killed = swarm.peer("b", **MIXED, steps=STEPS, faults=dies)
        killed.wait()
        comes = swarm.peer("c", **PLANNED)
        assert [peer.result()["error"] for peer in (stays, comes)] == ["", ""]
        replay = swarm.replay([stays, killed, comes], steps=STEPS, **MIXED)
        assert replay.result()["error"] == ""
    return swarm.peers


def test_peers_with_and_without_a_budget_have_equal_weights(mixed: list[Process]) -> None:
    stays, killed, comes, replay = map(by_step, mixed)
    assert sorted(stays) == sorted(replay) == list(range(1, STEPS + 1))
    assert stays == replay
    for other in (killed, comes):
        assert other
        assert other == {step: stays[step] for step in other}
    assert mixed[3].result()["compared"] == STEPS
    assert_exact(mixed[:3], STEPS)
