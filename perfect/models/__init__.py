"""The networks that a YAML can name.

    those of picture_nets                       N x 3 x H x W pictures -> N x num_classes logits
    gpt2_tiny, _small, _medium, _large, _xl     N x S ids -> N x S x vocabulary logits
    llama_tiny, llama_7b                        the same; with LoRA if the config asks for it

May import: callbacks, config, text.
"""

from torch import nn

import perfect.models.picture_nets as picture_nets
from perfect.models.gpt2 import GPT2_SHAPES, Gpt2
from perfect.models.llama import LLAMA_SHAPES, Llama


def build_model(name: str, num_classes: int) -> nn.Module:
    """Build the network called `name`, untrained, with `num_classes` logits."""
    return getattr(picture_nets, name)(num_classes)


def build_language_model(name: str, vocabulary: int, dropout: float | None = None) -> Gpt2 | Llama:
    """Build the net called `name`, untrained. Only GPT-2 has dropout (None: 0.1)."""
    if name in GPT2_SHAPES:
        return Gpt2(GPT2_SHAPES[name], vocabulary, 0.1 if dropout is None else dropout)
    return Llama(LLAMA_SHAPES[name], vocabulary)


def longest_sequence(name: str) -> int | None:
    """Return for how many positions a GPT-2 has embeddings; None for LLaMA, which has no limit."""
    return GPT2_SHAPES[name].positions if name in GPT2_SHAPES else None
