"""Where the trainers of a test are: on the CPU, and on a GPU too if it is `on_each_accelerator`.

@on_each_accelerator -> fixture `accelerator` (integration/conftest.py) -> L.Trainer(**here())
"""

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import pytest
from support.products import every_pair, every_value

P = ParamSpec("P")
T = TypeVar("T")
CPU, GPU = "cpu", "gpu"
on_each_accelerator = pytest.mark.parametrize(
    "accelerator", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], indirect=True
)
"""`make gpu-tests` runs such a test a second time, with its trainers on a GPU."""
only_on_gpu = pytest.mark.parametrize(
    "accelerator", [pytest.param(GPU, marks=pytest.mark.gpu)], indirect=True
)
_chosen = CPU


def pairs_on_each(*axes: Iterable[Any]) -> list[Any]:
    """`every_pair` on the CPU, `every_value` on a GPU, which comes last and is `indirect`."""
    return [
        pytest.param(*row.values, where, marks=[*row.marks, *marks])
        for where, rows, marks in (
            (CPU, every_pair(*axes), []), (GPU, every_value(*axes), [pytest.mark.gpu])
        )
        for row in rows
    ]  # fmt: skip


def some_on_gpu(values: Iterable[Any], chosen: Container[Any]) -> pytest.MarkDecorator:
    """All `values` of `name` on the CPU, and those on a GPU that are `chosen`; the rest is `full`
    there. Choose what a GPU has other code for."""
    rows = [*values]
    return pytest.mark.parametrize(
        "name, accelerator",
        [pytest.param(name, CPU) for name in rows]
        + [
            pytest.param(
                name, GPU, marks=[pytest.mark.gpu, *([] if name in chosen else [pytest.mark.full])]
            )
            for name in rows
        ],
        indirect=["accelerator"],
    )


@contextmanager
def trainers_on(accelerator: str) -> Iterator[None]:
    global _chosen
    before, _chosen = _chosen, accelerator
    try:
        yield
    finally:
        _chosen = before


def here() -> dict[str, Any]:
    """What a trainer of the running test is told."""
    return {"accelerator": _chosen, "devices": 1}


def kept_of_each(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, called once for the same arguments on the same accelerator."""

    @functools.cache
    def kept(accelerator: str, *args: P.args, **kwargs: P.kwargs) -> T:
        return make(*args, **kwargs)

    return lambda *args, **kwargs: kept(_chosen, *args, **kwargs)
