"""Engine `cudagraph`: whole steps, captured at the second and replayed after it."""

from typing import Any

import pytest
import torch
from support import cudagraph_runs
from support.cudagraph_runs import CUDA, CountingDriver, sums, trained
from support.offload_training import STEPS, named, rated
from torch import nn

import offload
from offload import Runner
from offload.graph.memgraph import TASK

exact = cudagraph_runs.exact
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("share", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("name", ["mlp", "mlp, adamw", "mlp, fused", "convolutional"])
def test_replayed_steps_are_eagers_to_the_last_bit(name: str, share: float, exact: None) -> None:
    case, driver = trained(name), CountingDriver()
    case.run(case.planned(share, "auto"), "cudagraph", 0, "priority", driver)
    assert driver.replays == (STEPS - 1) * driver.captures > 0


def test_updates_on_the_host_split_the_graph() -> None:
    """They round otherwise than a device's."""
    case, driver = trained("mlp, adamw"), CountingDriver()
    made = offload.plan(case.graph, optimizer="host")
    assert "host" in {node.lane for node in made.memgraph.nodes}
    case.restart()
    with case.stepping(made, engine="cudagraph", driver=driver, poison=True) as step_of:
        for step, batch in enumerate(case.batches):
            rated(case.optimizer, step)
            torch.manual_seed(step)
            assert close(step_of(*batch)[0], case.losses[step]), f"loss of step {step}"
        found = named(case.model, case.optimizer)
        assert [name for name in found if not close(found[name], case.end[name])] == []
    assert driver.replays == (STEPS - 1) * driver.captures > 0


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b.to(a.device), rtol=1e-4, atol=1e-6)


def test_a_batch_of_another_shape_is_captured_too() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(8, 4).to(CUDA)
    driver = CountingDriver()
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
    driver, before = CountingDriver(), getattr(owner, flag)
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
    driver = CountingDriver()
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
