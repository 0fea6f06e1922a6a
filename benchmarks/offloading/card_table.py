"""Writes docs/estimate_table.md: what eight well-known models need of ten cards.

    python -m benchmarks.offloading.card_table [--only NAME ...]

Every model is made of its public configuration on `meta`: nothing is downloaded, no weight is made.
A step is forward, backward and AdamW. It takes about ten minutes of one core.
"""

import argparse
import datetime
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchvision
import transformers
from torch import nn

from benchmarks.gpu.models import LLAMA_7B, Decoder, Kind, WordLoss
from benchmarks.harness.command import quiet_lightning
from benchmarks.harness.report import format_table
from offload.estimating.estimate import Estimate
from trainers import OffloadStrategy

PAGE = Path(__file__).parents[2] / "docs" / "estimate_table.md"
CARDS = (
    "rtx3090", "rtx4090", "rtx5090", "l4", "a10g", "l40s", "a100-40", "a100-80", "h100", "h200",
)  # fmt: skip
Batch = tuple[torch.Tensor, ...]


class Step(L.LightningModule):
    """A model and its loss, trained by AdamW."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Batch], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-4)


@dataclass(frozen=True, slots=True)
class Known:
    """A model that everybody knows, and what it is trained on."""

    name: str
    build: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    precision: str = "bf16-mixed"


def _class_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def _own_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    return net(input_ids=batch[0], labels=batch[0]).loss


def _word_loss(net: nn.Module, batch: Batch) -> torch.Tensor:
    assert isinstance(net, Decoder)
    return WordLoss(net)(net(batch[0]), batch[0])


def _words(rows: int, length: int) -> Batch:
    return (torch.zeros(rows, length, dtype=torch.long),)


def _pictures(count: int) -> Batch:
    return torch.zeros(count, 3, 224, 224), torch.zeros(count, dtype=torch.long)


def _gpt2(width: int, depth: int, heads: int) -> Callable[[], nn.Module]:
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": depth, "n_head": heads}
    return lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))


def _llama_8b() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    net.gradient_checkpointing_enable({"use_reentrant": False})
    return net


def _bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "intermediate_size": 4096}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    sizes |= {"d_kv": 64, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes)
    return transformers.T5ForConditionalGeneration(config)


MODELS = (
    Known("ResNet-50, 128 pictures", torchvision.models.resnet50, _pictures(128), _class_loss),
    Known("ViT-L/16, 64 pictures", torchvision.models.vit_l_16, _pictures(64), _class_loss),
    Known("BERT-large, 32 x 512", _bert, _words(32, 512), _own_loss),
    Known("T5-large, 8 x 512", _t5, _words(8, 512), _own_loss),
    Known("GPT-2, 124M, 16 x 1024", _gpt2(768, 12, 12), _words(16, 1024), _own_loss),
    Known("GPT-2 XL, 8 x 1024", _gpt2(1600, 48, 25), _words(8, 1024), _own_loss),
    Known(
        "LLaMA 7B, LoRA 16, 8 x 1024, blocks computed again",
        lambda: Decoder(Kind(LLAMA_7B, lora=16, checkpointed=True)),
        _words(8, 1024), _word_loss, "bf16-true",
    ),
    Known(
        "LLaMA 8B whole, 4 x 2048, blocks computed again",
        _llama_8b, _words(4, 2048), _own_loss, "bf16-true",
    ),
)  # fmt: skip


def estimate(known: Known) -> Estimate:
    with torch.device("meta"):
        module = Step(known.build().train(), known.loss)
    strategy = OffloadStrategy()
    return strategy.check(module, [known.batch], CARDS, precision=known.precision)


def list_rows(known: Known, made: Estimate) -> list[str]:
    whole = made.cards[-1].found.whole.budget / 2**30
    return [known.name, known.precision, f"{whole:.1f}", *map(_cell, made.cards)]


def _cell(card: Any) -> str:
    if card.within is None:
        return "no"
    return card.seconds if card.fits == "whole" else f"{card.seconds} in {card.fits}"


def write_page(rows: Sequence[Sequence[str]]) -> None:
    today = datetime.date.today().isoformat()
    PAGE.write_text(
        f"# Eight models on ten cards\n\nMade by `python -m benchmarks.offloading.card_table` on"
        f" {today}, with torch {torch.__version__}. Seconds of a step. `≥`: at a data"
        "\nsheet's rates, so it takes longer. `in 20 GiB`: it does not fit whole, and a plan within"
        " the card's memory\nis predicted. [What the figures mean](estimate.md).\n\n"
        + format_table(["model, batch", "precision", "GiB", *CARDS], rows)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    quiet_lightning()
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    for known in MODELS:
        if not given.only or any(known.name.startswith(name) for name in given.only):
            rows.append(list_rows(known, estimate(known)))
            print(rows[-1], flush=True)
    if not given.only:
        write_page(rows)


if __name__ == "__main__":
    main()
