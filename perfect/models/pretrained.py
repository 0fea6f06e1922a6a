"""Loads a GPT-2 or LLaMA checkpoint, in the layout of transformers, into our own nets.

GPT-2's checkpoints hold their matrices transposed (input x output). Nothing is downloaded: `folder`
has a config.json and the weights. A shape that differs is an error; weights never load in part.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from perfect.models.gpt2 import Gpt2
from perfect.models.llama import Llama


class WeightsError(ValueError):
    """A checkpoint is missing, cannot be read or does not fit the net."""


GPT2_NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"transformer\.wte\.": "words.",
        r"transformer\.wpe\.": "positions.",
        r"transformer\.ln_f\.": "norm.",
        r"transformer\.h\.(\d+)\.ln_(\d)\.": r"blocks.\1.norm\2.",
        r"transformer\.h\.(\d+)\.attn\.c_attn\.": r"blocks.\1.attention.qkv.",
        r"transformer\.h\.(\d+)\.attn\.c_proj\.": r"blocks.\1.attention.out.",
        r"transformer\.h\.(\d+)\.mlp\.c_fc\.": r"blocks.\1.up.",
        r"transformer\.h\.(\d+)\.mlp\.c_proj\.": r"blocks.\1.down.",
        r"lm_head\.": "head.",
    }
)
LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        r"model\.embed_tokens\.": "words.",
        r"model\.norm\.": "norm.",
        r"model\.layers\.(\d+)\.input_layernorm\.": r"blocks.\1.norm1.",
        r"model\.layers\.(\d+)\.post_attention_layernorm\.": r"blocks.\1.norm2.",
        r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.": r"blocks.\1.attention.\2.",
        r"model\.layers\.(\d+)\.self_attn\.o_proj\.": r"blocks.\1.attention.out.",
        r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.": r"blocks.\1.\2.",
        r"lm_head\.": "head.",
    }
)
# GPT-2's Conv1D is a linear layer whose matrix is stored transposed.
TRANSPOSED = ("qkv.weight", "out.weight", "up.weight", "down.weight")


def load_pretrained(model: Gpt2 | Llama, folder: Path) -> None:
    """Load the checkpoint in `folder` into `model`."""
    if find_spec("transformers") is None:
        raise WeightsError("reading weights needs transformers: pip install '.[llm]'")
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    if not folder.is_dir():
        raise WeightsError(f"there is no folder {folder}: give one with config.json and weights")
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"{folder} cannot be read: {error}") from error
    if isinstance(model, Llama):
        _take_constants(model, theirs.config, folder)
    names = GPT2_NAMES if isinstance(model, Gpt2) else LLAMA_NAMES
    weights = {_our_name(name, names): tensor for name, tensor in theirs.state_dict().items()}
    if isinstance(model, Gpt2):
        weights = {n: t.T if n.endswith(TRANSPOSED) else t for n, t in weights.items()}
    _check(weights, model.state_dict(), folder)
    model.load_state_dict(weights)


def _take_constants(model: Llama, config: Any, folder: Path) -> None:
    """Check the constants that no tensor holds, and take over the norms' epsilon."""
    rotary = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    stored = (config.num_attention_heads, rotary["rope_theta"], rotary.get("rope_type", "default"))
    ours = (model.shape.heads, model.shape.rotary_base, "default")
    if stored != ours:
        raise WeightsError(
            f"{folder} holds another model: heads, rotary base and kind are {stored} there,"
            f" {ours} here; give weights of this model"
        )
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.eps = config.rms_norm_eps


def _our_name(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if re.match(theirs, name):
            return re.sub(f"^{theirs}", ours, name)
    return name


def _check(weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path) -> None:
    odd = [f"it lacks {name}" for name in wanted if name not in weights]
    odd += [f"it also has {name}" for name in weights if name not in wanted]
    odd += [
        f"{name} is {list(weights[name].shape)} there, {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if odd:
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise WeightsError(
            f"{folder} holds another model: {'; '.join(odd[:3])}{more}; give weights of this model"
        )
