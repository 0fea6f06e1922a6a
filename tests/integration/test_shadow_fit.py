"""An update of a module is recorded for a device that is not here. Nothing real is made."""

import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from support.shadow_graphs import captured_graphs, describe

from offload import CaptureError, OffloadError, TaskGraph
from offload.graph.taskgraph import UPDATE, Role
from trainers import OffloadStrategy
from trainers.offloading.shadow_fit import record_update

pytestmark = [
    pytest.mark.usefixtures("core"),
    *(pytest.mark.filterwarnings(line) for line in ol.QUIET),
]


@pytest.fixture
def captured() -> Iterator[list[TaskGraph]]:
    with captured_graphs() as graphs:
        yield graphs


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adam"])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}],
    ids=str,
)
def test_its_graph_is_that_of_a_real_fit(
    optimizer: str, options: dict[str, Any], captured: list[TaskGraph]
) -> None:
    def make() -> L.LightningModule:
        return ol.Module(optimizer)

    [graph] = record_update(make(), ol.data(24, 8), "cpu", **options)
    ol.train(OffloadStrategy("100%"), make, loader=ol.data(24, 8), validate=False, **options)
    assert describe(graph) in [*map(describe, captured)]


def test_accumulated_batches_are_one_graph_each(captured: list[TaskGraph]) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    graphs = record_update(ol.Module(), ol.data(24, 8), "cpu", **options)
    ol.train(OffloadStrategy("100%"), loader=ol.data(24, 8), validate=False, **options)
    assert [describe(graph) for graph in graphs] == [describe(graph) for graph in captured[-3:]]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_module_is_left_alone(device: str) -> None:
    module = ol.Module()
    module.head.weight.grad = torch.ones_like(module.head.weight)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    addresses = [tensor.data_ptr() for tensor in module.parameters()]
    record_update(module, ol.data(), device)
    assert [tensor.data_ptr() for tensor in module.parameters()] == addresses
    assert all(torch.equal(tensor, before[n]) for n, tensor in module.state_dict().items())
    assert torch.equal(module.head.weight.grad, torch.ones_like(module.head.weight))
    assert module.device == torch.device("cpu")
    trained, again = ol.train(make=lambda: module), ol.train()
    assert ol.differences(trained, again) != [], "it has its own first weights, and trains"


def test_a_card_that_is_absent_has_a_graph_with_autocast_and_clipping() -> None:
    options = {"precision": "bf16-mixed", "gradient_clip_val": 1.0}
    [graph] = record_update(ol.Module(), ol.data(), "cuda:0", (9, 0), **options)
    names = {task.name for task in graph.tasks}
    assert {"_to_copy.default", "native_dropout.default", "mm.default"} <= names
    assert graph.program.device == torch.device("cuda", 0)
    states = [b for b in graph.buffers if b.role is Role.STATE]
    assert len(states) == 2 * len([*ol.Module().parameters()])


class Late(ol.Module):
    """Its large layer is made when the trainer asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.wide: torch.nn.Linear | None = None

    def configure_model(self) -> None:
        if self.wide is None:
            self.wide = torch.nn.Linear(12, 1 << 26)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.wide is not None
        return super().training_step(batch, batch_idx) + self.wide(batch[0]).mean()


def test_a_layer_of_configure_model_is_never_made() -> None:
    module = Late()
    [graph] = record_update(module, ol.data(), "cuda:0")
    assert max(b.nbytes for b in graph.buffers) == 12 * 4 << 26
    assert module.wide is None


class ByHand(ol.Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_step_that_optimizes_by_hand_is_recorded() -> None:
    [graph] = record_update(ByHand(), ol.data(), "cuda:0")
    assert UPDATE in {task.phase for task in graph.tasks}


class Asks(ol.Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else loss * 2


def test_a_step_that_asks_for_its_loss_is_refused_with_its_line() -> None:
    with pytest.raises(CaptureError, match=r"test_shadow_fit.py:\d+ in training_step: the step"):
        record_update(Asks(), ol.data(), "cuda:0")
    record_update(ol.Module(), ol.data(), "cuda:0")  # another one is recorded after it


@pytest.mark.filterwarnings("ignore:Total length of")
def test_what_cannot_be_estimated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    locked, foreign = ol.Module(), ol.Module()
    vars(locked)["lock"] = threading.Lock()
    with pytest.raises(OffloadError, match=r"Module cannot be copied.*within\s+torch.device"):
        record_update(locked, ol.data(), "cpu")
    vars(foreign)["configure_optimizers"] = lambda: torch.optim.SGD(foreign.parameters())
    with pytest.raises(OffloadError, match="parameters that are not the module's"):
        record_update(foreign, ol.data(), "cpu")
    with pytest.raises(OffloadError, match="no batch"):
        record_update(ol.Module(), [], "cpu")
    monkeypatch.setattr("trainers.offloading.planned_strategy.why_no_core", lambda: "no compiler")
    with pytest.raises(CaptureError, match="cannot be estimated here: no compiler"):
        record_update(ol.Module(), ol.data(), "cpu")
