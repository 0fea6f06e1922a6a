"""Engine `cudagraph`: whole steps, captured at the second and replayed after it."""

from typing import Any

import pytest
import torch
from support import captured_training
from support.captured_training import CUDA, STEPS, Trained, counting, planned, sums
from support.fake_gpu import FAKE
from torch import nn

import offload
from offload import Runner
from offload.graph.memgraph import TASK

exact = captured_training.exact
pytestmark = pytest.mark.gpu


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b.to(a.device), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [None, "60%", "minimum"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "sgd"), ("mlp", "adamw"), ("mlp", "fused adam"), ("convolutional", "sgd")],
)
def test_replayed_steps_are_eagers_to_the_last_bit(
    model: str, optimizer: str, budget: str | None, exact: None
) -> None:
    theirs, ours = Trained(model, optimizer), Trained(model, optimizer)
    expected = theirs.eager()
    made = planned(ours.graph(), budget)
    driver = counting()
    # A GPU's fused kernel takes the rate from memory as float32.
    equal = close if optimizer == "fused adam" and not FAKE else torch.equal
    with Runner(made, "cudagraph", driver=driver, poison=True) as runner:
        torch.manual_seed(3)
        for step, batch in enumerate(ours.batches):
            ours.numbers(step)
            [loss] = runner(*batch)
            assert equal(loss, expected[step]), f"loss of step {step}"
        found, wanted = ours.state(), theirs.state()
    assert found.keys() == wanted.keys()
    assert [name for name in found if not equal(found[name], wanted[name])] == []
    changed = 0 if optimizer == "fused adam" else 1  # its weight decay is 0, and stays it
    assert driver.captures == 1 + changed
    assert driver.replays == STEPS - 1 - changed


def test_updates_on_the_host_split_the_graph() -> None:
    """They round otherwise than a device's."""
    theirs, ours = Trained("mlp", "adamw"), Trained("mlp", "adamw")
    expected = theirs.eager()
    made = planned(ours.graph(), None, optimizer="host")
    assert "host" in {node.lane for node in made.memgraph.nodes}
    driver = counting()
    with Runner(made, "cudagraph", driver=driver, poison=True) as runner:
        torch.manual_seed(3)
        for step, batch in enumerate(ours.batches):
            ours.numbers(step)
            [loss] = runner(*batch)
            assert close(loss, expected[step]), f"loss of step {step}"
        found, wanted = ours.state(), theirs.state()
    assert [name for name in found if not close(found[name], wanted[name])] == []
    assert driver.replays >= STEPS - 1  # the host's updates read their numbers themselves


def test_a_batch_of_another_shape_is_captured_too() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(8, 4).to(CUDA)
    driver = counting()
    x = torch.ones(5, 8, device=CUDA)
    with Runner(
        offload.plan(offload.capture(lambda x: (layer(x).sum(),), x)),
        "cudagraph",
        driver=driver,
    ) as runner:
        for _ in range(3):
            for rows in (5, 2):  # the larger one first, so that the arenas stay
                x = torch.randn(rows, 8, device=CUDA)
                [total] = runner(x)
                assert torch.equal(total, layer(x).sum())
    assert (driver.captures, driver.replays) == (2, 4)


def test_numbers_that_never_rest_are_told_and_the_bits_are_eagers() -> None:
    theirs, ours = Trained("mlp", "adamw"), Trained("mlp", "adamw")

    def betas(trained: Trained, step: int) -> None:
        trained.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * step, 0.99)

    expected = theirs.eager(betas)
    driver = counting()
    with Runner(planned(ours.graph(), None), "cudagraph", driver=driver) as runner:
        torch.manual_seed(3)
        losses = []
        with pytest.warns(RuntimeWarning, match="betas"):
            for step, batch in enumerate(ours.batches):
                ours.numbers(step)
                betas(ours, step)
                losses += runner(*batch)
    assert all(map(torch.equal, losses, expected))
    assert driver.captures == 0


MATMUL = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("owner", "flag", "value"),
    [
        (MATMUL, "allow_bf16_reduced_precision_reduction", False),
        (MATMUL, "allow_fp16_reduced_precision_reduction", False),
        (MATMUL, "allow_fp16_accumulation", True),
        (MATMUL, "fp32_precision", "tf32"),
        (torch.backends.cudnn, "deterministic", True),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
    ],
)
def test_a_flag_of_torchs_that_a_graph_keeps_has_the_step_captured_anew(
    owner: Any, flag: str, value: object
) -> None:
    driver, before = counting(), getattr(owner, flag)
    x = torch.randn(5, 8, device=CUDA)
    runner, layer = sums(driver)
    try:
        with runner:
            for step in range(6):
                if step == 3:
                    setattr(owner, flag, value)
                assert torch.equal(runner(x)[0], layer(x).sum())
    finally:
        setattr(owner, flag, before)
    assert (driver.captures, driver.replays) == (2, 4)


def test_nodes_are_timed_by_engine_cuda() -> None:
    layer = nn.Linear(8, 4).to(CUDA)
    driver = counting()
    x = torch.ones(2, 8, device=CUDA)
    made = offload.plan(offload.capture(lambda x: (layer(x).sum(),), x))
    with Runner(made, "cudagraph", driver=driver) as runner:
        for _ in range(3):
            runner(x)
        runner.measure()
        runner(x)
        assert runner.trace.timed
        nodes = [made.memgraph.nodes[span.node] for span in runner.trace.spans]
        ran = {node.task for node in nodes if node.kind == TASK}
        assert ran == set(range(len(made.graph.tasks)))
    assert driver.replays == 2
