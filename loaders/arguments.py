"""What a loader may be asked for: wrong words, numbers and combinations are refused at once.

An argument without effect is an error that names it: whoever gives one expects something of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from loaders.backends import BACKENDS
from loaders.batches import AugmentOn
from loaders.engine import WorkerKind
from loaders.errors import SourceError
from loaders.processes import StartMethod
from loaders.reader import OnError
from loaders.reuse import MODES

MOST_REUSE = 8
"""Of reuse="auto", where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What may change between two passes."""

    reuse: int
    reaugment: bool
    batch_size: int
    pass_limit: int | None = None
    """End passes after so many batches (None: serve them whole)."""

    def check(self, samples: int) -> None:
        """`samples`: of a pass, on all ranks."""
        at_least_one("reuse", self.reuse)
        at_least_one("batch_size", self.batch_size)
        if self.batch_size > samples:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than the data set ({samples} samples):"
                " lower batch_size"
            )


def first_serving(reuse: Any, reaugment: bool, batch_size: int) -> Serving:
    """`reuse` as the user gave it: a number, or "auto", which begins with 1."""
    if isinstance(reuse, str) and reuse != "auto":
        raise ValueError(f'reuse must be a number or "auto", not {reuse!r}')
    return Serving(1 if reuse == "auto" else reuse, reaugment, batch_size)


def check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"ReuseLoader needs a map-style data set with len() and [i], not"
            f" {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise SourceError("the data set is empty: there is nothing to serve")


def check_words(
    *, mode: str, backend: str, worker_kind: str, start_method: str | None, on_error: str,
    augment_on: str,
) -> None:  # fmt: skip
    one_of("mode", mode, MODES)
    one_of("backend", backend, BACKENDS)
    one_of("worker_kind", worker_kind, get_args(WorkerKind))
    one_of("on_error", on_error, get_args(OnError))
    one_of("augment_on", augment_on, get_args(AugmentOn))
    if start_method is not None:
        one_of("start_method", start_method, get_args(StartMethod))


def check_effects(
    *,
    auto: bool,
    most_reuse: int | None,
    worker_kind: str,
    start_method: str | None,
    cache: str | None,
    cache_bytes: int | None,
    cache_dir: object,
    device: object,
    augment_on: str,
) -> None:
    for idle, argument, value, needed in (
        (not auto, "most_reuse", most_reuse, 'reuse="auto"'),
        (worker_kind == "thread", "start_method", start_method, 'worker_kind="process"'),
        (cache is None, "cache_bytes", cache_bytes, 'cache="ram" or "disk"'),
        (cache is None, "cache_dir", cache_dir, 'cache="disk"'),
    ):
        if idle and value is not None:
            raise ValueError(f"{argument}={value!r} has no effect without {needed}")
    if augment_on == "device" and device is None:
        raise ValueError('augment_on="device" has no effect without device, the one to augment on')


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def one_of(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value!r}")
