"""The seeds of a fused attention's dropout: between its two kernels they are bytes of the plan."""

from typing import Any

import pytest
import torch

from offload.tracing.run_time_ops import at_run_time
from offload.tracing.seeds import SeedsIn, SeedsOut

GPU = torch.device("cuda", 0)
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def test_only_the_kernels_of_torchs_efficient_attention_on_a_gpu_are_wrapped() -> None:
    assert isinstance(at_run_time(EFFICIENT.default, GPU), SeedsOut)
    assert at_run_time(EFFICIENT.default, torch.device("cpu")) is EFFICIENT.default
    assert at_run_time(torch.ops.aten.mm.default, GPU) is torch.ops.aten.mm.default


@pytest.mark.parametrize("name", [BACKWARD, torch.ops.aten._efficient_attention_backward])
def test_the_seeds_are_found_in_the_schema(name: Any) -> None:
    found = at_run_time(name.default, GPU)
    assert isinstance(found, SeedsIn)
    arguments = name.default._schema.arguments
    assert [arguments[n].name for n in found.seeds] == ["philox_seed", "philox_offset"]
    assert arguments[found.chance].name == "dropout_p"


def test_what_comes_back_on_the_host_is_written_on_the_device_of_the_rest() -> None:
    on_device = torch.empty(2, device="meta")

    def attention(x: torch.Tensor) -> tuple[Any, ...]:
        return x, x + 1, torch.tensor(7), torch.tensor(9), 5

    out, more, seed, offset, size = SeedsOut(attention)(on_device)
    assert [t.device.type for t in (out, more, seed, offset)] == ["meta"] * 4
    assert (seed.dtype, tuple(seed.size()), size) == (torch.int64, (), 5)
    _, _, seed, offset, _ = SeedsOut(attention)(torch.ones(2))
    assert (seed.item(), offset.item()) == (7, 9)


@pytest.mark.parametrize(("chance", "device"), [(0.1, "cpu"), (0.0, "meta")])
def test_seeds_are_brought_to_the_host_only_where_dropout_draws(chance: float, device: str) -> None:
    class Seed(torch.Tensor):
        def cpu(self) -> torch.Tensor:  # type: ignore[override]
            return torch.tensor(7)

    seen: list[str] = []

    def backward(g: torch.Tensor, seed: torch.Tensor, p: float) -> None:
        seen.append(seed.device.type)

    SeedsIn(backward, (1,), 2)(
        torch.ones(2), torch.empty((), device="meta").as_subclass(Seed), chance
    )
    assert seen == [device]
