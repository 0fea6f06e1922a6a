"""Steps captured for a GPU, run task by task on it: eager's bits, with the model in host memory.

Three trainings of one model: the captured graph, eager, and eager once more. Where eager gives
other bits than eager nothing can be said, so torch is told to be deterministic.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import offload_models as models
from support.offload_reference import Reference as reference
from torch import nn

import offload
from offload.errors import CaptureError
from offload.optimizer.updates import update_of
from offload.tracing.capture import traced_training_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*"),
]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    filling: Any = importlib.import_module("torch.utils.deterministic")
    before = (cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory)
    cudnn.deterministic, cudnn.benchmark = True, False
    filling.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, filling.fill_uninitialized_memory = before


class Odd(nn.Module):
    """Shapes that no vector width divides, groups, holes, channels that end last."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 15, (5, 3), stride=(2, 1), padding=(1, 2), bias=False)
        self.norm = nn.BatchNorm2d(15)
        self.two = nn.Conv2d(15, 21, 3, dilation=2, groups=3)
        self.three = nn.ConvTranspose2d(21, 7, 3, stride=2)
        self.head = nn.Linear(7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.norm(self.one(x)))
        x = nn.functional.max_pool2d(self.two(x), 3, 2, ceil_mode=True)
        return self.head(self.three(x)[:, :, 1:, ::2].amax((2, 3)))


def odd_pictures() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 3, 37, 29), torch.randint(0, 10, (3,))


def bfloat16_of(case: Any) -> Any:
    def model() -> nn.Module:
        return case.model().to(torch.bfloat16)

    return type(case)(model, case.optimizer, case.batch, case.loss)


def cases() -> dict[str, Any]:
    found = models.cases()
    alone = type(found["llama"])(
        lambda: models.Llama(autocast=False), models.adamw, models.words, models.word_loss
    )
    return {
        **{name: found[name] for name in ("resnet18", "resnet18 channels last", "vit", "gpt")},
        "llama": found["llama"],
        "llama, all bfloat16": bfloat16_of(alone),
        "odd": type(alone)(Odd, models.sgd, odd_pictures),
    }


NAMES = (
    "resnet18", "resnet18 channels last", "vit", "gpt", "llama", "llama, all bfloat16", "odd",
)  # fmt: skip


def on_device(model: nn.Module) -> None:
    model.cuda()


def in_part(model: nn.Module) -> None:
    """As a plan under a budget leaves it."""
    for number, p in enumerate(model.parameters()):
        p.data = p.data.cuda() if number % 2 else p.data


def stays(model: nn.Module) -> None:
    """On the host."""


@pytest.mark.parametrize("move", [stays, in_part, on_device])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_captured_for_a_gpu_leaves_the_bits_of_eager(
    name: str, move: Callable[[nn.Module], None]
) -> None:
    case = cases()[name]
    model, optimizer, eager, plain = models.twin(case)
    again = copy.deepcopy(eager)
    move(model)
    eager.cuda()
    again.cuda()
    twice = case.optimizer(again)
    batches = case.batches()
    places = [(p.device, p.data_ptr()) for p in model.parameters()]
    graph = traced_training_step(model, case.loss, optimizer, *batches[0], device="cuda")
    assert graph.program.device.type == "cuda"
    assert places == [(p.device, p.data_ptr()) for p in model.parameters()]
    run = reference(graph)
    for number, batch in enumerate(batches):
        there = [t.cuda() for t in batch]
        losses = []
        for one, its in ((eager, plain), (again, twice)):
            torch.manual_seed(number)
            losses.append(models.eager_step(case, one, its, there))
        assert torch.equal(*losses), "eager differs from eager: nothing can be said"
        torch.manual_seed(number)
        loss, *_ = run(*batch)
        assert torch.equal(loss.cuda(), losses[0]), number
    wanted, same = models.state_of(eager, plain), models.state_of(again, twice)
    found = models.state_of(model, optimizer)
    assert found.keys() == wanted.keys()
    sure = [key for key in wanted if torch.equal(wanted[key], same[key])]
    assert sure == list(wanted), "eager differs from eager: nothing can be said"
    assert not [key for key in wanted if not torch.equal(found[key].cpu(), wanted[key].cpu())]


@pytest.mark.parametrize("fused", [None, True])
def test_the_update_is_that_of_a_gpu_wherever_the_parameter_is(fused: bool | None) -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(33, 17), torch.randn(5, 33)
    other = copy.deepcopy(net).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1, fused=fused)
    plain = torch.optim.AdamW(other.parameters(), 0.1, fused=fused)
    traced_training_step(net, _square, optimizer, x, x[:, :17], device="cuda")
    assert all(p.device.type == "cpu" for p in net.parameters())
    assert all(t.device.type == "cpu" for s in optimizer.state.values() for t in s.values())
    gradients = [torch.randn_like(p) for p in net.parameters()]
    for p, q, g in zip(net.parameters(), other.parameters(), gradients, strict=True):
        q.grad = g.cuda()
        update = update_of(optimizer, 0, p, torch.device("cuda", 0))
        there = p.detach().cuda()
        update(there, g.cuda(), *(optimizer.state[p][key].cuda() for key in update.states))
        p.data.copy_(there)
    plain.step()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.cuda(), q)


def _square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def test_capturing_a_model_on_the_host_takes_no_memory_of_the_device() -> None:
    wide = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))  # 64 MiB, and twice for Adam
    optimizer = torch.optim.AdamW(wide.parameters())
    x = torch.randn(2, 2048)
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    traced_training_step(wide, _square, optimizer, x, x, device="cuda")
    assert torch.cuda.max_memory_allocated() - before < MIB


def test_a_seed_within_a_step_is_seen() -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(y, 0.5)
        torch.cuda.manual_seed(0)
        return _square(nn.functional.dropout(y, 0.5), target)

    state = torch.cuda.get_rng_state()
    with pytest.raises(CaptureError, match="the step sets the state of the random numbers"):
        traced_training_step(
            net, loss, optimizer, torch.ones(2, 3), torch.ones(2, 3), device="cuda"
        )
    assert torch.equal(torch.cuda.get_rng_state(), state)


class Normed(nn.Module):
    """Batch norms in half precision, each with another reserve that the fakes do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 * n, 8 * n + 8, 1) for n in range(1, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 * n + 8) for n in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = norm(conv(x))
            return x.float().square().mean((1, 2, 3))


@pytest.mark.parametrize("pixels", [1, 4])
def test_reserves_are_learned_at_once_and_given_to_no_kernel_before(pixels: int) -> None:
    ours, theirs = (model := Normed().cuda()), copy.deepcopy(model)
    mine, other = (torch.optim.SGD(net.parameters(), 0.1) for net in (ours, theirs))
    x, y = torch.randn(4, 8, pixels, pixels, device="cuda"), torch.randn(4, device="cuda")
    graph = offload.capture_training_step(ours, nn.functional.mse_loss, mine, x, y)
    with offload.Runner(offload.plan(graph)) as runner:
        for _ in range(3):
            other.zero_grad()
            loss = nn.functional.mse_loss(theirs(x), y)
            loss.backward()
            other.step()
            assert torch.equal(runner(x, y)[0], loss)
