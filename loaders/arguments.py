"""What a loader may be asked for: unknown words, wrong numbers and useless arguments are refused.

An argument that would have no effect is an error that names it, because whoever gives an argument
expects something of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from loaders.backends import BACKENDS
from loaders.batches import AugmentOn
from loaders.cache.cache_setup import CacheSetup
from loaders.errors import SourceError, StateError
from loaders.options import (
    BatchOptions,
    CacheOptions,
    DecodingOptions,
    OrderOptions,
    WorkerKind,
    WorkerOptions,
)
from loaders.order.reuse import MODES
from loaders.order.tuning import ReuseTuner
from loaders.workers.cpus import usable_cpus
from loaders.workers.processes import StartMethod
from loaders.workers.reader import OnError

MOST_REUSE = 8
"""reuse="auto" goes up to this where `most_reuse` is not given."""
SAME_AFTER_RESUME = (
    "seed", "mode", "buffer_batches", "buffer_bytes", "shuffle", "drop_last",
)  # fmt: skip
"""The attributes of a loader that must be those of the loader that saved a state."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What may change between two passes."""

    reuse: int
    reaugment: bool
    batch_size: int
    pass_limit: int | None = None
    """A pass ends after this many batches. None: it is served whole."""

    def check(self, samples: int) -> None:
        """`samples` is the number of samples of a pass on all ranks."""
        at_least_one("reuse", self.reuse)
        at_least_one("batch_size", self.batch_size)
        if self.batch_size > samples:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than the data set ({samples} samples):"
                " lower batch_size"
            )

    def check_share(self, share: int, samples: int, world_size: int) -> None:
        """`share` is the number of samples of a pass on this rank."""
        if self.batch_size > share:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than a rank's share of the data set"
                f" ({share} of {samples} samples on {world_size} ranks): lower it"
            )


def first_serving(reuse: Any, reaugment: bool, batch_size: int) -> Serving:
    """`reuse` is what the user gave: a number, or "auto", which begins with 1."""
    if isinstance(reuse, str) and reuse != "auto":
        raise ValueError(f'reuse must be a number or "auto", not {reuse!r}')
    return Serving(1 if reuse == "auto" else reuse, reaugment, batch_size)


def tuner_for(reuse: Any, most_reuse: int | None) -> ReuseTuner | None:
    """What chooses the reuse, where the user left it to the loader."""
    if reuse != "auto":
        without_effect("most_reuse", most_reuse, 'reuse="auto"')
        return None
    most = most_reuse or MOST_REUSE
    at_least_one("most_reuse", most)
    return ReuseTuner(most)


def worker_count(workers: int | Literal["auto"]) -> int:
    return usable_cpus() if workers == "auto" else workers


def cache_setup(cache: CacheOptions) -> CacheSetup | None:
    if cache.kind is None:
        return None
    folder = None if cache.folder is None else Path(cache.folder)
    return CacheSetup(cache.kind, cache.limit_bytes, folder, cache.key)


def check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"ReuseLoader needs a map-style data set with len() and [i], not"
            f" {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise SourceError("the data set is empty: there is nothing to serve")


def check_options(
    order: OrderOptions,
    decoding: DecodingOptions,
    workers: WorkerOptions,
    cache: CacheOptions,
    batches: BatchOptions,
) -> None:
    check_order(order)
    check_decoding(decoding)
    check_workers(workers)
    check_cache(cache)
    check_batches(batches)


def check_order(order: OrderOptions) -> None:
    one_of("mode", order.mode, MODES)
    at_least_one("buffer_batches", order.buffer_batches)


def check_decoding(decoding: DecodingOptions) -> None:
    one_of("backend", decoding.backend, BACKENDS)
    one_of("on_error", decoding.on_error, get_args(OnError))


def check_workers(workers: WorkerOptions) -> None:
    one_of("worker_kind", workers.kind, get_args(WorkerKind))
    if workers.start_method is not None:
        one_of("start_method", workers.start_method, get_args(StartMethod))
    if workers.kind == "thread":
        without_effect("start_method", workers.start_method, 'worker_kind="process"')
    at_least_one("workers", workers.count)


def check_cache(cache: CacheOptions) -> None:
    if cache.kind != "disk":
        without_effect("cache_key", cache.key, 'cache="disk"')
    elif cache.key is not None and not isinstance(cache.key, str):
        raise TypeError(f"cache_key must be a word (str), not {type(cache.key).__name__}")
    if cache.kind is None:
        without_effect("cache_bytes", cache.limit_bytes, 'cache="ram" or "disk"')
        without_effect("cache_dir", cache.folder, 'cache="disk"')


def check_batches(batches: BatchOptions) -> None:
    one_of("augment_on", batches.augment_on, get_args(AugmentOn))
    if batches.augment_on == "device" and batches.device is None:
        raise ValueError(
            'augment_on="device" has no effect without device: give the device to augment on'
        )


def check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse a saved state that a loader with the state `own` could not go on from."""
    if (pieces := state.get("pieces", 1)) != 1:
        raise StateError(
            f"the saved state is one of a view that cuts batches into {pieces} pieces, so its count"
            " of batches is another: load it into such a view of a SharedStream"
        )
    for key in ("samples", *SAME_AFTER_RESUME):
        if state[key] != own[key]:
            raise StateError(
                f"the saved loader state has {key}={state[key]}, this loader has {key}={own[key]},"
                f" so it would serve another order: make the loader with {key}={state[key]}"
            )
    if state["served_batches"] and state["world_size"] != own["world_size"]:
        raise StateError(
            f"the saved loader state is in the middle of pass {state['pass']} on"
            f" {state['world_size']} ranks, this run has {own['world_size']}: resume on"
            f" {state['world_size']} ranks, or from a state that was saved at the end of a pass"
        )


def without_effect(name: str, value: object, needed: str) -> None:
    if value is not None:
        raise ValueError(f"{name}={value!r} has no effect without {needed}: leave it out")


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def one_of(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value!r}")
