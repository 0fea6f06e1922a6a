"""What a loader may be asked for: unknown words, wrong numbers and useless arguments are refused.

An argument that would have no effect is an error that names it, because whoever gives an argument
expects something of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from loaders.backends import BACKENDS
from loaders.batches import AugmentOn, each_view
from loaders.cache.cache_setup import CacheSetup
from loaders.errors import SourceError, StateError
from loaders.options import (
    BatchOptions,
    CacheOptions,
    DecodingOptions,
    LoaderOptions,
    OrderOptions,
    WorkerKind,
    WorkerOptions,
)
from loaders.order.reuse import MODES, ORDER_VERSION
from loaders.order.tuning import ReuseTuner
from loaders.pixels.moves import PART_KINDS
from loaders.user_views import WholeSample
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

    def __post_init__(self) -> None:
        if self.pass_limit is not None:
            what = "the number of batches that limit_pass() or limit_train_batches leaves of a pass"
            at_least_one(what, self.pass_limit)

    def within(self, share: int, drop_last: bool) -> "Serving":
        """This, with batches of no more than the `share` of samples that this rank has in a pass:
        as with a DataLoader, a batch is then smaller than was asked for."""
        at_least_one("reuse", self.reuse)
        at_least_one("batch_size", self.batch_size)
        if self.batch_size <= share:
            return self
        if drop_last:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than what a rank serves in a pass"
                f" (samples: {share}), and drop_last=True leaves out what fills no batch, so"
                " nothing would be served: lower batch_size, or leave drop_last out"
            )
        return replace(self, batch_size=share)


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


UNCOMPARED_SEED = 0
"""What processes have that serve one order, and cannot compare what they draw."""


def settled_seed(seed: int | torch.Generator | None, uncompared: bool) -> int:
    """The seed that was given; else one that is drawn, as a DataLoader draws one, from its
    generator or from torch's. `uncompared`: whether others must have drawn the same."""
    if isinstance(seed, int):
        return seed
    if uncompared:
        return UNCOMPARED_SEED
    return drawn_from(seed)


def drawn_from(generator: torch.Generator | None) -> int:
    """A seed from a generator; None: from torch's own."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


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
            f"ReuseLoader needs a map-style data set with len() and [i], or a stream that can be"
            f" iterated, not {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise SourceError("the data set is empty: there is nothing to serve")


def check_options(options: LoaderOptions) -> None:
    check_order(options.order)
    check_decoding(options.decoding)
    check_workers(options.workers)
    if options.decoding.backend != "native" and options.workers.timeout is not None:
        raise ValueError(
            f"timeout has no effect with backend={options.decoding.backend!r}, which reads many"
            " samples at once: leave it out"
        )
    check_cache(options.cache)
    check_batches(options.batches)


def check_order(order: OrderOptions) -> None:
    one_of("mode", order.mode, MODES)
    at_least_one("buffer_batches", order.buffer_batches)


def check_decoding(decoding: DecodingOptions) -> None:
    one_of("backend", decoding.backend, BACKENDS)
    one_of("on_error", decoding.on_error, get_args(OnError))


def check_stream(
    order: OrderOptions,
    decoding: DecodingOptions,
    workers: WorkerOptions,
    cache: CacheOptions,
) -> None:
    """Refuse what needs samples that can be asked for by their numbers."""
    if order.samples_per_pass is not None:
        at_least_one("samples_per_pass", order.samples_per_pass)
    refused = {
        "sampler": (order.sampler is not None, "a stream has an order of its own"),
        "buffer_bytes": (order.buffer_bytes is not None, "give buffer_batches instead"),
        "backend": (decoding.backend != "native", "leave it out"),
        "on_error": (decoding.on_error != "raise", "let decode= or the data set pass over it"),
        "worker_init_fn": (workers.init is not None, "no worker process reads it"),
        "start_method": (workers.start_method is not None, "no worker process reads it"),
        "timeout": (workers.timeout is not None, "TarShards(timeout=) is for servers"),
        "worker_kind": (workers.kind == "process", "threads decode what one of them reads"),
        "cache": (cache.kind is not None, "its samples have no numbers to be found by"),
    }
    for name, (given, instead) in refused.items():
        if given:
            raise ValueError(f"{name} does not go with a stream, whose samples come one by one"
                             f" ({instead}): leave {name} out")  # fmt: skip


def check_workers(workers: WorkerOptions) -> None:
    one_of("worker_kind", workers.kind, get_args(WorkerKind))
    if workers.start_method is not None:
        one_of("start_method", workers.start_method, get_args(StartMethod))
    if workers.kind == "thread":
        without_effect("start_method", workers.start_method, 'worker_kind="process"')
        without_effect("worker_init_fn", workers.init, 'worker_kind="process"')
    if workers.timeout is not None and not workers.timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, not {workers.timeout}")
    if workers.count < 0:
        raise ValueError(f"workers must be at least 0, not {workers.count}")
    if workers.count == 0:
        without_effect("timeout", workers.timeout, "workers")
        without_effect("worker_init_fn", workers.init, "workers")
        if workers.kind == "process":
            raise ValueError('worker_kind="process" has no effect with workers=0: leave it out')


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
    at_least_one("views", batches.views)
    if isinstance(batches.augment, list | tuple) and batches.views not in (1, len(batches.augment)):
        raise ValueError(
            f"views={batches.views}, but augment lists {len(batches.augment)}, one for each view:"
            " leave views out"
        )
    if isinstance(batches.augment, list | tuple) and not batches.augment:
        raise ValueError("augment is an empty list: list an augmentation for each view")
    augments = each_view(batches.augment, 1)
    whole = [isinstance(each, WholeSample) for each in augments]
    if any(whole) and not all(whole):
        raise ValueError(
            "augment lists a WholeSample beside others, which make views of the picture alone: make"
            " all of them a WholeSample, or none"
        )
    if any(whole) and batches.parts is not None:
        raise ValueError("parts has no effect on a WholeSample, which moves all: leave it out")
    for name, kind in (batches.parts or {}).items():
        one_of(f"parts[{name!r}]", kind, PART_KINDS)


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
    check_order_version(state, state["served_batches"])
    if state["served_batches"] and state["world_size"] != own["world_size"]:
        raise StateError(
            f"the saved loader state is in the middle of pass {state['pass']} on"
            f" {state['world_size']} ranks, this run has {own['world_size']}: resume on"
            f" {state['world_size']} ranks, or from a state that was saved at the end of a pass"
        )


def check_order_version(state: dict[str, Any], served: int) -> None:
    """Refuse a state that is in the middle of a pass whose order nobody computes any more."""
    version = state.get("order_version", 1)
    if served and version != ORDER_VERSION:
        raise StateError(
            f"the saved loader state is in the middle of pass {state['pass']} of order version"
            f" {version}, this version of the loader serves order version {ORDER_VERSION}, in which"
            " other samples are still to come: resume from a state that was saved at the end of a"
            " pass, or with the version of the loader that saved it"
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
