"""Small models of the kinds that people train, and a step of each in plain eager PyTorch."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional

Batch = tuple[torch.Tensor, ...]
WORDS = 61


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and batches for it."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[], Batch]
    loss: Callable[[Any, Any], torch.Tensor] = functional.cross_entropy
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def made(self, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = self.model()
        return model, self.optimizer(model)

    def batches(self, steps: int = 3) -> list[Batch]:
        torch.manual_seed(77)
        return [self.batch() for _ in range(steps)]


def eager_step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> torch.Tensor:
    """As everybody writes it."""
    optimizer.zero_grad()
    with case.around():
        loss = case.loss(model(*batch[:-1]), batch[-1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that a step changes."""
    found = {name: t.clone() for name, t in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, t in optimizer.state.get(p, {}).items():
            if isinstance(t, torch.Tensor):
                found[f"{key} of {name}"] = t.clone()
    return found


def pictures() -> Batch:
    return torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))


def large_pictures() -> Batch:
    return torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))


def words() -> Batch:
    text = torch.randint(0, WORDS, (2, 9))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def word_loss(logits: Any, target: torch.Tensor) -> torch.Tensor:
    logits = getattr(logits, "logits", logits)
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class Gpt(nn.Module):
    """Dropout, and one matrix for reading and writing words."""

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(16, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.drop(
            self.words(text) + self.places(torch.arange(text.shape[1], device=text.device))
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """RMSNorm, rotary places, SwiGLU, attention over shared keys; bfloat16 inside if asked."""

    def __init__(self, width: int = 32, depth: int = 2, autocast: bool = True) -> None:
        super().__init__()
        self.autocast = autocast
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        angle = torch.outer(torch.arange(16.0), 100.0 ** -(torch.arange(4.0) / 4))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        with torch.autocast(text.device.type, torch.bfloat16, enabled=self.autocast):
            x = self.words(text)
            for block in self.blocks:
                x = block(x, self.cos[: text.shape[1]], self.sin[: text.shape[1]])
            return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q = turned(self.q(y).unflatten(-1, (4, 8)).transpose(1, 2), cos, sin)
        k, v = self.kv(y).unflatten(-1, (4, 8)).transpose(1, 2).split(2, dim=1)
        k = turned(k, cos, sin).repeat_interleave(2, dim=1)
        v = v.repeat_interleave(2, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64,
        dropout=0.1, attention_dropout=0.1, num_classes=10,
    )  # fmt: skip


def groups(model: nn.Module) -> Any:
    """Decay for matrices only, as it is done."""
    flat = [p for p in model.parameters() if p.ndim < 2]
    wide = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 2e-3}]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), 1e-2)


def bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def resnet18() -> nn.Module:
    return torchvision.models.resnet18(num_classes=10)


def cases() -> dict[str, Case]:
    return {
        "resnet18": Case(resnet18, sgd, pictures),
        "resnet18 in evaluation mode": Case(lambda: resnet18().eval(), sgd, pictures),
        "resnet18 channels last": Case(
            lambda: resnet18().to(memory_format=torch.channels_last), sgd, large_pictures
        ),
        # Its last pictures have one pixel, whose layout is anything.
        "resnet18 channels last, small": Case(
            lambda: resnet18().to(memory_format=torch.channels_last), sgd, pictures
        ),
        "mobilenet_v2": Case(
            lambda: torchvision.models.mobilenet_v2(num_classes=10), sgd, pictures
        ),
        "vit": Case(vit, adamw, pictures),
        "gpt": Case(Gpt, adamw, words, word_loss),
        "gpt around autocast": Case(Gpt, adamw, words, word_loss, bfloat16),
        "llama": Case(Llama, adamw, words, word_loss),
        "llama in one precision": Case(lambda: Llama(autocast=False), adamw, words, word_loss),
    }


def huggingface() -> Case:
    import transformers

    def model() -> nn.Module:
        sizes = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=16,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(sizes)

    return Case(model, adamw, words, word_loss)
