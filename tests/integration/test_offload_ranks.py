"""All-reduces in a planned step, in a group of one process: what ranks add to a graph."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore

import offload
from offload.errors import StepError
from offload.graph.taskgraph import RANKS, TaskGraph
from offload.tracing.capture import capture_step
from offload.tracing.ranks import Ranks, contents_of, difference
from offload.tracing.training import Clip, TrainingStep


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers)


def captured(module: nn.Module, ranks: Ranks | None, clip: Clip | None = None) -> TaskGraph:
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return module(x).square().mean(), ()

    step = TrainingStep(forward, optimizer, {"": module}, clip=clip, ranks=ranks)
    return capture_step(step, torch.zeros(8, 32))


def trained(ranks: bool, clip: Clip | None, seed: int = 0, budget: Any = None) -> dict[str, Any]:
    module = network()
    graph = captured(module, ranks_of(module) if ranks else None, clip)
    noise = torch.Generator().manual_seed(1)
    with offload.Runner(
        offload.plan(graph, budget), order="random", seed=seed, poison=True
    ) as runner:
        for _ in range(3):
            runner(torch.randn(8, 32, generator=noise))
    return module.state_dict()


def ranks_of(module: nn.Module, bucket_bytes: int = 10_000) -> Ranks:
    return Ranks(1, tuple(module.parameters()), bucket_bytes)


def chain(graph: TaskGraph) -> list[int]:
    return [number for number, task in enumerate(graph.tasks) if task.lane == RANKS]


def test_a_bucket_holds_neighbours_of_one_type_from_the_last_to_the_first() -> None:
    sizes = [100, 100, 100, 1000, 100]
    wide = [nn.Parameter(torch.zeros(n)) for n in sizes]
    half = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
    ranks = Ranks(2, [*wide, half], bucket_bytes=900)
    found = [[p.numel() for p in bucket] for bucket in ranks.buckets([*wide[1:], half])]
    assert found == [[100], [1000], [7], [100, 100]]
    # The order in which they are asked for, an optimizer's say, means nothing.
    again = ranks.buckets([half, *reversed(wide[1:])])
    assert [[p.numel() for p in bucket] for bucket in again] == found


@pytest.mark.parametrize("clip", [None, Clip(0.1)], ids=["plain", "clipped"])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_one_rank_is_its_own_gradient_in_any_order(
    group: None, clip: Clip | None, seed: int
) -> None:
    without = trained(False, clip)
    budget = int(offload.plan(captured(network(), None)).peak_bytes * 0.6)
    for limit in (None, budget):
        found = trained(True, clip, seed, limit)
        assert all(torch.equal(found[name], without[name]) for name in without)


def test_collectives_stay_in_one_order_whatever_is_lowered(group: None) -> None:
    module = network()
    graph = captured(module, ranks_of(module))
    numbers = chain(graph)
    names = [graph.tasks[number].name for number in numbers]
    contents = contents_of(graph)
    assert [len(bucket.split(", ")) for bucket in contents] == [5, 4, 3]
    assert names == ["ranks", *(f"all_reduce {n}/3" for n in (1, 2, 3))]
    for before, number in pairwise(numbers):
        assert before in graph.tasks[number].after


def test_an_all_reduce_begins_while_backward_goes_on(group: None) -> None:
    module = network()
    graph = captured(module, ranks_of(module))
    last = max(number for number, task in enumerate(graph.tasks) if task.phase == "backward")
    _, first, *_ = chain(graph)
    assert first < last
    after = graph.dependencies()
    assert first not in after[last]
    nodes = offload.plan(graph).memgraph.nodes
    assert {node.lane for node in nodes} >= {"compute", RANKS}


def test_nothing_is_sent_while_a_step_is_captured_and_planned(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast"):
        monkeypatch.setattr(distributed, name, lambda *_, name=name, **__: sent.append(name))
    module = network()
    plan = offload.plan(captured(module, ranks_of(module)))
    assert sent == []
    tasks = [plan.graph.tasks[number] for number in chain(plan.graph)]
    slow = offload.Costs(ranks=1e6)
    nbytes = [task.traffic for task in tasks]
    assert sum(nbytes) == sum(p.numel() * 4 for p in module.parameters())
    assert [slow.of_task(task) for task in tasks] == [1e-5 + n / 1e6 for n in nbytes]


def test_a_plan_tells_what_goes_to_the_other_ranks(group: None) -> None:
    module = network()
    said = offload.plan(captured(module, ranks_of(module))).explain()
    (line,) = [line for line in said.splitlines() if line.startswith("ranks")]
    assert "24.8 KiB of gradients averaged in 3 buckets" in line
    assert "ranks " not in offload.plan(captured(module, None)).explain()


def test_averaging_by_hand_gives_the_same_as_the_plan(group: None) -> None:
    module = network()
    module(torch.ones(8, 32)).sum().backward()
    gradients = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}
    expected = {p: g / 2 for p, g in gradients.items()}  # a second rank had zeros
    Ranks(2, tuple(module.parameters())).average(gradients)
    assert all(torch.equal(gradients[p], expected[p]) for p in expected)


def test_a_rank_with_other_gradients_is_told_by_its_number_and_theirs() -> None:
    said = difference([("8 of a", "9 of b"), ("8 of a", "9 of b"), ("8 of a", "5 of c")])
    assert "rank 2 has other gradients" in said
    assert "5 of c, against 9 of b" in said
    assert difference([("8 of a",), ("8 of a",)]) == ""


def test_a_collective_that_fails_names_the_rank_that_waited(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection closed by peer\nat some line")

    module = network()
    graph = captured(module, ranks_of(module))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with offload.Runner(offload.plan(graph)) as runner:
        runner(torch.zeros(8, 32))
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        monkeypatch.setattr(distributed, "all_gather", broken)
        with pytest.raises(
            StepError, match=r"rank 0 waited for the others.*closed by peer"
        ) as told:
            runner(torch.zeros(8, 32))
        assert "are those of the step before" in "".join(told.value.__notes__)
        assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
