"""Models that are trained in live steps on a GPU, on the host or there already: eager's bits.

Three trainings of one model: within a budget, eager, and eager once more. Where eager gives other
bits than eager nothing can be said, so torch is told to be deterministic.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import offload_models as models
from torch import nn

import offload
from offload import Runner
from offload.errors import CaptureError
from offload.live.core import why_no_core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deterministic.*"),
]
STEPS = 4


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    if why := why_no_core():
        pytest.skip(why)
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


class Normed(nn.Module):
    """Batch norms in half precision, each with a reserve of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 * n, 8 * n + 8, 1) for n in range(1, 4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 * n + 8) for n in range(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = norm(conv(x))
        return x.float().mean((2, 3))


def cases() -> dict[str, models.Case]:
    def bfloat16() -> nn.Module:
        return models.Llama(autocast=False).to(torch.bfloat16)

    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def odd() -> models.Batch:
        return torch.randn(3, 3, 37, 29), torch.randint(0, 10, (3,))

    def normed() -> models.Batch:
        return torch.randn(4, 8, 4, 4), torch.randint(0, 32, (4,))

    found = models.cases()
    kept = ("resnet18", "resnet18 channels last", "vit", "gpt", "llama")
    return {name: found[name] for name in kept} | {
        "llama, all bfloat16": models.Case(bfloat16, models.adamw, models.words, models.word_loss),
        "odd": models.Case(Odd, models.sgd, odd),
        "normed": models.Case(Normed, fused, normed),
    }


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("name", cases())
def test_a_model_on_the_host_or_the_gpu_has_the_bits_of_eager_there(name: str, place: str) -> None:
    case = cases()[name]
    model, _ = case.made()
    eager, again = copy.deepcopy(model).cuda(), copy.deepcopy(model).cuda()
    model.to(place)
    optimizers = [case.optimizer(each) for each in (model, eager, again)]
    batches = [tuple(t.cuda() for t in batch) for batch in case.batches(STEPS)]

    def trained(net: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            losses.append(models.eager_step(case, net, optimizer, batch))
        return losses

    wanted, same = trained(eager, optimizers[1]), trained(again, optimizers[2])
    with offload.within("80%", model, optimizers[0], device="cuda:0") as within:
        found = trained(model, optimizers[0])
        optimizers[0].zero_grad()
    assert within.planned_steps > 0
    assert {p.device.type for p in model.parameters()} == {place}
    for losses, net, optimizer, said in (
        (same, again, optimizers[2], "eager differs from eager: nothing can be said"),
        (found, model, optimizers[0], "a step within a budget differs"),
    ):
        assert all(map(torch.equal, losses, wanted)), said
        state, end = models.state_of(net, optimizer), models.state_of(eager, optimizers[1])
        assert state.keys() == end.keys()
        assert not [key for key in end if not torch.equal(state[key].cpu(), end[key].cpu())], said


# ---- what a captured function does on the host ---------------------------------------------------

TABLE, SCALE = torch.arange(4.0), torch.tensor(3.0)


def test_what_a_function_makes_on_the_host_is_captured_for_a_gpu() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        made = torch.full((4, 4), -1.0).triu(1)
        made[0, 0] = 7
        made = made.to(x.device, torch.float64) + torch.arange(4).to(x.device)
        return x * torch.tensor(0.5) + made

    graph = offload.capture(step, torch.ones(4, 4), device="cuda")
    calls = [call for task in graph.tasks for call in getattr(task.kernel, "calls", ())]
    assert sum(bool(getattr(call.op, "varying", ())) for call in calls) == 1  # no CUDA graph has it
    with Runner(offload.plan(graph)) as runner:
        for rows in (4, 1, 4):
            x = torch.randn(rows, 4)
            assert torch.equal(runner(x)[0].cuda(), step(x.cuda()))


REFUSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to the host": lambda x: x.cpu() + 1,
    "a draw": lambda x: x + torch.randn(4).to(x.device),
    "a number of the user's": lambda x: x * SCALE,
    "computed from it": lambda x: x + (SCALE + 1),
    "in place": lambda x: x + SCALE.add_(1),
    "several numbers in place": lambda x: x + TABLE.add_(1).to(x.device),
    "a table of the user's": lambda x: x + TABLE.to(x.device),
    "a part of it": lambda x: x + TABLE[1:2].to(x.device),
    "several numbers": lambda x: x + torch.arange(4),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_work_on_the_host_is_refused_with_the_line(what: str) -> None:
    before = TABLE.clone()
    with pytest.raises(CaptureError, match=r"test_live_models_gpu.py:\d+"):
        offload.capture(REFUSED[what], torch.ones(4), device="cuda")
    assert SCALE == 3
    assert torch.equal(TABLE, before)
