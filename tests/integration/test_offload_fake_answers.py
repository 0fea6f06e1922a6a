"""Kernels whose fakes are wrong: what is learned by measuring them, and what is refused."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from products import every_pair, every_value
from torch import nn
from torch.nn import functional

import offload
from offload import CaptureError, Runner
from offload.memory import cpu_shim as shim
from offload.tracing import capture
from offload.tracing.capture import capture as capture_by_fakes

PICTURE = (2, 4, 8, 8)


def at_every_budget(
    model: nn.Module, batch: Callable[[], tuple[torch.Tensor, ...]], draws: int = 0
) -> None:
    """Three steps have eager's bits, without a budget, under the least one, and in between."""
    for share in (None, 0.0, 0.5):
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        mine, other = (torch.optim.Adam(m.parameters(), 0.05) for m in (ours, theirs))
        batches = [batch() for _ in range(3)]
        graph = offload.capture_training_step(ours, functional.mse_loss, mine, *batches[0])
        plan = offload.plan(graph)
        if share is not None:
            with pytest.raises(offload.BudgetTooSmall) as refused:
                offload.plan(graph, budget=64)
            least = refused.value.needed
            plan = offload.plan(graph, budget=least + int(share * (plan.peak_bytes - least)))
        torch.manual_seed(draws)
        with Runner(plan, poison=True) as runner:
            losses = [runner(*b)[0] for b in batches]
        torch.manual_seed(draws)
        for (*x, y), loss in zip(batches, losses, strict=True):
            other.zero_grad()
            expected = functional.mse_loss(theirs(*x), y)
            expected.backward()
            other.step()
            assert torch.equal(loss, expected)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value), name


# ---- LSTMs of a CPU: the workspace's size, and whether autograd is on --------------------------


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, **options)
        self.out = nn.Linear(6 * (1 + options.get("bidirectional", False)), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, last = self.lstm(x)
        with torch.no_grad():
            again, _ = self.lstm(x.flip(0), last)
        return self.out(found + again)


def sequence() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 5), torch.randn(4, 3, 3)


@pytest.mark.parametrize(
    ("layers", "both_ways", "batch_first", "dropout"),
    every_pair((1, 2), (False, True), (False, True), (0.0, 0.4)),
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_an_lstm_has_eagers_bits_however_often_it_is_captured(
    layers: int, both_ways: bool, batch_first: bool, dropout: float
) -> None:
    options = {"num_layers": layers, "bidirectional": both_ways, "dropout": dropout}
    model = Recurrent(**options, batch_first=batch_first)
    at_every_budget(model, sequence)


def test_an_lstm_that_trains_in_part_or_in_bfloat16_has_eagers_bits() -> None:
    model = Recurrent(num_layers=2)
    model.lstm.weight_ih_l0.requires_grad_(False)
    at_every_budget(model, sequence)
    at_every_budget(Recurrent().bfloat16(), lambda: tuple(t.bfloat16() for t in sequence()))  # type: ignore[arg-type]


def test_an_lstm_is_captured_for_another_batch_too() -> None:
    ours = Recurrent(num_layers=2, dropout=0.3)
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.SGD(m.parameters(), 0.1) for m in (ours, theirs))
    short, long = sequence(), (torch.randn(6, 2, 5), torch.randn(6, 2, 3))
    graph = offload.capture_training_step(ours, functional.mse_loss, mine, *short)
    with Runner(offload.plan(graph)) as runner:
        for n, (x, y) in enumerate((short, long, short)):
            torch.manual_seed(n)
            found, *_ = runner(x, y)
            torch.manual_seed(n)
            other.zero_grad()
            loss = functional.mse_loss(theirs(x), y)
            loss.backward()
            other.step()
            assert torch.equal(found, loss)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_lstm_in_evaluation_has_eagers_bits(mode: Any) -> None:
    model, (x, _) = Recurrent(num_layers=2).eval(), sequence()

    def step(x: torch.Tensor) -> torch.Tensor:
        with mode():
            return model(x).detach()

    with Runner(offload.plan(capture_by_fakes(step, x))) as runner:
        assert torch.equal(runner(x)[0], step(x))


def test_packed_sequences_are_refused_with_the_line() -> None:
    lstm, (x, _) = nn.LSTM(5, 6), sequence()

    def step(x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 2]))
        return lstm(packed)[1][0].detach()

    with pytest.raises(CaptureError, match=r"in step: the shape of a result depends on values"):
        capture_by_fakes(step, x)


# ---- any op with a fake that errs --------------------------------------------------------------


def empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


Fakes = dict[str, Callable[[torch.Tensor], Any]]
FAKES: Fakes = {
    "size": lambda x: (empty_like(x), x.new_empty(0)),
    "type": lambda x: (empty_like(x), x.new_empty(7, dtype=torch.float64)),
    "strides": lambda x: (empty_like(x).transpose(-1, -2).contiguous().transpose(-1, -2), seven(x)),
    "memory": lambda x: (both := empty_like(x), both[(0,) * (x.dim() - 1)][:7]),
}


def seven(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(7)


@pytest.fixture(params=[True, False], ids=["shim", "no shim"])
def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr("offload.measuring.profiling.available_on", lambda device: None)
        monkeypatch.setattr("offload.memory.placement.available_on", lambda device: None)
    elif shim.available() is None:
        pytest.skip(shim.why_not())


@pytest.mark.parametrize("wrong", [*FAKES])
def test_what_a_fake_says_wrong_is_learned_from_the_kernel(wrong: str, placed: None) -> None:
    with torch.library._scoped_library("perfect_learned", "FRAGMENT") as library:
        library.define("errs(Tensor x) -> (Tensor, Tensor)")
        library.impl("errs", lambda x: (x * 2, x.flatten()[:7] + 1), "CompositeExplicitAutograd")
        torch.library.register_fake("perfect_learned::errs", FAKES[wrong], lib=library)
        errs = torch.ops.perfect_learned.errs

        def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            one, other = errs(x)
            one.add_(1)
            return one, other * 3

        x = torch.randn(3, 4, 8)
        with Runner(offload.plan(capture_by_fakes(step, x))) as runner:
            for found, expected in zip(runner(x), step(x), strict=True):
                assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_all_wrong_fakes_of_a_step_are_learned_together_and_never_given_on(
    monkeypatch: pytest.MonkeyPatch, placed: None
) -> None:
    """Twice as many shapes as traces are tried, each with a reserve whose fake is empty."""
    traces, given_on = 0, set[bool]()
    real = capture._measured

    def counted(*given: Any) -> Any:
        nonlocal traces
        traces += 1
        return real(*given)

    def there(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x + 1

    def back(grad: torch.Tensor, reserve: torch.Tensor) -> torch.Tensor:
        given_on.add(reserve.shape == grad.shape)
        return grad * reserve

    monkeypatch.setattr(capture, "_measured", counted)
    with torch.library._scoped_library("perfect_reserves", "FRAGMENT") as library:
        library.define("there(Tensor x) -> (Tensor, Tensor)")
        library.define("back(Tensor grad, Tensor reserve) -> Tensor")
        library.impl("there", there, "CompositeExplicitAutograd")
        library.impl("back", back, "CompositeExplicitAutograd")
        name = "perfect_reserves::there", "perfect_reserves::back"
        torch.library.register_fake(name[0], lambda x: (empty_like(x), x.new_empty(0)), lib=library)
        torch.library.register_fake(name[1], lambda grad, _: empty_like(grad), lib=library)
        ops = torch.ops.perfect_reserves

        def step(x: torch.Tensor) -> torch.Tensor:
            made = [ops.there(x[:n]) for n in range(1, x.numel())]
            return torch.cat([ops.back(y, reserve) for y, reserve in made])

        x = torch.randn(2 * capture.ATTEMPTS)
        graph = capture_by_fakes(step, x)
        assert traces <= 3 and given_on == {True}
        assert not [note for note in graph.notes if "did not run" in note]
        with Runner(offload.plan(graph)) as runner:
            assert torch.equal(runner(x)[0], step(x))


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "never the same": (lambda x: x.new_empty(next(SIZES)), r"result 0 is torch.float32 \(\d+,\)"),
    "not made": (lambda x: None, "result 0 is not made, and the trace has one"),
    "an argument": (lambda x: x, "result 0 lies in an argument"),
}
SIZES = itertools.count(20)


@pytest.mark.parametrize("what", [*REFUSED])
def test_what_cannot_be_learned_is_refused_by_op_and_line(what: str, placed: None) -> None:
    kernel, message = REFUSED[what]
    with torch.library._scoped_library("perfect_refused", "FRAGMENT") as library:
        library.define("errs(Tensor x) -> Tensor")
        library.impl("errs", kernel, "CompositeExplicitAutograd")
        torch.library.register_fake("perfect_refused::errs", empty_like, lib=library)
        errs = torch.ops.perfect_refused.errs

        def step(x: torch.Tensor) -> torch.Tensor:
            return errs(x).add_(1)

        line = rf"test_offload_fake_answers.py:\d+ in step: perfect_refused.errs.default: {message}"
        with pytest.raises(CaptureError, match=line):
            capture_by_fakes(step, torch.ones(8))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "log sigmoid": functional.logsigmoid,
    "glu": lambda x: functional.glu(x, 1),
    "roll": lambda x: x.roll(1, 2),
}


class Laid(nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PICTURE[1:]))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.op(x.to(memory_format=torch.channels_last) * self.weight)
        return functional.avg_pool2d(x, 2).mean((1, 2, 3))


@pytest.mark.parametrize("op", every_value([*LAYOUTS]))
def test_kernels_that_lay_out_pictures_otherwise_than_their_fakes_have_eagers_bits(op: str) -> None:
    at_every_budget(Laid(LAYOUTS[op]), lambda: (torch.randn(PICTURE), torch.randn(2)))
