"""Updates that run while the next forward pass does, against eager PyTorch, bit by bit."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_edits import with_task
from products import every_pair
from support.fake_gpu import only_on_a_fake_gpu
from torch import nn
from torch.nn import functional

import offload
from offload import Costs, Runner, StepError, TaskGraph
from offload.lowering.passes import host_updates
from offload.lowering.rotation import Rotation, rotated, updates_of
from offload.plans.plan import Plan
from offload.running.rotated_step import RotatedStep
from offload.tracing.capture import capture_step
from offload.tracing.training import Clip, TrainingStep

WIDTH, DEPTH, STEPS = 32, 4, 6
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, weight_decay=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "sgd": lambda groups: torch.optim.SGD(groups),
    "tensor rate": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False),
}
CLIPS = {"": None, "norm": Clip(0.5), "value": Clip(0.01, "value")}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))


class Twins:
    """A network in a runner, and the same one trained by eager PyTorch."""

    def __init__(self, make: Make, clip: Clip | None, where: str, device: str = "cpu") -> None:
        self.clip, self.model = clip, network().to(device)
        self.plain = copy.deepcopy(self.model)
        self.optimizer, self.oracle = (make(self.groups(m)) for m in (self.model, self.plain))
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (
                torch.randn(16, WIDTH, generator=generator).to(device),
                torch.randint(0, 4, (16,)).to(device),
            )
            for _ in range(STEPS)
        ]
        graph = capture_step(self.step(), *self.batches[0])
        self.graph = host_updates(graph, Costs(), where)

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        large = [p for p in model.parameters() if p.dim() > 1]
        small = [p for p in model.parameters() if p.dim() < 2]
        return [{"params": large, "lr": 0.1}, {"params": small, "lr": 0.01}]

    def step(self) -> TrainingStep:
        def forward(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return functional.cross_entropy(self.model(x), y), ()

        return TrainingStep(forward, self.optimizer, {"": self.model}, clip=self.clip)

    def eagerly(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.oracle.zero_grad()
        loss = functional.cross_entropy(self.plain(x), y)
        loss.backward()
        parameters = [p for group in self.oracle.param_groups for p in group["params"]]
        if self.clip is not None and self.clip.by == "norm":
            nn.utils.clip_grad_norm_(parameters, self.clip.limit)
        elif self.clip is not None:
            nn.utils.clip_grad_value_(parameters, self.clip.limit)
        self.oracle.step()
        return loss.detach()

    def next_rates(self, step: int) -> None:
        """What a scheduler and a callback do between two steps."""
        for optimizer in (self.optimizer, self.oracle):
            for number, group in enumerate(optimizer.param_groups):
                rate = 0.1 / (step + 2) / (number + 1)
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
                if "betas" in group:
                    group["betas"] = (0.9 - 0.01 * step, 0.99)
                group["weight_decay"] = 0.01 * step

    def differing(self) -> list[str]:
        found, right = (_named(m, o) for m, o in self.sides())
        assert found.keys() == right.keys()
        return [name for name, tensor in found.items() if not torch.equal(tensor, right[name])]

    def sides(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        yield self.model, self.optimizer
        yield self.plain, self.oracle

    def rotation(self, every: int = 1) -> Rotation:
        updates = sorted(updates_of(self.graph))
        found = rotated(self.graph, updates[::every])
        assert found is not None
        return found


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{number}.{key}"] = value
    return found


def planned(graph: TaskGraph) -> Plan:
    """A bit more than the smallest budget: most of it is streamed."""
    with pytest.raises(offload.BudgetTooSmall) as refused:
        offload.plan(graph, 1)
    return offload.plan(graph, refused.value.needed * 2, recompute=False)


@pytest.mark.parametrize(
    "where, clip, optimizer", every_pair(["host", "device"], CLIPS, OPTIMIZERS)
)
def test_late_updates_give_eagers_bits_with_the_numbers_of_their_own_step(
    optimizer: str, clip: str, where: str
) -> None:
    twins = Twins(OPTIMIZERS[optimizer], CLIPS[clip], where)
    rotation = twins.rotation(every=1 + (where == "device"))
    plan = planned(rotation.steady)
    with Runner(plan, "threads", "random", poison=True, key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        for number, batch in enumerate(twins.batches):
            (loss,) = late.run(*batch)
            assert torch.equal(loss, twins.eagerly(*batch)), f"the loss of step {number}"
            assert late.pending and twins.differing()
            twins.next_rates(number)
            if number in (0, 3, STEPS - 1):
                late.flush()
                assert not late.pending and not twins.differing()
    assert not twins.differing(), "out of the arenas again"


@pytest.mark.gpu
@only_on_a_fake_gpu("the host's updates round otherwise than a GPU's")
@pytest.mark.parametrize("where", ["host", "device"])
def test_late_updates_in_a_captured_graph_have_the_numbers_of_their_own_step(where: str) -> None:
    kind = "adamw fused" if where == "host" else "adamw"
    twins = Twins(OPTIMIZERS[kind], None, where, "cuda")
    rotation = twins.rotation(every=1 + (where == "device"))
    made = planned(rotation.steady)
    with Runner(made, "cudagraph", poison=True, key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        for number, batch in enumerate(twins.batches):
            (loss,) = late.run(*batch)
            assert torch.equal(loss, twins.eagerly(*batch)), f"the loss of step {number}"
            for _, optimizer in twins.sides():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.8
        late.flush()
        assert not twins.differing()


def test_the_step_itself_may_be_run_in_between_once_it_is_flushed() -> None:
    twins = Twins(OPTIMIZERS["adamw"], CLIPS["norm"], "host")
    rotation = twins.rotation()
    with Runner(planned(rotation.steady), key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        runner.add("whole", twins.graph)
        for number, batch in enumerate(twins.batches):
            if number % 3 == 2:
                late.flush()
                (loss,) = runner.run("whole", *batch)
            else:
                (loss,) = late.run(*batch)
            assert torch.equal(loss, twins.eagerly(*batch))
        late.flush()
        assert not twins.differing()


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_step_that_fails_before_any_update_leaves_the_late_ones_to_the_flush(engine: str) -> None:
    twins = Twins(OPTIMIZERS["adamw"], None, "host")
    # The first layer is not late, so that its forward pass waits for no update.
    first = min(n for n, t in enumerate(twins.graph.tasks) if t.phase == "forward")
    reads = {*twins.graph.tasks[first].reads}
    wanted = [n for n in updates_of(twins.graph) if reads.isdisjoint(twins.graph.tasks[n].writes)]
    rotation = rotated(twins.graph, wanted)
    assert rotation is not None
    with Runner(planned(rotation.steady), engine, key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        late.run(*twins.batches[0])
        twins.eagerly(*twins.batches[0])
        with pytest.raises(StepError):
            late.run(twins.batches[0][0])  # nothing ran
        assert late.pending
        with pytest.raises(StepError, match="inputs of shape"):
            late.run(twins.batches[0][0][:3], twins.batches[0][1][:3])
        assert late.pending
        late.flush()
        assert not twins.differing()


def test_a_step_that_fails_amid_its_updates_has_none_pending() -> None:
    twins = Twins(OPTIMIZERS["sgd"], None, "host")
    rotation = twins.rotation()
    task = rotation.steady.tasks[-1]

    def fails(*_: Any) -> None:
        raise RuntimeError("the last task fails")

    calls = [replace(call, op=fails) for call in task.kernel.calls]
    kernel = type(task.kernel)(tuple(calls)) if len(calls) > 1 else calls[0]
    rotation = replace(rotation, steady=with_task(rotation.steady, -1, kernel=kernel))
    with Runner(planned(rotation.steady), key="step") as runner:
        late = RotatedStep(runner, rotation, "step")
        late.run(*twins.batches[0])
        with pytest.raises(RuntimeError, match="the last task fails") as failed:
            late.run(*twins.batches[1])
        assert "may be half way" in "".join(failed.value.__notes__)
        assert not late.pending
        late.flush()
