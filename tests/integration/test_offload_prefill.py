"""`offload.prefill`: a model's own outputs, computed with a device that does not hold the model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload
from offload.errors import BudgetTooSmall
from offload.graph.memgraph import OFFLOAD, RELOAD
from offload.graph.taskgraph import Role
from offload.live.prefill import Prefill

pytestmark = pytest.mark.usefixtures("core")

WORDS = 50


class Llama(nn.Module):
    """Layers as in LLaMA: norms by root mean square, rotated queries and keys, a gated net."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "second": nn.RMSNorm(width),
                    "gate": nn.Linear(width, 2 * width, bias=False),
                    "up": nn.Linear(width, 2 * width, bias=False),
                    "down": nn.Linear(2 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        batch, length, width = x.shape
        angles = torch.arange(length)[:, None] / 100 ** torch.linspace(0, 1, width // self.heads)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, -1)
            q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
            q, k = (t * angles.cos() + t.roll(1, -1) * angles.sin() for t in (q, k))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](attended.transpose(1, 2).reshape(batch, length, width))
            y = layer["second"](x)
            x = x + layer["down"](functional.silu(layer["gate"](y)) * layer["up"](y))
        return self.head(x)


def llama() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Llama().eval(), torch.randint(0, WORDS, (2, 12))


def vit() -> tuple[nn.Module, torch.Tensor]:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128
    )
    return model.eval(), torch.randn(2, 3, 32, 32)


def smallest(module: nn.Module, inputs: torch.Tensor, placement: str) -> int:
    """Of a forward pass, which has a plan for each part of it between two values."""
    budget, needed = 0, 1
    while budget < needed:
        budget = needed
        try:
            offload.prefill(module, inputs, budget=budget, placement=placement)
        except BudgetTooSmall as error:
            needed = error.needed
    assert budget > 1
    return budget


@pytest.mark.parametrize("placement", ["auto", "copy"])
@pytest.mark.parametrize("made", [llama, vit])
def test_the_smallest_budget_gives_the_modules_own_outputs_to_the_bit(
    made: Callable[[], tuple[nn.Module, torch.Tensor]], placement: str
) -> None:
    module, inputs = made()
    with torch.no_grad():
        wanted = module(inputs)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    budget = smallest(module, inputs, placement)
    weights = sum(p.nbytes for p in module.parameters())
    assert budget < weights / 2
    found = offload.prefill(module, inputs, budget=budget, placement=placement)
    assert torch.equal(found, wanted)
    assert not found.requires_grad
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_modules_tensors_have_memory_of_their_own_afterwards() -> None:
    module, inputs = llama()
    offload.prefill(module, inputs, budget=smallest(module, inputs, "auto"))
    for name, p in module.named_parameters():
        assert p.untyped_storage().nbytes() == p.nbytes, name
        assert p.requires_grad
    begins = [p.data_ptr() for p in module.parameters()]
    assert len({*begins}) == len(begins)
    module(inputs).sum().backward()  # and it can be trained as before


def test_weights_are_streamed_and_never_copied_back() -> None:
    module, inputs = llama()
    with Prefill(module, budget=smallest(module, inputs, "auto")) as fill:
        fill(inputs)
        planned = fill.plan
    assert planned is not None
    buffers = planned.graph.buffers
    moved: dict[str, set[Role]] = {OFFLOAD: set(), RELOAD: set()}
    for node in planned.memgraph.nodes:
        if node.kind in moved:
            moved[node.kind].add(buffers[node.buffer].role)
    assert Role.PARAMETER in moved[RELOAD]
    assert Role.PARAMETER not in moved[OFFLOAD]


class Pair(NamedTuple):
    """What a module may return."""

    first: torch.Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    """Returns what it is given, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x @ self.w
        return Pair(z, {"same": z, "list": [y, None, 3, (self.w, z.T[1:])], "text": "as it is"})


def test_outputs_come_back_in_their_containers() -> None:
    torch.manual_seed(0)
    module, x, y = Nested(), torch.randn(4, 8), torch.randn(3)
    with torch.no_grad():
        wanted = module(x, y)
    found = offload.prefill(module, x, y, budget="1MiB")
    assert isinstance(found, Pair)
    assert torch.equal(found.first, wanted.first)
    assert torch.equal(found.rest["same"], wanted.first)
    [same, nothing, three, (w, piece)] = found.rest["list"]
    assert (nothing, three, found.rest["text"]) == (None, 3, "as it is")
    assert torch.equal(same, y)
    assert torch.equal(w, module.w)
    assert torch.equal(piece, wanted.first.T[1:])


def test_every_shape_is_planned_once() -> None:
    module, words = llama()
    batches = [words, words[:, :7], words, words[:1], words[:, :7]]
    with torch.no_grad():
        wanted = [module(batch).tolist() for batch in batches]
    with Prefill(module, budget=2 * smallest(module, words, "auto")) as fill:
        assert [fill(batch).tolist() for batch in batches] == wanted


def test_what_a_module_writes_of_its_own_is_written() -> None:
    """In training mode BatchNorm counts, as it would in a call."""
    torch.manual_seed(0)
    one, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(5, 4)
    with torch.no_grad():
        wanted = other(x)
    assert torch.equal(offload.prefill(one, x, budget="1MiB"), wanted)
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name


def test_huggingface_outputs_come_back_as_they_are() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=16, use_cache=False
    )
    module = transformers.GPT2LMHeadModel(sizes).eval()
    words = torch.randint(0, WORDS, (2, 8))
    with torch.no_grad():
        wanted = module(words)
    found = offload.prefill(module, words, budget=smallest(module, words, "auto"))
    assert type(found) is type(wanted)
    assert torch.equal(found.logits, wanted.logits)
