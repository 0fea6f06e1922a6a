"""A CUDA card that is not here, as far as a step's Python asks for one.

    torch.cuda.is_available()                    True, where no driver says so
    F.scaled_dot_product_attention(q, k, v)      the kernel that torch chooses on that card

On a machine that has a GPU, torch answers by itself, but for attention: its choice is the card's.
Threads take turns. A process that is forked afterwards cannot go backward: torch refuses that, as
it does after a step on a GPU.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from offload.errors import CaptureError
from offload.program.frames import format_frame, user_frame
from offload.torch_seams import (
    cudnn_attention,
    drop_kernels,
    efficient_attention,
    flash_attention,
    lift_from_host,
)

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_TURN = threading.Lock()
"""What torch is told of the card holds for all threads."""


@contextmanager
def absent_card(core: Any, capability: tuple[int, int]) -> Iterator[None]:
    """Within it, steps may be recorded for a card of this compute capability."""
    with ExitStack() as within:
        within.enter_context(_TURN)
        library = torch.library.Library("aten", "IMPL")
        within.callback(drop_kernels, library)
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", CardAttention(capability), key)
            for layer in RECURRENT:
                library.impl(f"{layer}.input", _refuse_recurrent, key)
                library.impl(f"{layer}.data", _refuse_recurrent, key)
        if not torch.cuda.is_available():
            torch.zeros(1, requires_grad=True).sum().backward()  # the engine begins
            core.accept_absent_card()
            core.asks_for_driver(False)
            within.callback(core.asks_for_driver, True)
            lift_from_host(True)
            within.callback(lift_from_host, False)
            for name, answer in _answers(capability).items():
                within.enter_context(patch.object(torch.cuda, name, answer))
        yield


def _answers(capability: tuple[int, int]) -> dict[str, Any]:
    """What functions of `torch.cuda` say of the card. A module may ask them before it computes."""
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_: capability >= (8, 0),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }


def _refuse_recurrent(*_: Any) -> NoReturn:
    raise CaptureError(
        f"{format_frame(user_frame(), short=True)}: cuDNN computes this recurrent layer, and only"
        " cuDNN knows how much memory that takes, so no step with it is estimated for a GPU"
    )


class CardAttention:
    """Calls the kernel that torch's attention chooses on a card."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if enable_gqa and q.shape[-3] != k.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        width, is_half = q.shape[-1], q.dtype in (torch.bfloat16, torch.float16)
        if not (is_half or q.dtype == torch.float32) or q.dim() != 4:
            return self._unfused(q, k, v, attn_mask, dropout_p, is_causal, scale)
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, q, k)
        keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        trains_mask = attn_mask is not None and attn_mask.requires_grad
        is_hopper = self._capability[0] in (9, 10)
        if is_half and is_hopper and not trains_mask and width <= 128 and width % 8 == 0:
            given = q, k, v, attn_mask, keeps, dropout_p, is_causal
            return cudnn_attention(*given, scale=scale)[0]
        if is_half and attn_mask is None and width <= 256:
            scale = width**-0.5 if scale is None else scale
            padded = [
                torch.nn.functional.pad(t, (0, -width % 8)) if width % 8 else t for t in (q, k, v)
            ]
            made = flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return made[..., :width] if width % 8 else made
        return efficient_attention(q, k, v, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]

    def _unfused(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """The products one after the other, as torch computes what no fused kernel takes."""
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(ones.tril().logical_not(), float("-inf"))
        if mask is not None:
            is_bool = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
        return torch.dropout(scores.softmax(-1), dropout_p, True) @ v


def _as_bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """A mask as what is added to the scores, for each head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return mask.expand(*q.shape[:-1], k.shape[-2])
