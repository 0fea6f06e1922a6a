"""Eight models of 20 to 300 ms a step on a CPU, recorded as shadows and trained for real."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
import transformers
from torch import nn

from offload import TaskGraph
from offload.estimating.shadow_session import ShadowSession
from offload.live.session import LiveSession

Loss = Callable[[nn.Module, Any], torch.Tensor]
WORDS = 2048
WARM = 8
"""Steps that do not count. In the first ones squares of gradients are denormal numbers, on which a
CPU computes twenty times as long."""


@dataclass(frozen=True, slots=True)
class CpuModel:
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss


class LstmWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 256)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)
        self.scores = nn.Linear(256, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.scores(self.lstm(self.words(text))[0])


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_twice(3, 16), _twice(16, 32), _twice(32, 64)])
        self.up = nn.ModuleList([_twice(96, 32), _twice(48, 16)])
        self.scores = nn.Conv2d(16, 10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for part in self.down:
            x = part(x if not seen else nn.functional.max_pool2d(x, 2))
            seen.append(x)
        for part, before in zip(self.up, seen[-2::-1], strict=True):
            x = part(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), before], 1))
        return self.scores(x)


def _twice(into: int, out: int) -> nn.Module:
    def once(a: int) -> list[nn.Module]:
        return [nn.Conv2d(a, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

    return nn.Sequential(*once(into), *once(out))


def _words(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length))


def _pictures(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(0, 10, (count,))


def _next_word(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())


def _own_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return model(input_ids=text, labels=text, use_cache=False).loss


def _t5_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return model(input_ids=text, labels=text).loss


def _class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _pixel_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    made = model(batch[0])
    classes = batch[1][:, None, None].expand(-1, *made.shape[2:])
    return nn.functional.cross_entropy(made, classes)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=256, n_layer=4, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=WORDS, hidden_size=128, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config)


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 256, "d_ff": 512, "num_layers": 2}
    sizes |= {"num_heads": 4, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes)
    return transformers.T5ForConditionalGeneration(config)


def _moe() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _vit() -> nn.Module:
    return torchvision.models.VisionTransformer(64, 8, 4, 4, 256, 512, num_classes=10)


MODELS = (
    CpuModel("GPT-2", _gpt2, lambda: _words(8, 128), _own_loss),
    CpuModel("ViT", _vit, lambda: _pictures(16, 64), _class_loss),
    CpuModel(
        "ResNet-50", lambda: torchvision.models.resnet50(num_classes=10),
        lambda: _pictures(8, 96), _class_loss,
    ),
    CpuModel("LSTM", LstmWords, lambda: _words(16, 64), _next_word),
    CpuModel("Mamba", _mamba, lambda: _words(4, 64), _own_loss),
    CpuModel("U-Net", Unet, lambda: _pictures(8, 64), _pixel_loss),
    CpuModel("T5", _t5, lambda: _words(8, 64), _t5_loss),
    CpuModel("MoE", _moe, lambda: _words(8, 64), _own_loss),
)  # fmt: skip


def measure_step(model: CpuModel, rounds: int) -> tuple[TaskGraph, TaskGraph, list[float]]:
    """The shadows' graph of a step, that of a planned one, and the seconds of eager ones."""
    torch.manual_seed(0)
    net = model.build().train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
    batch = model.batch()

    def step(given: Any) -> None:
        model.loss(net, given).backward()
        optimizer.step()
        optimizer.zero_grad()

    with ShadowSession(net, optimizer) as shadows:
        for _ in range(2):
            shadows.take_graphs()
            with shadows.step():
                step(shadows.without_bytes(batch))
        [graph] = shadows.take_graphs()
    times: list[float] = []
    for _ in range(rounds + WARM):
        begin = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - begin)
    with LiveSession(net, optimizer, budget="100%") as live:
        for _ in range(2):
            with live.step():
                step(batch)
        assert live.plan is not None
        captured = live.plan.source
    return graph, captured, times[WARM:]
