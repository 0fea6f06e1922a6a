"""What several processes do together has no place in a plan, and is refused by its name."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from support.live_loops import Loop
from torch import distributed, nn
from torch.distributed.tensor import distribute_module, init_device_mesh

import offload
from offload.errors import CaptureError
from offload.live.core import why_no_core
from offload.live.session import LiveSession

Change = Callable[[torch.Tensor], Any]


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    if why := why_no_core():
        pytest.skip(why)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _world() -> Any:
    return distributed.group.WORLD


COLLECTIVES: dict[str, Change] = {
    "c10d::allreduce_": lambda x: distributed.all_reduce(x.clone()),
    "c10d::broadcast_": lambda x: distributed.broadcast(x.clone(), 0),
    "c10d::allgather_": lambda x: distributed.all_gather([torch.empty_like(x)], x),
    "c10d::barrier": lambda x: distributed.barrier(),
    "c10d::send": lambda x: distributed.send(x, 1),
    "_c10d_functional::all_reduce": lambda x: functional.all_reduce(x, "sum", _world()),
    "_c10d_functional_autograd::all_gather_into_tensor": lambda x: (
        torch.ops._c10d_functional_autograd.all_gather_into_tensor(x, 1, "0")
    ),
    "_dtensor::shard_dim_alltoall": lambda x: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, "0"),
    "symm_mem::one_shot_all_reduce": lambda x: torch.ops.symm_mem.one_shot_all_reduce(
        x, "sum", "0"
    ),
}
"""By the name of the operation: what calls it."""
INSTEAD = r"OffloadStrategy\(devices=k\), or over machines with ElasticStrategy"


class Together(Loop):
    def __init__(self, change: Change) -> None:
        super().__init__("cpu")
        self.change = change

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.change(x)
        return super().loss(x, y)


def trained_step(loop: Loop, device: str = "cpu", budget: str | None = "100%") -> None:
    session = LiveSession(loop.net, loop.optimizer, budget=budget, device=device)
    with session, session.step():
        loop.step(*loop.batches[0])


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("budget", [None, "100%"])
def test_a_step_with_a_collective_is_refused_by_its_name_and_line(
    name: str, budget: str | None
) -> None:
    said = (
        rf"^test_collectives_refused\.py:\d+ in .*: {re.escape(name)} is done by several.*{INSTEAD}"
    )
    with pytest.raises(CaptureError, match=said):
        trained_step(Together(COLLECTIVES[name]), budget=budget)


def test_a_prefill_and_a_capture_with_a_collective_are_refused_by_its_name() -> None:
    class Summed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", _world()) * 1

    for run in (offload.prefill, offload.capture):
        with pytest.raises(CaptureError, match="_c10d_functional::all_reduce is done by several"):
            run(Summed(), torch.ones(4))


def test_a_collective_of_a_backward_pass_is_refused_by_its_name() -> None:
    class OfGradients(Loop):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.net.last.weight.register_hook(
                lambda gradient: functional.all_reduce(gradient, "sum", _world()) * 1
            )
            return super().loss(x, y)

    with pytest.raises(CaptureError, match="_c10d_functional::all_reduce is done by several"):
        trained_step(OfGradients("cpu"))


def test_a_step_that_was_refused_leaves_what_the_step_before_left() -> None:
    loop = Together(lambda x: distributed.barrier() if loop.calls == 2 else None)
    with LiveSession(loop.net, loop.optimizer, budget="100%", device="cpu") as session:
        with session.step():
            loop.step(*loop.batches[0])
        before = {name: tensor.clone() for name, tensor in loop.net.state_dict().items()}
        with pytest.raises(CaptureError, match="c10d::barrier"), session.step():
            loop.step(*loop.batches[1])
    after = loop.net.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_torchs_own_ddp_is_refused_by_the_operation_that_it_sends_with() -> None:
    class Wrapped(Loop):
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(outer(x), y)

    loop = Wrapped("cpu")
    outer = nn.parallel.DistributedDataParallel(loop.net)
    with pytest.raises(CaptureError, match="c10d::broadcast_ is done by several"):
        trained_step(loop)


def test_a_collective_between_two_steps_runs_as_it_does_without_a_session() -> None:
    loop = Loop("cpu")
    with LiveSession(loop.net, loop.optimizer, budget="100%", device="cpu") as session:
        for x, y in loop.batches[:3]:
            with session.step():
                loop.step(x, y)
            before = loop.net.first.weight.detach().clone()
            distributed.all_reduce(loop.net.first.weight.detach())
            assert torch.equal(loop.net.first.weight, before)
        assert session.planned_steps == 3


def test_a_tensor_that_others_sent_before_a_step_is_waited_for_within_it() -> None:
    sent = functional.all_reduce(torch.ones(8, 16), "sum", _world())
    seen: list[torch.Tensor] = []
    trained_step(Together(lambda x: seen.append(x * 0 + sent)))
    assert torch.equal(seen[0] * 1, torch.ones(8, 16))


def test_a_distributed_tensor_that_is_elsewhere_is_refused_by_its_class() -> None:
    loop = Loop("cpu")
    distribute_module(loop.net, init_device_mesh("cpu", (1,)))
    with pytest.raises(CaptureError, match="not on cuda:0, which is a DTensor without bytes"):
        trained_step(loop, "cuda:0")
