"""What parts d and j run: full fine-tuning, LoRA, prefill, a net of pictures.

module on the host -> its steps on the device, within several budgets
the same on the device, eager, beside them: both are timed in one round
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from benchmarks.gpu.models import (
    GPT2_XL,
    LLAMA_7B,
    LLAMA_13B,
    TINY,
    Batch,
    Case,
    Kind,
    LastWord,
    decoder,
    language,
    text,
)
from benchmarks.gpu.ours import eager, without_gradients
from benchmarks.gpu.pictures import vit


@dataclass(frozen=True, slots=True)
class Workload:
    """`case` builds it on any device."""

    case: Case
    budgets: tuple[str, ...]
    """none: no limit; minimum: the smallest; else sizes."""
    tokens: int = 0
    """Of a step of a language model."""
    prefill: bool = False
    """The forward pass alone."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `offload.plan`."""
    precision: str = "bfloat16"
    """Of its matrix products, as the calibration calls it."""


def workloads(smoke: bool) -> dict[str, Workload]:
    seven = Kind(LLAMA_7B, lora=16, checkpointed=True)
    thirteen = Kind(LLAMA_13B)
    if smoke:
        small = Kind(TINY, lora=4, checkpointed=True)
        return {
            "llama lora": trained(small, ("none", "minimum")),
            "llama prefill": prefilled(Kind(TINY), ("minimum",)),
            "gpt2 full": trained(Kind(TINY, "gpt2"), ("minimum",), optimizer="auto"),
            "vit": Workload(vit("l-16", smoke), ("minimum",), precision="float32"),
        }
    lengths = (1024, 4096, 8192, 16384)
    return {
        "gpt2-1.5b full 8x1K": trained(
            Kind(GPT2_XL, "gpt2"), ("none", "24GiB", "12GiB", "6GiB"), optimizer="auto"
        ),
        "llama-7b lora 8x1K": trained(seven, ("none", "16GiB", "8GiB", "6GiB")),
        "llama-7b lora 32x1K": trained(seven.of(32, 1024), ("none", "24GiB", "16GiB")),
        **{
            f"llama-13b prefill {length // 1024}K": prefilled(
                thirteen.of(1, length), ("none", "12GiB", "6GiB")
            )
            for length in lengths
        },
        "vit-l-16 full": Workload(
            vit("l-16", smoke), ("none", "8GiB", "4GiB", "minimum"), precision="float32"
        ),
    }


def trained(kind: Kind, budgets: tuple[str, ...], **options: Any) -> Workload:
    return Workload(language(kind), budgets, kind.tokens, options=options)


def prefilled(kind: Kind, budgets: tuple[str, ...]) -> Workload:
    case = language(kind)
    build: Callable[[str], nn.Module] = lambda device: LastWord(decoder(kind, device)).eval()  # noqa: E731
    batch: Callable[[str], Batch] = lambda device: text(kind.size, device)[:1]  # noqa: E731
    size = kind.size
    setting = f"llama of {size.depth} layers, {size.width} wide, 1 x {size.length}, bfloat16"
    made = Case(build, case.optimizer, batch, case.loss, setting)
    return Workload(made, budgets, kind.tokens, prefill=True)


def eagerly(load: Workload, device: str) -> Callable[[], object]:
    """One step without us, everything on the device."""
    module, batch = load.case.build(device), load.case.batch(device)
    if load.prefill:
        return partial(without_gradients(module), *batch)
    return partial(eager(load.case, module, load.case.optimizer(module)), *batch)
