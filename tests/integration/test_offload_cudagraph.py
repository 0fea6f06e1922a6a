"""Engine `cudagraph`: whole steps, captured at the second and replayed after it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support import cudagraph_runs
from support import stream_graphs as graphs
from support.cudagraph_runs import CUDA, CountingDriver, sums, trained
from support.offload_training import STEPS, named, rated
from torch import nn

import offload
from offload import Runner
from offload.graph.memgraph import TASK
from offload.running.drivers.cuda_graph import GraphCuda

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


class Struck(CountingDriver):
    """In captures, before they end or as they begin, something happens."""

    def __init__(self) -> None:
        super().__init__()
        self.at_begin: Callable[[], object] = lambda: None
        self.at_end: Callable[[], object] = lambda: None

    def begin_capture(self, origin: Any) -> None:
        self.at_begin()
        super().begin_capture(origin)

    def end_capture(self) -> Callable[[], object]:
        self.at_end()
        return super().end_capture()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def test_no_graph_is_replayed_after_a_capture_that_a_ctrl_c_ended() -> None:
    driver = Struck()
    runner, layer = sums(driver)
    first, other = torch.randn(5, 8, device=CUDA), torch.randn(2, 8, device=CUDA)
    with runner:
        for x in (first, first, other):
            runner(x)
        assert (driver.captures, driver.replays) == (1, 1)
        driver.at_end = ctrl_c
        with pytest.raises(KeyboardInterrupt):
            runner(other)
        driver.at_end = lambda: None
        for x in (first, other, first, other):
            assert torch.equal(runner(x)[0], layer(x).sum())
    assert (driver.captures, driver.replays) == (3, 5)


def hand_made(kernel: Callable[..., None], where: str = "model.py:31 in forward") -> offload.Plan:
    """x -> kernel -> y -> +1 -> z"""
    builder = offload.GraphBuilder()
    x = builder.buffer("x", 64, "input")
    y, z = builder.buffer("y", 64), builder.buffer("z", 64)
    builder.task("asks", reads=[x], writes=[y], kernel=kernel, where=where)
    builder.task("adds", [y], [z], kernel=lambda reads, writes: writes[0].copy_(reads[0] + 1))
    builder.output(z)
    return offload.plan(graphs.bound(builder.graph(), CUDA))


def test_a_kernel_that_asks_for_a_value_is_named_once_and_the_step_runs_as_engine_cuda() -> None:
    def asks(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        writes[0].fill_(int(reads[0].sum()) % 7)

    made = hand_made(asks)
    with Runner(made, "cudagraph", driver=GraphCuda(CUDA)) as runner:
        outputs = [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (1,)]
        with pytest.warns(RuntimeWarning, match="cannot be captured in task asks") as told:
            outputs += [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (2, 3)]
    [warning] = told
    assert "model.py:31 in forward" in str(warning.message)
    assert "not permitted when stream is capturing" in str(warning.message)
    assert [int(z[0]) for [z] in outputs] == [64 % 7 + 1, 128 % 7 + 1, 192 % 7 + 1]
    assert "cannot be captured" in made.explain()


def test_a_capture_that_fails_in_mid_step_leaves_a_device_that_works(exact: None) -> None:
    """With draws before and after it."""
    case = trained("asking")
    with pytest.warns(RuntimeWarning, match=r"cannot be captured in .*asks") as told:
        case.run(case.planned(1.0, "auto"), "cudagraph", 0, "priority", CountingDriver())
    assert len(told) == 1
    # And torch's own captures work on.
    case, driver = trained("mlp"), CountingDriver()
    case.run(case.planned(1.0, "auto"), "cudagraph", 0, "priority", driver)
    assert driver.replays
