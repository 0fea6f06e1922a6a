"""Examples of README.md, docs/ run as they are shown."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offload
from perfect.config.grid import Grid
from perfect.config.grid_reader import read_recipe
from perfect.config.yaml_reader import read_config

ROOT = Path(__file__).parents[2]


def block_with(words: str, page: str = "docs/offload.md") -> str:
    """The one python block of a page that has these words."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


def test_a_captured_function_adds_up_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module, loss_fn = nn.Linear(4, 2), nn.CrossEntropyLoss()
    inputs, targets = torch.randn(8, 4), torch.randint(2, (8,))
    once = torch.autograd.grad(loss_fn(module(inputs), targets), [*module.parameters()])
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    given: dict[str, Any] = {
        "module": module,
        "loss_fn": loss_fn,
        "inputs": inputs,
        "targets": targets,
        "loader": [(inputs, targets)] * 3,
        "print": lambda *_: None,
    }
    exec(block_with("offload.capture("), given)
    for p, gradient in zip(module.parameters(), once, strict=True):
        assert torch.allclose(p.grad, 3 * gradient)
    assert (tmp_path / "memory.svg").stat().st_size and (tmp_path / "trace.json").stat().st_size


def test_the_graph_by_hand_adds_one_on_each_of_two_devices() -> None:
    given: dict[str, Any] = {"offload": offload, "torch": torch}
    exec(block_with("offload.GraphBuilder()", "docs/offload/by-hand.md"), given)
    assert torch.equal(given["z"], torch.full((4096,), 2, dtype=torch.uint8))


def readmes_yaml() -> tuple[str, str]:
    """The YAML of a run, and the lines that make a grid of it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    sections = re.findall(r"`((?:grid|fleet): \{.*?\})`", readme)
    assert [section.split(":")[0] for section in sections] == ["grid", "fleet"]
    return shown, "\n".join(sections)


def test_the_readmes_yaml_is_one(tmp_path: Path) -> None:
    shown, _ = readmes_yaml()
    (tmp_path / "run.yaml").write_text(shown, encoding="utf-8")
    config, _ = read_config(tmp_path / "run.yaml")
    assert [phase.name for phase in config.phases] == ["pretrain", "finetune"]
    assert config.offload is not None and config.offload.budget


def test_the_readmes_grid_is_one_below_that_yaml(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("".join(readmes_yaml()), encoding="utf-8")
    grid, _ = read_recipe(tmp_path / "grid.yaml")
    assert isinstance(grid, Grid) and len(grid.points) == 4


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = nn.Linear(4, 2), lr

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs.flatten(1)), targets)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", self.training_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


TOO_FEW = "ignore:.*does not have many workers", "ignore:The number of training batches"


def make_loader() -> DataLoader[Any]:
    draws = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(32, 1, 2, 2, generator=draws), torch.arange(32) % 2)
    return DataLoader(samples, batch_size=8)


@pytest.mark.filterwarnings(*TOO_FEW)
def test_the_fleet_of_the_first_example_stops_two_jobs_of_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {
        "Net": Net,
        "make_loader": make_loader,
        "make_val_loader": make_loader,
        "print": lambda *_: None,
    }
    exec(block_with("Halving(", "docs/fleet.md").replace("first=500", "first=4"), given)
    ends = {name: job.state for name, job in given["result"].jobs.items()}
    assert ends.pop(given["result"].best) == "finished"
    assert [*ends.values()] == ["stopped", "stopped"]


@pytest.mark.filterwarnings(*TOO_FEW, "ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("page", "words", "shorter"),
    [
        ("README.md", "LoaderCallback(", {"max_epochs=90": "max_epochs=6"}),
        (
            "docs/loader/plugging-in.md",
            "PhaseSwitch(phases)",
            {"passes=40": "passes=2", "passes=80": "passes=2", "128": "8"},
        ),
        ("README.md", "OffloadStrategy(", {"Trainer(": "Trainer(max_epochs=1, "}),
    ],
)
def test_the_examples_with_a_trainer_train(page: str, words: str, shorter: dict[str, str]) -> None:
    def trainer(**given: Any) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **given,
        )  # fmt: skip

    module = Net()
    before = module.net.weight.detach().clone()
    given: dict[str, Any] = {
        "L": SimpleNamespace(Trainer=trainer),
        "module": module,
        "dataset": make_loader().dataset,
        "dataloader": make_loader(),
        "loader": make_loader(),
        "my_transform": lambda sample: sample,
    }
    code = block_with(words, page)
    for shown, used in shorter.items():
        code = code.replace(shown, used)
    exec(code, given)
    assert not torch.equal(module.net.weight, before)
