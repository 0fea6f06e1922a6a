"""Kernels, buffers and generators that are unlike others: in live steps they leave eager's bits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import offload_models as models
from support import offload_training as training
from support.live_training import LiveTraining
from support.products import every_pair, every_value
from torch import nn
from torch.ao import quantization
from torch.nn import functional

import offload
from offload.errors import GraphError
from offload.lowering.pointwise_groups import group_tasks

pytestmark = pytest.mark.usefixtures("core")

mse = functional.mse_loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.05)


def run_at_every_budget(model: Callable[[], nn.Module], batch: Callable[[], models.Batch]) -> None:
    trained = training.trained(models.Case(model, adam, batch, mse))
    for seed, share in enumerate((1.0, 0.5, 0.0)):
        trained.run(trained.planned(share, "auto"), "threads", seed)


class Recurrent(nn.Module):
    """An LSTM with gradients, and without: its kernels keep another workspace then."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, **options)
        self.out = nn.Linear(6 * (1 + options.get("bidirectional", False)), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, last = self.lstm(x)
        with torch.no_grad():
            again, _ = self.lstm(x.flip(0), last)
        return self.out(found + again)


def sequence() -> models.Batch:
    return torch.randn(4, 3, 5), torch.randn(4, 3, 3)


@pytest.mark.parametrize(
    ("layers", "both_ways", "batch_first", "dropout"),
    every_pair((1, 2), (False, True), (False, True), (0.0, 0.4)),
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_an_lstm_has_eagers_bits(
    layers: int, both_ways: bool, batch_first: bool, dropout: float
) -> None:
    options = {"num_layers": layers, "bidirectional": both_ways, "dropout": dropout}
    run_at_every_budget(lambda: Recurrent(**options, batch_first=batch_first), sequence)


def test_an_lstm_that_trains_in_part_or_in_bfloat16_has_eagers_bits() -> None:
    def in_part() -> nn.Module:
        model = Recurrent(num_layers=2)
        model.lstm.weight_ih_l0.requires_grad_(False)
        return model

    run_at_every_budget(in_part, sequence)
    run_at_every_budget(
        lambda: Recurrent().bfloat16(), lambda: tuple(t.bfloat16() for t in sequence())
    )


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "replicate": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "log sigmoid": functional.logsigmoid,
    "glu": lambda x: functional.glu(x, 1),
    "roll": lambda x: x.roll(1, 2),
}
PICTURE = (2, 4, 8, 8)


class Laid(nn.Module):
    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(PICTURE[1:]))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.op(x.to(memory_format=torch.channels_last) * self.weight)
        return functional.avg_pool2d(x, 2).mean((1, 2, 3))


@pytest.mark.parametrize("op", every_value([*LAYOUTS]))
def test_kernels_that_lay_out_pictures_in_their_own_way_have_eagers_bits(op: str) -> None:
    run_at_every_budget(lambda: Laid(LAYOUTS[op]), lambda: (torch.randn(PICTURE), torch.randn(2)))


# ---- live and eager, side by side ----------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def same_in_both(make: Callable[[], nn.Module], batch: Callable[[], models.Batch]) -> None:
    """Four steps, eagerly and by plans: losses, the module, and the generators."""
    case = models.Case(make, sgd, batch, mse)
    found = []
    for budget in (None, "100%", "80%"):
        net, optimizer = case.made()
        batches = case.batches(4)
        if budget is None:
            losses = [models.eager_step(case, net, optimizer, each) for each in batches]
        else:
            with LiveTraining(net, mse, optimizer, budget=budget) as step:
                losses = [step(*each)[0] for each in batches]
                assert step.session.planned_steps == 4
        own = [g.get_state() for g in getattr(net, "generators", ())]
        state = [*losses, *net.state_dict().values(), *own, torch.get_rng_state()]
        found.append([tensor.tolist() for tensor in state])
    assert found[1:] == [found[0]] * 2


class Keeps(nn.Module):
    """It changes a buffer by more than its values."""

    buffer: torch.Tensor
    other: torch.Tensor
    empty: torch.Tensor

    def __init__(self, change: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.register_buffer("empty", torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return x * self.weight + self.other


CHANGES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "resized": lambda m, x: m.buffer.resize_(5).zero_(),
    "resized as": lambda m, x: m.buffer.resize_as_(x[:2]),
    "resized to what it is": lambda m, x: torch.add(x, 1, out=m.buffer.resize_(3)),
    "grown from nothing": lambda m, x: m.empty.resize_(len(m.empty) + 99).fill_(2),
    "set": lambda m, x: m.buffer.set_(x),
    "data": lambda m, x: setattr(m.buffer, "data", x),
    "replaced": lambda m, x: setattr(m, "buffer", 0.9 * m.buffer + x),
    "replaced by a copy": lambda m, x: m._buffers.update(buffer=nn.Parameter(m.other, False)),
    "replaced for good": lambda m, x: setattr(m, "buffer", m.other),
}


@pytest.mark.parametrize("how", [*CHANGES])
def test_a_buffer_that_a_step_resizes_or_replaces_has_eagers_bits(how: str) -> None:
    same_in_both(lambda: Keeps(CHANGES[how]), lambda: (torch.randn(3), torch.randn(3)))


@pytest.mark.filterwarnings("ignore:.*(torch.ao|reduce_range|deprecated)")
def test_observers_of_quantization_that_grow_at_their_first_call_have_eagers_bits() -> None:
    def observed() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).train()
        net.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return quantization.prepare_qat(net)

    same_in_both(observed, lambda: (torch.randn(4, 8), torch.randn(4, 3)))


Op = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
OPS: dict[str, Op] = {
    "randn": lambda x, g: x + torch.randn(x.shape, generator=g),
    "rand like": lambda x, g: x + torch.rand_like(x, generator=g),
    "randint": lambda x, g: x + torch.randint(0, 9, (8,), generator=g),
    "randperm": lambda x, g: x[:, torch.randperm(8, generator=g)],
    "normal": lambda x, g: torch.normal(x, x.abs(), generator=g),
    "normal_": lambda x, g: x + torch.empty(8).normal_(generator=g),
    "uniform_": lambda x, g: x + nn.init.uniform_(torch.empty(8), generator=g),
    "exponential_": lambda x, g: x + torch.empty(8).exponential_(generator=g),
    "bernoulli": lambda x, g: x * torch.bernoulli(x.sigmoid(), generator=g),
    "bernoulli_": lambda x, g: x * torch.empty(8).bernoulli_(0.3, generator=g),
    "multinomial": lambda x, g: x + torch.multinomial(x.abs() + 0.1, 8, generator=g),
    "poisson": lambda x, g: x + torch.poisson(x.abs(), generator=g),
    "seeded": lambda x, g: x + torch.randn(8, generator=g.manual_seed(7)),
    "made": lambda x, g: x + torch.randn(8, generator=torch.Generator().manual_seed(3)),
    "its state": lambda x, g: x + g.get_state()[:8] + g.initial_seed(),
}


class Noisy(nn.Module):
    """The op draws before each layer, from one generator and from another, and dropout after it."""

    def __init__(self, op: Op, own: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        made = [torch.Generator().manual_seed(n) for n in range(own)]
        self.op, self.generators = op, [*made, *[torch.default_generator] * (2 - own)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, generator in zip(self.layers, self.generators, strict=True):
            x = functional.dropout(layer(self.op(x, generator)).tanh(), 0.2)
            x = x + torch.rand(8, generator=self.generators[0])
        return x


@pytest.mark.parametrize(("op", "own"), every_pair([*OPS], (0, 1, 2)))
def test_draws_from_own_generators_are_eagers_and_so_are_their_states(op: str, own: int) -> None:
    same_in_both(lambda: Noisy(OPS[op], own), lambda: (torch.randn(4, 8), torch.randn(4, 8)))


def test_a_kernel_whose_result_is_never_of_the_same_size_is_refused_by_name() -> None:
    sizes = itertools.count(20)
    with torch.library._scoped_library("perfect_live", "FRAGMENT") as library:
        library.define("grows(Tensor x) -> Tensor")
        library.impl("grows", lambda x: x.new_ones(next(sizes)), "CompositeExplicitAutograd")
        net = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return mse(out, y) + torch.ops.perfect_live.grows(out.detach()).sum()

        with (
            pytest.raises(GraphError, match=r"output 0 is .* \(\d+,\), but the plan has"),
            LiveTraining(net, loss, optimizer) as step,
        ):
            step(torch.ones(2, 3), torch.ones(2, 3))


def test_an_error_of_a_kernel_in_a_group_of_small_ones_leaves_the_step() -> None:
    """`index_select` finds out when it runs that there is no such row."""
    table, rows = torch.randn(4, 3), torch.tensor([0, 3])

    def step(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (table * 2).index_select(0, rows).relu().sum()

    plan = offload.plan(group_tasks(offload.capture(step, table, rows), any_kind=True))
    assert max(len(task.kernel.calls) for task in plan.graph.tasks) > 1
    with offload.Runner(plan) as runner:
        assert torch.equal(runner(table, rows)[0], step(table, rows))
        with pytest.raises(IndexError, match="out of range"):
            runner(table, torch.tensor([0, 4]))
        assert torch.equal(runner(table, rows)[0], step(table, rows))


def test_a_row_that_is_not_there_is_an_error_even_if_nobody_needs_it() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rows = torch.tensor([0, 1])
    with pytest.raises(IndexError), offload.within("100%", net, optimizer):
        for number in range(4):
            loss = net(torch.ones(3, 2)).sum()
            torch.ones(3, 2).index_select(0, rows + 5 * (number == 3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
