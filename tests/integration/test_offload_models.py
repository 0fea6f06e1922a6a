"""Models that people train: whatever the budget, the engine and the order, eager PyTorch's bits.

The loss of every step, parameters, buffers and the optimizer's state are compared after five steps,
each with another learning rate and another batch, dead memory being NaN all the time.
"""

import copy
import signal
import threading
from collections.abc import Callable, Sequence
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
from offload import BudgetTooSmall, GraphError, Plan, Role, Runner
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK
from offload.graph.taskgraph import HOST
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
MANY = tuple(
    (share, placement, engine)
    for share in (1.0, 0.6, 0.4, 0.0, 0.0)
    for placement in ("auto", "copy")
    for engine in ("serial", "threads")
)


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


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_twenty_random_orders_leave_the_bits_of_eager(small: Trained, name: str) -> None:
    assert len(MANY) == 20
    run_all(small(name), MANY)


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


def test_plans_of_the_least_budget_move_bytes_both_ways(small: Trained) -> None:
    """So that the tests above are about something."""
    trained = small("gpt")
    for share in (0.6, 0.0):
        nodes = trained.planned(share, "auto").memgraph.nodes
        assert {node.kind for node in nodes} == {TASK, OFFLOAD, RELOAD}


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


@pytest.mark.parametrize("placement", ["auto", "copy"])
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_weights_are_streamed_through_an_inference_step_and_never_copied_back(
    engine: str, placement: str
) -> None:
    model = models.vit().eval()

    def step(pictures: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(pictures)

    pictures = torch.randn(2, 3, 32, 32)
    graph = offload.capture(step, pictures)
    with pytest.raises(BudgetTooSmall) as refused:
        offload.plan(graph, 1, placement=placement)
    made = offload.plan(graph, refused.value.needed, placement=placement)
    made.verify()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert made.device_bytes < weights
    nodes = made.memgraph.nodes
    roles = [graph.buffers[node.buffer].role for node in nodes if node.kind == OFFLOAD]
    assert Role.PARAMETER not in roles and Role.BUFFER not in roles
    assert sum(node.nbytes for node in nodes if node.kind == RELOAD) >= weights // 2
    for seed in range(3):
        with Runner(made, engine, "random", seed, poison=True) as runner:
            for other in (pictures, torch.randn(2, 3, 32, 32)):
                assert torch.equal(runner(other)[0], step(other))


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


@pytest.mark.parametrize("placement", ["shim", "copy"])
@pytest.mark.skipif(shim.available() is None, reason="counting allocations needs the shim")
def test_the_real_peak_of_a_second_batch_shape_is_planned_too(
    small: Trained, placement: str
) -> None:
    trained = small("gpt")
    trained.restart()
    made = trained.planned(0.0, placement)
    with trained.stepping(made, engine="threads", order="random") as step:
        step(*trained.batches[0])
        shorter = [tensor[:1].contiguous() for tensor in trained.batches[0]]
        step(*shorter)
        outside = counted(step.runner)
        step(*shorter)
        [arena] = [nbytes for a, nbytes in made.memgraph.arenas.items() if a != HOST]
        assert arena + outside.peak <= made.device_bytes
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


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_moves_nothing_needs_little_more_than_its_peak(
    small: Trained, name: str
) -> None:
    trained = small(name)
    made = offload.plan(trained.graph)
    inputs = sum(buffer.role is Role.INPUT for buffer in trained.graph.buffers)
    assert sum(node.kind != TASK for node in made.memgraph.nodes) <= inputs
    assert made.device_bytes <= 1.05 * made.peak_bytes


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


def test_a_step_whose_outputs_change_their_shape_is_captured_for_each_shape_of_its_input() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x)) if len(x) > 2 else x * 2

    graph = offload.capture(step, torch.randn(4))
    with Runner(offload.plan(graph), poison=True) as runner:
        for size in (4, 2, 3, 2, 4):
            x = torch.randn(size)
            assert torch.equal(runner(x)[0], step(x))


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_ctrl_c_in_a_captured_step_leaves_a_runner_that_works(
    small: Trained, engine: str
) -> None:
    trained = small("gpt")
    made = trained.planned(0.0, "auto")
    with trained.stepping(made, engine=engine, order="random", poison=True) as step:
        seen = 0
        for wait in (0.001, 0.004, 0.008):
            main = threading.main_thread().ident
            assert main is not None
            timer = threading.Timer(wait, signal.pthread_kill, (main, signal.SIGINT))
            try:
                timer.start()
                for _ in range(20):
                    step(*trained.batches[0])
                timer.join()
            except KeyboardInterrupt:
                seen += 1
            timer.join()
        assert seen
    trained.run(made, engine, seed=0)


@pytest.mark.parametrize("budget", [0, -5, "much", "8 parrots", 1.5, True, "nan", "", None, [8]])
def test_what_is_no_size_is_no_budget(budget: Any) -> None:
    graph = offload.capture(lambda x: x * 2, torch.randn(4))
    if budget is None:
        assert offload.plan(graph, budget).device_bytes  # as much as it takes
        return
    with pytest.raises(GraphError, match=r"^budget: .* is not a size"):
        offload.plan(graph, budget)
    with pytest.raises(GraphError, match=r"^host_budget: .* is not a size"):
        offload.plan(graph, None, host_budget=budget)
