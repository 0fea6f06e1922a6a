"""Layouts of pictures of one pixel: found by the kernel itself, once for the same call."""

from typing import Any

import pytest
import torch

from offload.program import layouts
from offload.program.layouts import KernelLayouts
from offload.torch_seams import FakeTensorMode

aten: Any = torch.ops.aten


def one_pixel(mode: FakeTensorMode, memory_format: torch.memory_format) -> torch.Tensor:
    with mode:
        return torch.empty(2, 8, 1, 1).to(memory_format=memory_format)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    real = layouts._real_results

    def counted(func: Any, *rest: Any) -> Any:
        calls.append(func)
        return real(func, *rest)

    monkeypatch.setattr(layouts, "_real_results", counted)
    return calls


def found(known: KernelLayouts, func: Any, *args: Any, wrong: tuple[int, ...]) -> torch.Tensor:
    """What is found for a fake with wrong strides."""
    with FakeTensorMode():
        fake = torch.empty_strided((2, 8, 1, 1), wrong)
    return known.as_it_is(func, "add", args, {}, fake)


def test_the_strides_are_those_of_the_kernel_and_it_runs_once(kernel_calls: list[Any]) -> None:
    known, mode = KernelLayouts(), FakeTensorMode()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        picture = one_pixel(mode, memory_format)
        real = torch.empty_strided(picture.size(), picture.stride()) + 1
        for _ in range(3):
            result = found(known, aten.add.Tensor, picture, 1, wrong=(8, 1, 3, 5))
            assert result.stride() == real.stride() != (8, 1, 3, 5)
    assert len(kernel_calls) == 2, "once for each layout"


def test_calls_that_differ_in_a_type_or_in_grad_mode_are_not_mixed_up(
    kernel_calls: list[Any],
) -> None:
    known, picture = KernelLayouts(), one_pixel(FakeTensorMode(), torch.contiguous_format)
    for number in (1, 1.0, True):
        found(known, aten.add.Tensor, picture, number, wrong=(8, 1, 1, 1))
    assert len(kernel_calls) == 3
    with torch.no_grad():
        found(known, aten.add.Tensor, picture, 1, wrong=(8, 1, 1, 1))
    assert len(kernel_calls) == 4


def reserved(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x.new_empty(7)


def moody(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not x.any():
        raise ValueError("zeros")
    return reserved(x)


@pytest.mark.parametrize(("kernel", "size"), [(reserved, 7), (moody, 0)])
def test_a_kernel_tells_a_size_too_and_one_that_fails_on_zeros_tells_nothing(
    kernel: Any, size: int
) -> None:
    """A backward pass is never tried with a reserve of the fake's size."""
    with torch.library._scoped_library("perfect_layouts", "FRAGMENT") as library:
        library.define("op(Tensor x) -> (Tensor, Tensor)")
        library.impl("op", kernel, "CompositeExplicitAutograd")
        picture = one_pixel(mode := FakeTensorMode(), torch.contiguous_format)
        with mode:
            fakes = torch.empty_like(picture), torch.empty(0)
        op = torch.ops.perfect_layouts.op.default
        _, reserve = KernelLayouts().as_it_is(op, "op", (picture,), {}, fakes)
    assert reserve.size() == (size,)


def test_a_generator_does_not_draw() -> None:
    generator = torch.Generator().manual_seed(3)
    before, default = generator.get_state(), torch.get_rng_state()
    with FakeTensorMode():
        picture, fake = torch.empty(2, 8, 1, 1), torch.empty(2, 8, 1, 1)
    rand = aten.bernoulli.default
    result = KernelLayouts().as_it_is(rand, "bernoulli", (picture,), {"generator": generator}, fake)
    assert result.size() == (2, 8, 1, 1)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)
