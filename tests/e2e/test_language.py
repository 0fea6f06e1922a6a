"""Language models by YAML through the program, on a text made here and on WikiText-2."""

import csv
import math
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from perfect.assembly.data import build_data
from perfect.assembly.run import build_module
from perfect.config.yaml_reader import read_config

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
Train = Callable[..., tuple[int, Path]]
Recipe = dict[str, Any]


def tiny(name: str, text: Path, steps: int) -> Recipe:
    """One of our configurations, on that text and so short."""
    recipe = yaml.safe_load((ROOT / "configs" / name / "tiny.yaml").read_text())
    recipe["data"] |= {"root": str(text), "vocabulary": 258, "evaluation_samples": 40}
    recipe["phases"][0]["steps"] = steps
    recipe["trainer"] |= {"threads": 1, "validate_every": 0.02}
    return recipe


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


# Frozen random weights leave LoRA little room.
@pytest.mark.parametrize(
    ("name", "fall"), [("gpt2", 0.5), pytest.param("llama", 0.1, marks=pytest.mark.full)]
)
def test_a_tiny_configuration_of_ours_learns(
    name: str, fall: float, text: Path, train: Train, read_run: Callable[[Path], Recipe],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    code, folder = train(tiny(name, text, steps=40))
    run = read_run(folder)
    assert code == 0
    assert (run["status"], run["steps"]) == ("completed", 40)
    losses = column(folder, "train_loss")
    assert losses[-1] < losses[0] - fall
    assert column(folder, "val_perplexity")[-1] < 258 * math.exp(-fall)
    assert run["perplexity_on"] == "test"
    assert f"test perplexity {run['perplexity']:.2f} a token" in capfd.readouterr().err
    assert f"{run['perplexity']:.2f}" in (folder / "report.html").read_text()


def test_perplexity_is_exp_of_the_mean_loss_of_all_predicted_tokens(
    text: Path, train: Train, read_run: Callable[[Path], Recipe]
) -> None:
    recipe = tiny("gpt2", text, steps=4)
    recipe["data"]["evaluation_samples"] = 21  # the last batch is smaller
    _, folder = train(recipe)
    config = read_config(folder / "config.yaml")[0]
    data = build_data(config)
    module = build_module(config, data.num_classes)
    saved = torch.load(folder / "final.ckpt", weights_only=False)
    module.load_state_dict(saved["state_dict"])
    module.eval()
    assert data.test is not None
    ids, targets = data.test.dataset.dataset.tensors
    with torch.no_grad():
        losses = functional.cross_entropy(
            module(ids[:21]).flatten(0, 1), targets[:21].flatten(), reduction="none"
        )
    assert len(losses) == 21 * 64
    assert read_run(folder)["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"data": {"sequence": 256}},
            "data.sequence: is 256, but gpt2_tiny has 128 positions: lower it",
        ),
        ({"data": {"root": "nowhere"}}, "data.root: nowhere/gpt2_bpe does not hold GPT-2's"),
        ({"data": {"vocabulary": 999}}, "a vocabulary of 999 cannot be cut"),
        (
            {"data": {"train_samples": 10**6}},
            "data.train_samples: is 1000000, but there are 687 samples: lower it",
        ),
        (
            {"data": {"evaluation_samples": 10**6}},
            "data.evaluation_samples: is 1000000, but there are 86 samples: lower it",
        ),
        ({"model": {"num_classes": 100}}, "100, but the data has 258 classes"),
        ({"model": {"weights": "nowhere"}}, "model.weights: "),
        ({"loader": {"buffer_bytes": 1000}}, "is too small"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(
    changed: Recipe, said: str, text: Path, train: Train, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny("gpt2", text, steps=4)
    for section, keys in changed.items():
        recipe[section] |= keys
    assert train(recipe, "--check")[0] == 2
    assert said in capfd.readouterr().err


PEFT = """
import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel


class Wrapped(L.LightningModule):
    def __init__(self):
        super().__init__()
        shape = GPT2Config(
            vocab_size=258, n_positions=64, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
        lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        self.net = get_peft_model(GPT2LMHeadModel(shape), lora)

    def loss(self, batch):
        ids, targets = batch
        return functional.cross_entropy(self.net(ids).logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
"""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_of_transformers_wrapped_by_peft_goes_through(
    text: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    (tmp_path / "wrapped_by_peft.py").write_text(PEFT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = tiny("gpt2", text, steps=20)
    recipe["model"] = {"class_path": "wrapped_by_peft.Wrapped"}
    del recipe["optimizer"]
    recipe["phases"][0]["lr"] = {"kind": "constant", "lr": 0.01}
    code, folder = train(recipe)
    assert code == 0
    losses = column(folder, "train_loss")
    assert losses[-1] < losses[0]
    saved = torch.load(folder / "final.ckpt", weights_only=False)["state_dict"]
    assert any(v.any() for k, v in saved.items() if "lora_B" in k)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "bound"), [("gpt2", 120), ("llama", 900)])
def test_a_tiny_configuration_learns_wikitext(
    name: str, bound: float, train: Train, tmp_path: Path, read_run: Callable[[Path], Recipe]
) -> None:
    if not (SHARED / "wikitext-2.tar.xz").exists():
        pytest.skip("WikiText-2 is not beside this checkout")
    for archive in ("wikitext-2", "gpt2_bpe"):
        with tarfile.open(SHARED / f"{archive}.tar.xz") as packed:
            packed.extractall(tmp_path / "data", filter="data")
    recipe = yaml.safe_load((ROOT / "configs" / name / "tiny.yaml").read_text())
    recipe["data"]["root"] = str(tmp_path / "data")
    code, folder = train(recipe)
    assert code == 0
    assert read_run(folder)["perplexity"] < bound
