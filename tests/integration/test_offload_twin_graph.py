"""Capture and replay on the CPU twin: what a graph keeps, and what it refuses as CUDA does."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from benchmarks.twins.twin_graph import GraphTwin


@pytest.fixture
def driver() -> Iterator[GraphTwin]:
    with_threads = GraphTwin()
    yield with_threads
    with_threads.close()


def captured(driver: GraphTwin, *runs: Callable[[], object]) -> Callable[[], object]:
    compute = driver.stream("compute")
    driver.begin_capture(compute)
    for run in runs:
        driver.enqueue(compute, run)
    return driver.end_capture()


def replay(driver: GraphTwin, graph: Callable[[], object]) -> None:
    driver.enqueue(driver.stream("compute"), graph)
    driver.synchronize()


def test_nothing_runs_while_it_is_captured(driver: GraphTwin) -> None:
    x = torch.zeros(3)
    graph = captured(driver, lambda: x.add_(1))
    assert x.tolist() == [0, 0, 0]
    replay(driver, graph)
    replay(driver, graph)
    assert x.tolist() == [2, 2, 2]


def test_a_number_is_baked_in_and_one_in_memory_is_read(driver: GraphTwin) -> None:
    numbers = {"rate": 2.0}
    rate = torch.tensor(2.0)
    x, y = torch.zeros(1), torch.zeros(1)
    graph = captured(driver, lambda: (x.add_(numbers["rate"]), y.add_(rate)))
    numbers["rate"] = 100.0
    rate.fill_(5.0)
    replay(driver, graph)
    assert (x.item(), y.item()) == (2.0, 5.0)


def test_what_an_op_returns_is_what_later_ops_were_given(driver: GraphTwin) -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def run() -> None:
        y = x * 3
        out.copy_(y.view(2, 2).t().reshape(4) + y)

    graph = captured(driver, run)
    for value in (1.0, 2.0):
        x.fill_(value)
        replay(driver, graph)
        assert torch.equal(out, torch.full((4,), 6 * value))


def test_statistics_of_half_precision_pictures_keep_their_full_precision(
    driver: GraphTwin,
) -> None:
    """Fakes would have them in half."""
    x = torch.randn(16, 4).bfloat16()
    running = torch.zeros(4), torch.ones(4)
    out = torch.zeros(4)

    def run() -> None:
        _, mean, _ = torch.native_batch_norm(x, torch.ones(4), None, *running, True, 0.1, 1e-5)
        out.copy_(mean)

    replay(driver, captured(driver, run))
    found = out.clone()
    run()
    assert torch.equal(found, out) and not torch.equal(out, out.bfloat16().float())


def test_draws_are_those_of_the_generator_at_the_replay(driver: GraphTwin) -> None:
    x = torch.zeros(64)
    before = torch.get_rng_state()
    graph = captured(driver, lambda: x.bernoulli_(0.5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    replay(driver, graph)
    first = x.clone()
    replay(driver, graph)
    torch.manual_seed(5)
    expected = [torch.zeros(64).bernoulli_(0.5) for _ in range(2)]
    assert torch.equal(first, expected[0])
    assert torch.equal(x, expected[1])


def test_copies_are_captured_with_their_order(driver: GraphTwin) -> None:
    host, device, result = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    compute, h2d = driver.stream("compute"), driver.stream("h2d")
    come = driver.copy(device.view(torch.uint8), host.view(torch.uint8))
    driver.begin_capture(compute)
    begun, there = driver.event(), driver.event()
    begun.record(compute)
    driver.wait(h2d, begun)
    driver.enqueue(h2d, come)
    there.record(h2d)
    driver.wait(compute, there)
    driver.enqueue(compute, lambda: result.add_(device))
    graph = driver.end_capture()
    host.fill_(7.0)
    replay(driver, graph)
    assert (device.item(), result.item()) == (7.0, 7.0)


def test_any_legal_order_can_come_out_and_no_other() -> None:
    seen: set[int] = set()
    for seed in range(30):
        driver = GraphTwin(order="random", seed=seed)
        compute, h2d = driver.stream("compute"), driver.stream("h2d")
        told = torch.tensor(0)

        def tell(number: int, told: torch.Tensor = told) -> Callable[[], object]:
            return lambda: torch.add(torch.tensor(number), told, alpha=10, out=told)

        driver.begin_capture(compute)
        begun, there = driver.event(), driver.event()
        begun.record(compute)
        driver.wait(h2d, begun)
        driver.enqueue(compute, tell(1))
        driver.enqueue(compute, tell(2))
        driver.enqueue(h2d, tell(3))
        there.record(h2d)
        driver.wait(compute, there)
        driver.enqueue(compute, tell(4))
        replay(driver, driver.end_capture())
        driver.close()
        seen.add(int(told))
    assert seen == {1234, 1324, 3124}


def test_a_value_for_python_is_refused_and_breaks_the_capture(driver: GraphTwin) -> None:
    x = torch.ones(1)
    compute = driver.stream("compute")
    driver.begin_capture(compute)
    with pytest.raises(RuntimeError, match=r"not permitted.*_local_scalar_dense"):
        driver.enqueue(compute, x.item)
    with pytest.raises(RuntimeError, match="previous error"):
        driver.enqueue(compute, lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="previous error"):
        driver.end_capture()
    replay(driver, lambda: x.add_(1))  # the stream is as it was
    assert x.item() == 2.0


@pytest.mark.parametrize("asked", ["synchronize", "begin", "end", "done", "wait for event"])
def test_waiting_for_the_device_is_refused(driver: GraphTwin, asked: str) -> None:
    compute = driver.stream("compute")
    driver.begin_capture(compute)
    event = driver.event()
    event.record(compute)
    ask = {"done": event.done, "wait for event": event.synchronize}
    with pytest.raises(RuntimeError, match="not permitted"):
        ask.get(asked, getattr(driver, asked, None))()  # type: ignore[misc]
    driver.drop_capture()
    driver.synchronize()


def test_a_stream_that_did_not_fork_is_refused(driver: GraphTwin) -> None:
    driver.begin_capture(driver.stream("compute"))
    with pytest.raises(RuntimeError, match="h2d did not fork"):
        driver.enqueue(driver.stream("h2d"), tuple)
    driver.drop_capture()


def test_an_event_from_before_the_capture_is_refused(driver: GraphTwin) -> None:
    compute, event = driver.stream("compute"), driver.event()
    event.record(compute)
    driver.begin_capture(compute)
    with pytest.raises(RuntimeError, match="uncaptured work"):
        driver.wait(compute, event)
    driver.drop_capture()


def test_a_stream_that_is_not_joined_is_refused(driver: GraphTwin) -> None:
    x = torch.zeros(1)
    compute, h2d = driver.stream("compute"), driver.stream("h2d")
    driver.begin_capture(compute)
    begun = driver.event()
    begun.record(compute)
    driver.wait(h2d, begun)
    driver.enqueue(h2d, lambda: x.add_(1))
    with pytest.raises(RuntimeError, match="unjoined"):
        driver.end_capture()


def test_an_exception_in_a_captured_run_ends_the_capture_cleanly(driver: GraphTwin) -> None:
    compute, x = driver.stream("compute"), torch.zeros(1)
    driver.begin_capture(compute)
    with pytest.raises(ZeroDivisionError):
        driver.enqueue(compute, partial(divmod, 1, 0))
    driver.drop_capture()
    replay(driver, captured(driver, lambda: x.add_(1)))
    assert x.item() == 1.0
