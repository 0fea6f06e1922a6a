"""Updates on the host leave every bit as eager mode does."""

import copy
from typing import Any

import pytest
import torch
from plan_amounts import least, moved
from torch import nn
from torch.nn import functional

import offload
from offload.errors import BudgetTooSmall
from offload.graph.memgraph import OFFLOAD
from offload.graph.taskgraph import HOST
from offload.plans.plan import Plan
from offload.program.kernels import Call

WIDTH = 64


class Trained:
    """A net, its eager twin, and three steps of both."""

    def __init__(self, fused: bool | None, precise: bool = True, dtype: Any = torch.float32):
        torch.manual_seed(0)
        layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.model = nn.Sequential(*layers).to(dtype)
        self.twin = copy.deepcopy(self.model)
        self.precise = precise
        self.optimizer, self.other = (
            torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (self.model, self.twin)
        )
        self.batches = [
            (torch.randn(8, WIDTH, dtype=dtype), torch.randn(8, WIDTH, dtype=dtype))
            for _ in range(3)
        ]
        with self.around():
            self.graph = offload.capture_training_step(
                self.model, functional.mse_loss, self.optimizer, *self.batches[0]
            )

    def around(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=not self.precise)

    def compare(self, plan: Plan, engine: str = "threads") -> None:
        plan.verify()
        with offload.Runner(plan, engine, "random", 1, poison=True, host_workers=3) as runner:
            for x, y in self.batches:
                (loss,) = runner(x, y)
                self.other.zero_grad()
                with self.around():
                    wanted = functional.mse_loss(self.twin(x), y)
                wanted.backward()
                self.other.step()
                assert torch.equal(loss, wanted.detach())
        for one, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(one, other)
            for key, tensor in self.optimizer.state[one].items():
                assert torch.equal(tensor, self.other.state[other][key]), key


@pytest.mark.parametrize("placement", ["auto", "copy"])
@pytest.mark.parametrize("fused", [None, True])
def test_updates_on_the_host_leave_the_bits_of_eager(fused: bool | None, placement: str) -> None:
    trained = Trained(fused)
    budget = least(trained.graph, optimizer="host", placement=placement)
    plan = offload.plan(trained.graph, budget, optimizer="host", placement=placement)
    updates = {task.lane for task in plan.graph.tasks if task.phase == "update"}
    assert updates == {"host"}
    trained.compare(plan)
    trained.compare(plan, "serial")


def test_a_gradient_goes_out_in_half_precision_and_is_cast_on_the_host() -> None:
    trained = Trained(True, precise=False)
    plans = {
        choice: offload.plan(
            trained.graph, least(trained.graph, optimizer="host"), optimizer=choice
        )
        for choice in ("host", "auto")
    }
    plan = plans["host"]
    casts = [t for t in plan.graph.tasks if t.lane == "host" and t.phase == "backward"]
    assert casts, "casts are tasks of their own, on the host"
    for cast in casts:
        ([source], [made]) = cast.reads, cast.writes
        assert plan.graph.buffers[made].nbytes == 2 * plan.graph.buffers[source].nbytes
    weights = sum(p.nbytes for p in trained.model.parameters() if p.dim() == 2)
    went = sum(moved(plan, OFFLOAD).values())
    assert went < weights, "half of it, and the activations"
    for plan in plans.values():
        trained.compare(plan)


def test_parameters_of_half_precision_are_updated_on_the_device() -> None:
    trained = Trained(None, dtype=torch.bfloat16)
    plan = offload.plan(trained.graph, least(trained.graph), optimizer="host")
    assert "host" not in {task.lane for task in plan.graph.tasks}
    assert "none can run on the host" in plan.explain()
    trained.compare(plan)


def test_an_update_gives_the_same_bits_whatever_the_number_of_threads() -> None:
    """Host workers have a team of threads each, which need not be the main thread's."""
    before = torch.get_num_threads()
    trained = Trained(True)
    [task, *_] = [t for t in trained.graph.tasks if t.phase == "update"]
    update = next(call.op for call in task.kernel.calls if isinstance(call, Call))
    tensors = [torch.rand(300_007) for _ in range(4)]
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            p, g, *states = (t.clone() for t in tensors)
            update(p, g, *states)
            found.append((p, *states))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_workspaces_of_the_host_lie_in_the_host_arena_and_count() -> None:
    trained = Trained(None)
    if offload.plan(trained.graph).placement == "copy":
        pytest.skip("without the shim, kernels allocate elsewhere")
    plan = offload.plan(trained.graph, least(trained.graph, optimizer="host"), optimizer="host")
    places = [
        node.accesses[-1].place
        for node in plan.memgraph.nodes
        if node.lane == "host" and len(node.accesses) > len(plan.graph.tasks[node.task].touches)
    ]
    assert places
    assert {place.arena for place in places} == {HOST}
    assert all(place.offset + place.nbytes <= plan.host_bytes for place in places)
    with pytest.raises(BudgetTooSmall, match="host memory") as refused:
        offload.plan(trained.graph, plan.device_bytes, host_budget=1000, optimizer="host")
    offload.plan(
        trained.graph, plan.device_bytes, host_budget=refused.value.needed, optimizer="host"
    )


@pytest.mark.parametrize("optimizer", ["auto", "host"])
def test_a_batch_of_another_shape_is_planned_with_everything_where_it_is(optimizer: str) -> None:
    trained = Trained(True)
    budget = int(1.5 * least(trained.graph, optimizer=optimizer))
    x, y = trained.batches[1]
    trained.batches[1] = (x[:5], y[:5])
    trained.compare(offload.plan(trained.graph, budget, optimizer=optimizer))
