"""Engine `cudagraph` on the CPU twin: whole steps, captured at the second and replayed after it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from offload import Runner
from offload.running.drivers.cuda_graph import GraphCuda

NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ("cpu", pytest.param("cuda", marks=(pytest.mark.gpu, NO_DEVICE)))
STEPS = 7
RATES = (0.02, 0.01, 0.003, 0.03, 0.001, 0.02, 0.005)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A stream's team of threads would be another than eager's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exact() -> Iterator[None]:
    """Sums in one order only."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = before


class Mlp(nn.Module):
    """With dropout: draws in an order."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [(nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.3)) for _ in range(6)]
        self.layers = nn.Sequential(*(m for layer in hidden for m in layer), nn.Linear(48, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@torch.library.custom_op("perfect_tests::asks", mutates_args=())
def asks_for_a_value(x: torch.Tensor) -> torch.Tensor:
    return x + x.sum().item() * 0


@asks_for_a_value.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Asking(Mlp):
    """A graph of a device cannot be captured over this: the host waits for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ops.perfect_tests.asks(x))


class Convolutional(nn.Module):
    """With statistics that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(16 if n else 3, 16, 3, padding=1) for n in range(5)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = functional.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


def vectors() -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 48), torch.randint(0, 10, (8,))


def pictures() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 15, 15), torch.randint(0, 10, (4,))


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.1, weight_decay=0.02),
    "fused adam": lambda m: torch.optim.Adam(m.parameters(), 0.1, fused=True),
}
MODELS: dict[str, Any] = {
    "mlp": (Mlp, vectors),
    "asking": (Asking, vectors),
    "convolutional": (Convolutional, pictures),
}


class Trained:
    """A model and its optimizer from the same start, with the same numbers at every step."""

    def __init__(self, model: str, optimizer: str, device: str = "cpu") -> None:
        torch.manual_seed(1)
        made, batch = MODELS[model]
        self.model = made().to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        torch.manual_seed(2)
        self.batches = [tuple(t.to(device) for t in batch()) for _ in range(STEPS)]

    def numbers(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = RATES[step]
            if step == 4:
                group["weight_decay"] *= 3

    def eager(self, more: Callable[..., None] | None = None) -> list[torch.Tensor]:
        losses = []
        torch.manual_seed(3)
        for step, (x, y) in enumerate(self.batches):
            self.numbers(step)
            if more is not None:
                more(self, step)
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Copies on the host, wherever the tensors are."""
        found = dict(self.model.state_dict())
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number} {key}": t for key, t in state.items()}
        return {name: t.cpu().clone() for name, t in found.items()}

    def graph(self) -> offload.TaskGraph:
        x, y = self.batches[0]
        return offload.capture_training_step(
            self.model, functional.cross_entropy, self.optimizer, x, y
        )


def planned(graph: offload.TaskGraph, budget: str | None, **more: Any) -> offload.Plan:
    if budget is None:
        return offload.plan(graph, **more)
    whole = offload.plan(graph, **more)
    if budget == "60%":
        return offload.plan(graph, int(whole.peak_bytes * 0.6) + whole.reserve, **more)
    try:
        offload.plan(graph, 1, **more)
    except offload.BudgetTooSmall as error:
        return offload.plan(graph, error.needed, **more)
    raise AssertionError("a budget of one byte did")


class Counting:
    """A driver that counts what is captured and replayed."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.captures = self.replays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def end_capture(self) -> Callable[[], object]:
        graph = self.driver.end_capture()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            graph()

        return replay


def counting(device: str = "cpu", order: str = "random") -> Any:
    if device == "cpu":
        return Counting(GraphTwin(order=order, seed=7))
    return Counting(GraphCuda(torch.device(device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("budget", [None, "60%", "minimum"])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "sgd"), ("mlp", "adamw"), ("mlp", "fused adam"), ("convolutional", "sgd")],
)
def test_replayed_steps_are_eagers_to_the_last_bit(
    model: str, optimizer: str, budget: str | None, device: str, exact: None
) -> None:
    theirs, ours = Trained(model, optimizer, device), Trained(model, optimizer, device)
    expected = theirs.eager()
    made = planned(ours.graph(), budget)
    driver = counting(device)
    # A device's fused kernel takes the rate from memory as float32.
    equal = torch.equal if device == "cpu" or optimizer != "fused adam" else close
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


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b.to(a.device), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_updates_on_the_host_split_the_graph_and_keep_every_bit(device: str) -> None:
    theirs, ours = Trained("mlp", "adamw", device), Trained("mlp", "adamw", device)
    expected = theirs.eager()
    made = planned(ours.graph(), None, optimizer="host")
    assert "host" in {node.lane for node in made.memgraph.nodes}
    driver = counting(device)
    # The host's kernels round otherwise than a device's.
    equal = torch.equal if device == "cpu" else close
    with Runner(made, "cudagraph", driver=driver, poison=True) as runner:
        torch.manual_seed(3)
        for step, batch in enumerate(ours.batches):
            ours.numbers(step)
            [loss] = runner(*batch)
            assert equal(loss, expected[step]), f"loss of step {step}"
        found, wanted = ours.state(), theirs.state()
    assert [name for name in found if not equal(found[name], wanted[name])] == []
    assert driver.replays >= STEPS - 1  # the host's updates read their numbers themselves


class Struck(Counting):
    """In captures, before they end or as they begin, something happens."""

    def __init__(self) -> None:
        super().__init__(GraphTwin())
        self.at_begin: Callable[[], object] = lambda: None
        self.at_end: Callable[[], object] = lambda: None

    def begin_capture(self, origin: Any) -> None:
        self.at_begin()
        self.driver.begin_capture(origin)

    def end_capture(self) -> Callable[[], object]:
        self.at_end()
        return super().end_capture()


def ctrl_c() -> None:
    raise KeyboardInterrupt


def sums(driver: Any) -> tuple[Runner, nn.Linear]:
    """Of batches of any number of rows."""
    layer = nn.Linear(8, 4)
    graph = offload.capture(lambda x: (layer(x).sum(),), torch.ones(5, 8))
    return Runner(offload.plan(graph), "cudagraph", driver=driver), layer


def test_no_graph_is_replayed_after_a_capture_that_a_ctrl_c_ended() -> None:
    driver = Struck()
    runner, layer = sums(driver)
    first, other = torch.randn(5, 8), torch.randn(2, 8)
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


def test_a_device_that_is_lost_before_a_capture_is_no_step_that_cannot_be_captured() -> None:
    driver = Struck()
    runner, _ = sums(driver)
    runner(torch.ones(5, 8))
    driver.at_begin = lambda: driver.lose("an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(offload.DeviceLost, match="last checkpoint"):
            runner(torch.ones(5, 8))
    runner.abandon()
    driver.driver.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_another_shape_is_captured_too(device: str) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(8, 4).to(device)
    driver = counting(device)
    x = torch.ones(5, 8, device=device)
    with Runner(
        offload.plan(offload.capture(lambda x: (layer(x).sum(),), x)),
        "cudagraph",
        driver=driver,
    ) as runner:
        for _ in range(3):
            for rows in (5, 2):  # the larger one first, so that the arenas stay
                x = torch.randn(rows, 8, device=device)
                [total] = runner(x)
                assert torch.equal(total, layer(x).sum())
    assert (driver.captures, driver.replays) == (2, 4)


def hand_made(kernel: Callable[..., None], where: str = "model.py:31 in forward") -> offload.Plan:
    """x -> kernel -> y -> +1 -> z"""
    builder = offload.GraphBuilder()
    x = builder.buffer("x", 64, "input")
    y, z = builder.buffer("y", 64), builder.buffer("z", 64)
    builder.task("asks", reads=[x], writes=[y], kernel=kernel, where=where)
    builder.task("adds", [y], [z], kernel=lambda reads, writes: writes[0].copy_(reads[0] + 1))
    builder.output(z)
    return offload.plan(builder.graph())


def test_a_kernel_that_asks_for_a_value_is_named_once_and_the_step_runs_as_engine_cuda() -> None:
    def asks(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        writes[0].fill_(int(reads[0].sum()) % 7)

    made = hand_made(asks)
    with Runner(made, "cudagraph", driver=GraphTwin()) as runner:
        outputs = [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (1,)]
        with pytest.warns(RuntimeWarning, match="cannot be captured in task asks") as told:
            outputs += [runner(torch.full((64,), value, dtype=torch.uint8)) for value in (2, 3)]
    [warning] = told
    assert "model.py:31 in forward" in str(warning.message)
    assert "_local_scalar_dense" in str(warning.message)
    assert [int(z[0]) for [z] in outputs] == [64 % 7 + 1, 128 % 7 + 1, 192 % 7 + 1]
    assert "cannot be captured" in made.explain()


@pytest.mark.gpu
@NO_DEVICE
def test_a_capture_that_fails_in_mid_step_leaves_a_device_that_works(exact: None) -> None:
    """With draws before and after it. (The twin does not see into an op of somebody else's.)"""
    device = "cuda"
    theirs, ours = Trained("asking", "sgd", device), Trained("asking", "sgd", device)
    expected = theirs.eager()
    graph = ours.graph()
    with Runner(planned(graph, None), "cudagraph", driver=counting(device), poison=True) as runner:
        torch.manual_seed(3)
        losses = []
        with pytest.warns(RuntimeWarning, match=r"cannot be captured in .*asks") as told:
            for step, batch in enumerate(ours.batches):
                ours.numbers(step)
                losses += [loss.clone() for loss in runner(*batch)]
        found, wanted = ours.state(), theirs.state()
    assert len(told) == 1
    assert [n for n, loss in enumerate(losses) if not torch.equal(loss, expected[n])] == []
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []
    # And torch's own captures work on.
    again, once_more = Trained("mlp", "sgd", device), Trained("mlp", "sgd", device)
    expected = again.eager()
    driver = counting(device)
    with Runner(planned(once_more.graph(), None), "cudagraph", driver=driver) as runner:
        torch.manual_seed(3)
        for step, batch in enumerate(once_more.batches):
            once_more.numbers(step)
            assert torch.equal(runner(*batch)[0], expected[step]), step
    assert driver.replays


def test_an_exception_in_a_captured_kernel_leaves_streams_that_work() -> None:
    calls: list[int] = []

    def fails(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise ArithmeticError("only now")
        writes[0].copy_(reads[0] * 2)

    with Runner(hand_made(fails), "cudagraph", driver=GraphTwin()) as runner:
        ones = torch.ones(64, dtype=torch.uint8)
        assert int(runner(ones)[0][0]) == 3
        with pytest.warns(RuntimeWarning, match="ArithmeticError: only now"):
            assert int(runner(ones * 2)[0][0]) == 5
        assert int(runner(ones * 3)[0][0]) == 7


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
    driver, x, before = counting(), torch.randn(5, 8), getattr(owner, flag)
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


def test_a_step_whose_host_task_fails_can_be_followed_by_another() -> None:
    failing: list[bool] = []
    builder = offload.GraphBuilder()
    x = builder.buffer("x", 64, "input")
    y, z = builder.buffer("y", 64), builder.buffer("z", 64)

    def host(reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        if failing:
            raise ArithmeticError("the host's")
        writes[0].copy_(reads[0] * 2)

    builder.task("host", reads=[x], writes=[y], lane="host", kernel=host)
    builder.task("adds", [y], [z], kernel=lambda reads, writes: writes[0].copy_(reads[0] + 1))
    builder.output(z)
    graph = builder.graph()
    ones = torch.ones(64, dtype=torch.uint8)
    driver = counting()
    with Runner(offload.plan(graph), "cudagraph", driver=driver) as runner:
        assert [int(runner(ones * n)[0][0]) for n in (1, 2, 3)] == [3, 5, 7]
        failing.append(True)
        with pytest.raises(ArithmeticError, match="the host's") as caught:
            runner(ones)
        assert any("task host" in note for note in caught.value.__notes__)
        failing.clear()
        assert int(runner(ones * 4)[0][0]) == 9
    assert driver.captures == 1


@pytest.mark.parametrize("device", DEVICES)
def test_nodes_are_timed_by_engine_cuda(device: str) -> None:
    layer = nn.Linear(8, 4).to(device)
    driver = counting(device)
    x = torch.ones(2, 8, device=device)
    made = offload.plan(offload.capture(lambda x: (layer(x).sum(),), x))
    with Runner(made, "cudagraph", driver=driver) as runner:
        for _ in range(3):
            runner(x)
        runner.measure()
        runner(x)
        assert runner.trace.timed
        assert set(runner.trace.seconds_by_task()) == set(range(len(made.graph.tasks)))
    assert driver.replays == 2


def test_a_driver_that_cannot_capture_is_refused() -> None:
    made = hand_made(lambda reads, writes: writes[0].copy_(reads[0]))
    with pytest.raises(ValueError, match="captures"):
        Runner(made, "cudagraph", driver=Twin())


def test_without_a_device_engine_cudagraph_says_what_is_missing() -> None:
    made = hand_made(lambda reads, writes: writes[0].copy_(reads[0]))
    with pytest.raises(offload.OffloadError, match="captured on a cuda device"):
        Runner(made, "cudagraph")
