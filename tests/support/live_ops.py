"""Cases of one call each within a training step (live_modules.py)."""
# pyright: reportArgumentType=false, reportCallIssue=false

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.live_modules import Case
from torch import nn
from torch.nn import functional as F
from torch.utils import dlpack

Call = Callable[[Any, torch.Tensor, torch.Tensor], Any]
"""It is given the module, its outputs and the classes, and returns what the loss has more."""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return torch.from_numpy(2 * x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x.sum().item()


def _saved(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    memory = io.BytesIO()
    torch.save([module.state_dict(), out], memory)
    memory.seek(0)
    return torch.load(memory)[1].sum() * 0.1


def _unique(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    values, counts = torch.unique(y, return_counts=True)
    return (out[:, values] * counts).mean()


def _worked_in_place(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    made = torch.zeros_like(out)
    made[:, 1:3] = out[:, :2]
    made[y > 2] *= 0.5
    made.view(-1)[::3].add_(1)
    made.scatter_add_(1, y[:, None], out[:, :1])
    return made.square().mean()


def _per_sample(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    weights = {n: p.detach() for n, p in module.head.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module.head, weights, (x,)).square().sum()

    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.eye(32)[:4])
    return slopes["weight"].flatten(1).norm(dim=1).mean() * out.mean()


def _formatted(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    module.seen += [f"{out.mean():.4f}", str(out[0]), repr(module.head.weight[0])]
    return 0.0


def _on_host(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return (out.exp() * out.sin()).mean()


def _exchanged(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    other = dlpack.from_dlpack(out.detach())
    array = np.from_dlpack(out.detach().clone())
    other *= 1.5
    return out.sum() * float(array.sum()) * 1e-3


def _stored(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    whole = out.detach().untyped_storage()
    module.seen.append(bytes(whole)[:16])
    again = torch.tensor([], dtype=torch.float32).set_(out.detach().untyped_storage())
    return again.sum() * 1e-2


def _state_of_dropout(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        fixed = F.dropout(out, 0.5)
    return fixed.mean() + F.dropout(out, 0.3).mean()


def _optimizer_read(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    state = module.optimizers().optimizer.state
    return sum(s["exp_avg"].abs().sum() for s in state.values()) * 1e-2


def _embedded(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    if not hasattr(module, "table"):
        module.__dict__["table"] = nn.Embedding(5, 4, max_norm=0.5)
        module.__dict__["bag"] = nn.EmbeddingBag(5, 4, mode="max")
    return module.table(y).sum() + module.bag(y, torch.tensor([0, 2])).sum() * out.mean()


def _attended(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    x = out[:, None, :4].expand(-1, 6, -1).reshape(len(out), 2, 3, 4)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    causal = F.scaled_dot_product_attention(x, x, x, is_causal=True, dropout_p=0.1)
    return causal.mean() + F.scaled_dot_product_attention(x, x, x, attn_mask=mask).mean()


def _nested(module: Any, out: torch.Tensor, y: torch.Tensor) -> Any:
    rows = torch.nested.nested_tensor([out[0], out[1, :3]], layout=torch.jagged)
    return torch.cat([row.exp().sum()[None] for row in rows.unbind()]).mean()


CALLS: tuple[tuple[str, Call], ...] = (
    ("bool", lambda m, out, y: out.mean() if out.sum() > 0 else -out.mean()),
    ("mask", lambda m, out, y: out[y > 1].sum() + out.masked_select(out > 0).sum()),
    ("nonzero", lambda m, out, y: out[(y > 1).nonzero()[:, 0]].sum()),
    ("repeat", lambda m, out, y: out.repeat_interleave(y + 1, 0).mean()),
    ("arange", lambda m, out, y: (out.mean() * torch.arange(y.max() + 1)).mean()),
    ("tensors", lambda m, out, y: torch.tensor([out.detach().mean(), 2.0]).sum() * out.mean()),
    (
        "spectrum",
        lambda m, out, y: (
            torch.fft.rfft(out).abs().mean() + torch.view_as_real(torch.fft.fft(out)).mean()
        ),
    ),
    ("svd", lambda m, out, y: torch.linalg.svdvals(m.head.weight).sum()),
    ("lstsq", lambda m, out, y: torch.linalg.lstsq(torch.eye(5) + 1, m.head.weight).solution.sum()),
    (
        "drawn",
        lambda m, out, y: out[torch.randperm(len(out))[:3]].sum() * torch.randint(3, ()).item(),
    ),
    ("bernoulli", lambda m, out, y: (out * torch.bernoulli(out.detach().sigmoid())).sum()),
    ("twice", lambda m, out, y: Twice.apply(out).mean()),
    ("pickled", lambda m, out, y: pickle.loads(pickle.dumps(out.detach())).sum() * 0.1),
    (
        "copied",
        lambda m, out, y: copy.deepcopy(m.head)(torch.ones(32)).sum() + copy.copy(out).sum(),
    ),
    ("contained", lambda m, out, y: out.mean() if 3 in y else out.sum()),
    ("iterated", lambda m, out, y: sum(row[c] for row, c in zip(out, y, strict=True))),
    (
        "grad",
        lambda m, out, y: torch.autograd.grad(out.sum(), m.head.weight, create_graph=True)[
            0
        ].norm(),
    ),
    (
        "numpy",
        lambda m, out, y: torch.from_numpy(np.cumsum(out.detach().numpy(), 1)).mean() * out.mean(),
    ),
    ("histogram", lambda m, out, y: out.mean() * torch.histc(out.detach(), 4).max()),
    ("meta", lambda m, out, y: out.mean() * torch.empty(3, device="meta").numel()),
    ("moved", lambda m, out, y: out.to("cpu", non_blocking=True).mean() + out.cpu().sum()),
    (
        "strided",
        lambda m, out, y: out.as_strided((2, 2), (1, 2)).sum() + out.unfold(1, 2, 1).mean(),
    ),
    ("saved", _saved),
    ("unique", _unique),
    ("in_place", _worked_in_place),
    ("per_sample", _per_sample),
    ("formatted", _formatted),
    ("on_host", _on_host),
    ("exchanged", _exchanged),
    ("stored", _stored),
    ("forked", _state_of_dropout),
    ("read", _optimizer_read),
    ("embedded", _embedded),
    ("attended", _attended),
    ("nested", _nested),
)


class OfCall(Case):
    call: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch[0])
        more = type(self).call(self, out, batch[1])
        loss = F.cross_entropy(out, batch[1]) + 0.1 * torch.as_tensor(more).mean()
        self.log("loss", loss)
        return loss


OF_CALLS = tuple(
    type(f"Of_{name}", (OfCall,), {"call": staticmethod(call)}) for name, call in CALLS
)
