"""Small models for engine `cudagraph`, and drivers that count its captures."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support import offload_training
from support.offload_models import Case
from support.offload_training import Training
from torch import nn
from torch.nn import functional

import offload
from offload import Runner
from offload.running.drivers.cuda_graph import GraphCuda

CUDA = torch.device("cuda")


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


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


CASES = {
    "mlp": Case(Mlp, sgd, vectors),
    "mlp, adamw": Case(Mlp, lambda m: torch.optim.AdamW(m.parameters()), vectors),
    "mlp, fused": Case(Mlp, lambda m: torch.optim.Adam(m.parameters(), fused=True), vectors),
    "asking": Case(Asking, sgd, vectors),
    "convolutional": Case(Convolutional, sgd, pictures),
}


def trained(name: str) -> Training:
    return offload_training.trained(CASES[name], "cuda")


class CountingDriver(GraphCuda):
    """Counts what is captured and replayed."""

    def __init__(self) -> None:
        super().__init__(CUDA)
        self.captures = self.replays = 0

    def end_capture(self) -> Callable[[], object]:
        graph = super().end_capture()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            graph()

        return replay


def sums(driver: GraphCuda) -> tuple[Runner, nn.Linear]:
    """Of batches of any number of rows."""
    layer = nn.Linear(8, 4).to(CUDA)
    graph = offload.capture(lambda x: (layer(x).sum(),), torch.ones(5, 8, device=CUDA))
    return Runner(offload.plan(graph), "cudagraph", driver=driver), layer
