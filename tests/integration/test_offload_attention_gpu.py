"""Attention with dropout on a GPU, by every kernel that torch has for it.

A kernel draws its mask from a seed and an offset that it hands to its backward pass, as numbers or
tensors of the host. A wrong seed is seen at once: other masks, and gradients that have nothing to
do with them.
"""

from collections.abc import Sequence

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from offload.live.prefill import Prefill
from offload.live.session import LiveSession

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EVERY_KERNEL = pytest.mark.parametrize(
    "kernel",
    [
        SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ],
    ids=("flash", "efficient", "cudnn", "math"),
)  # fmt: skip
STEPS = 5
SHAPE = (2, 4, 128, 64)


def dtype_for(kernel: SDPBackend) -> torch.dtype:
    return torch.float32 if kernel is SDPBackend.EFFICIENT_ATTENTION else torch.bfloat16


def tensors(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(SHAPE, dtype=dtype, device="cuda") for _ in range(4)]


def step(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two attentions in a row, and their gradients. cuDNN drops out by sixteenths only."""
    q, k, v, upstream = given
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        inner = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
        out = scaled_dot_product_attention(inner, k, v, dropout_p=0.125)
        grads: Sequence[torch.Tensor] = torch.autograd.grad(out, (q, k, v), upstream)
    return (out.detach(), *grads)


@EVERY_KERNEL
def test_masks_and_gradients_are_eagers(kernel: SDPBackend) -> None:
    batches = [tensors(n, dtype_for(kernel)) for n in range(STEPS)]
    with sdpa_kernel(kernel):
        torch.manual_seed(7)
        wanted = [step(*batch) for batch in batches]
        found = []
        with LiveSession(torch.nn.Identity(), budget="100%", device="cuda") as session:
            torch.manual_seed(7)
            for batch in batches:
                with session.step():
                    found.append(step(*batch))
        assert session.planned_steps
        planned = [task.name for task in session.plan.graph.tasks if "attention" in task.name]
        assert len(planned) == (0 if kernel is SDPBackend.MATH else 4), "none runs at once"
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        # Forwards there is one order of sums; backwards some kernels have none.
        assert torch.equal(ours[0], theirs[0]), f"step {number}: another mask"
        for one, other in zip(ours[1:], theirs[1:], strict=True):
            off = (one.float() - other.float()).norm() / other.float().norm()
            assert off < 0.01, f"step {number}: gradients of another mask, {off:.3f} apart"


@EVERY_KERNEL
def test_where_nobody_needs_gradients_it_runs_without_what_they_need(kernel: SDPBackend) -> None:
    """cuDNN returns no log-sum then, and the fake of the trace has one."""
    q, k, v, _ = tensors(0, dtype_for(kernel))

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True) + 1

    with sdpa_kernel(kernel):
        wanted = Attention()(q)
        with Prefill(Attention(), budget="100%", device="cuda") as fill:
            found = fill(q)
            assert fill.plan is not None
            assert not any("did not run" in note for note in fill.plan.graph.notes)
    assert torch.equal(found, wanted)
