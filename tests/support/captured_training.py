"""Small models that are trained under engine `cudagraph`, and drivers that count its captures."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload import Runner
from offload.running.drivers.cuda_graph import GraphCuda

CUDA = torch.device("cuda")
STEPS = 7
RATES = (0.02, 0.01, 0.003, 0.03, 0.001, 0.02, 0.005)


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

    def __init__(self, model: str, optimizer: str) -> None:
        torch.manual_seed(1)
        made, batch = MODELS[model]
        self.model = made().to(CUDA)
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        torch.manual_seed(2)
        self.batches = [tuple(t.to(CUDA) for t in batch()) for _ in range(STEPS)]

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


def counting() -> Any:
    return Counting(GraphCuda(CUDA))


def sums(driver: Any) -> tuple[Runner, nn.Linear]:
    """Of batches of any number of rows."""
    layer = nn.Linear(8, 4).to(CUDA)
    graph = offload.capture(lambda x: (layer(x).sum(),), torch.ones(5, 8, device=CUDA))
    return Runner(offload.plan(graph), "cudagraph", driver=driver), layer
