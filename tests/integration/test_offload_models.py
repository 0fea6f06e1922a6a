"""Models that people train: whatever the budget, the engine and the order, eager PyTorch's bits.

The loss of every step, parameters, buffers and the optimizer's state are compared after five steps,
each with another learning rate and another batch, dead memory being NaN all the time.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import offload_models as models
from support import offload_training as training
from support.live_training import LiveTraining, training_graph
from support.products import every_value
from torch import nn

import offload
from offload import Plan, Runner
from offload.graph.taskgraph import HOST
from offload.lowering.chunks import chunk_tasks
from offload.memory import cpu_shim as shim

NAMES = ("resnet18", "mobilenet_v2", "vit", "gpt", "llama", "huggingface gpt2")
KINDS = (
    "resnet18 in evaluation mode",
    "resnet18 channels last",
    "resnet18 channels last, small",
    "gpt around autocast",
    "llama in one precision",
)
FEW = (
    (0.0, "auto", "threads"),
    (0.4, "copy", "serial"),
    (0.6, "auto", "serial"),
    (1.0, "copy", "threads"),
)
"""Share of the peak (the smallest budget where that is more), placement, engine."""


Trained = Callable[[str], Any]


@pytest.fixture(scope="module")
def small() -> Trained:
    """`small("gpt")` was captured and trained by eager PyTorch, once for all tests."""
    kept: dict[str, Any] = {}

    def trained(name: str) -> Any:
        if name not in kept:
            kept[name] = training.trained(case_of(name))
        return kept[name]

    return trained


def case_of(name: str) -> Any:
    if name == "huggingface gpt2":
        pytest.importorskip("transformers")
        return models.huggingface()
    return models.cases()[name]


def run_all(trained: Any, ways: Sequence[tuple[float, str, str]]) -> None:
    plans: dict[tuple[float, str], Plan] = {}
    for seed, (share, placement, engine) in enumerate(ways):
        if (share, placement) not in plans:
            plans[share, placement] = trained.planned(share, placement)
        trained.run(plans[share, placement], engine, seed)


# ---- the bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*NAMES, *KINDS))
def test_five_steps_in_random_order_leave_the_bits_of_eager(small: Trained, name: str) -> None:
    large = name.startswith(("resnet18", "mobilenet_v2"))
    run_all(small(name), FEW[:2] if large else FEW)


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_chunks_of_many_tasks_leave_the_bits_of_eager(
    small: Trained, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plans.plan, "chunk_tasks", partial(chunk_tasks, most=10))
    case, chunks = small(name), 0
    for seed, (share, placement, engine) in enumerate(FEW):
        made = case.planned(share, placement)
        chunks += sum(bool(getattr(task.kernel, "inner", {})) for task in made.graph.tasks)
        case.run(made, engine, seed)
    assert chunks


@pytest.fixture(scope="module")
def large() -> Trained:
    """The same for large ones; only the last is kept."""
    kept: dict[str, Any] = {}

    def trained(name: str) -> Any:
        if name not in kept:
            kept.clear()
            kept[name] = training.trained(training.large()[name])
        return kept[name]

    return trained


@pytest.mark.full
@pytest.mark.parametrize("way", [(0.0, "auto", "threads"), (0.6, "copy", "serial")], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2 of 4 layers", "vit_b_16"])
def test_models_of_real_size_leave_the_bits_of_eager(
    large: Trained, name: str, way: tuple[float, str, str]
) -> None:
    pytest.importorskip("transformers")
    run_all(large(name), [way])


@pytest.mark.full
@pytest.mark.parametrize(("name", "share"), [("vit_b_16", 0.05), ("gpt2_small", 0.2)])
def test_the_smallest_budget_is_a_small_part_of_the_peak(name: str, share: float) -> None:
    pytest.importorskip("transformers")
    case = training.large()[name]
    model, optimizer = case.made()
    graph = training_graph(model, case.loss, optimizer, *case.batches(1)[0])
    made = training.planned(graph, 0.0, "auto")
    assert made.device_bytes <= share * made.peak_bytes
    unlimited = offload.plan(graph)
    assert unlimited.device_bytes <= 1.05 * unlimited.peak_bytes


def test_every_step_draws_masks_of_its_own(small: Trained) -> None:
    """Nothing is learned at a rate of 0: only the masks of dropout can make a difference."""
    trained = small("gpt")
    batch = trained.batches[0]
    for group in trained.optimizer.param_groups:
        group["lr"] = 0.0
    for engine in ("serial", "threads"):
        made = trained.planned(0.0, "auto")
        with trained.stepping(made, engine=engine, order="random", poison=True) as step:
            torch.manual_seed(3)
            first, second = step(*batch)[0], step(*batch)[0]
            torch.manual_seed(3)
            assert torch.equal(step(*batch)[0], first)
            assert not torch.equal(first, second)


@pytest.mark.parametrize("share, name", every_value([0.0, 0.4, 1.0], ["gpt", "vit"]))
def test_a_second_batch_shape_in_between_leaves_the_bits_of_eager(
    small: Trained, name: str, share: float
) -> None:
    trained = small(name)
    case = trained.case
    trained.restart()
    other, plain = copy.deepcopy((trained.model, trained.optimizer))
    made = trained.planned(share, "auto")
    with trained.stepping(made, engine="threads", order="random", seed=1, poison=True) as step_of:
        for step, batch in enumerate(trained.batches):
            if step % 2:
                batch = tuple(tensor[:1].contiguous() for tensor in batch)
            training.rated(trained.optimizer, step)
            training.rated(plain, step)
            torch.manual_seed(step)
            loss, *_ = step_of(*batch)
            torch.manual_seed(step)
            assert torch.equal(loss, models.eager_step(case, other, plain, batch)), step
        found = training.named(trained.model, trained.optimizer)
        wanted = training.named(other, plain)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# ---- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mobilenet_v2"])
@pytest.mark.skipif(shim.available() is None, reason="counting allocations needs the shim")
def test_the_real_peak_is_no_more_than_the_planned_one(small: Trained, name: str) -> None:
    """What the nodes of a step allocate outside of the arenas is nothing where the allocator
    places it, and is part of the plan where it is copied."""
    trained = small(name)
    for placement, engine, share in (("shim", "threads", 0.0), ("copy", "serial", 0.6)):
        made = trained.planned(share, placement)
        trained.restart()
        with trained.stepping(made, engine=engine, order="random") as step:
            step(*trained.batches[0])
            outside = counted(step.runner)
            step(*trained.batches[1])
            made = step.session.plan  # that of the second step, whose numbers vary
            [arena] = [nbytes for a, nbytes in made.memgraph.arenas.items() if a != HOST]
            assert arena + outside.peak <= made.device_bytes
            assert outside.live == 0
            assert placement == "copy" or outside.allocations == 0


class Outside:
    """What was allocated while an engine ran."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run
        self.peak = self.live = self.allocations = -1

    def __call__(self, *args: Any) -> None:
        with shim.load().counting() as passed:
            self._run(*args)
            self.peak, self.live = passed.peak, passed.live
            self.allocations = passed.allocations


def counted(runner: Runner) -> Outside:
    outside = Outside(runner.stage.engine.run)
    runner.stage.engine.run = outside  # type: ignore[method-assign]
    return outside


# ---- bad input ----------------------------------------------------------------------------------


class Words(nn.Module):
    """Looks words up; one that is unknown is an error of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(text).mean(1))  # here


@pytest.mark.parametrize("engine", ["serial", "threads"])
@pytest.mark.parametrize("placement", ["auto", "copy"])
def test_a_word_out_of_range_is_the_error_of_the_op_with_the_users_line(
    engine: str, placement: str
) -> None:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randint(0, 10, (2, 5)), torch.randint(0, 3, (2,))
    loss_of = nn.functional.cross_entropy
    graph = training_graph(model, loss_of, optimizer, *batch)
    line = 1 + next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines()) if "# here" in text
    )
    made = offload.plan(graph, placement=placement)
    how: Any = {"engine": engine, "poison": True}
    with LiveTraining(model, loss_of, optimizer, made, **how) as step:
        step(*batch)
        for _ in range(2):
            with pytest.raises(IndexError, match="index out of range") as raised:
                step(batch[0] + 100, batch[1])
            where, *_ = raised.value.__notes__
            assert "embedding" in where and f"test_offload_models.py:{line}" in where
