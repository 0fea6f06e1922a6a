"""How passes are served, which seed is drawn, which saved states a loader accepts, and which
arguments it takes from a DataLoader."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast, get_args

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from loaders.adopting.adoption import safe_in_threads, split_dataset
from loaders.adopting.native_folder import Decoding, ScaledDecoding
from loaders.errors import LoaderError, SourceError, StateError, check_at_least_one, check_word
from loaders.options import OrderOptions, Workers
from loaders.order.reuse import ORDER_VERSION, ReuseBuffer
from loaders.sources.samplers import STATEFUL, OwnBatching, torch_class

MOST_REUSE = 4
"""reuse="auto" goes up to this."""
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
            check_at_least_one(what, self.pass_limit)

    def plan(
        self, order: OrderOptions, samples: int, buffer_batches: int, seed: tuple[int, ...]
    ) -> ReuseBuffer:
        """Which samples form each batch of a pass that is served like this."""
        buffered = (self.batch_size, self.reuse, buffer_batches)
        return ReuseBuffer(samples, *buffered, order.mode, order.shuffle, order.drop_last, seed)

    def fit_to_share(self, share: int, drop_last: bool) -> "Serving":
        """This, with batches of no more than the `share` of samples that this rank has in a pass:
        as with a DataLoader, a batch is then smaller than was asked for."""
        check_at_least_one("reuse", self.reuse)
        check_at_least_one("batch_size", self.batch_size)
        if self.batch_size <= share:
            return self
        if drop_last:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than what a rank serves in a pass"
                f" (samples: {share}), and drop_last=True leaves out what fills no batch, so"
                " nothing would be served: lower batch_size, or leave drop_last out"
            )
        return replace(self, batch_size=share)


@dataclass(slots=True)
class PassPosition:
    """The position of one loader. It is all that resuming needs to know of the order."""

    running: Serving
    """How the pass is served that runs or ran last."""
    next: Serving
    """How the passes after it are served."""
    pass_index: int = 0
    served: int = 0
    """So many batches of the pass were served."""
    resuming: bool = False
    """Whether the next iteration goes on in the middle of the pass."""

    @property
    def serving(self) -> Serving:
        """How the pass is served that the next iteration begins or goes on with."""
        return self.running if self.resuming else self.next

    def begin(self) -> None:
        """Begin the next pass, or go on with the one that is resumed."""
        if self.resuming:
            self.resuming = False
            return
        if self.served:
            # The consumer left the pass before its end. Its samples are gone; the next begins.
            self.end()
        self.running = self.next

    def end(self) -> None:
        """Go to the beginning of the next pass."""
        self.pass_index, self.served = self.pass_index + 1, 0

    def state(self) -> dict[str, Any]:
        """Return the position as plain values, as a loader's saved state has them."""
        return {
            "pass": self.pass_index,
            "served_batches": self.served,
            "running": asdict(self.running),
            "next": asdict(self.next),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PassPosition":
        """Return the position of a saved state."""
        served = state["served_batches"]
        running, following = Serving(**state["running"]), Serving(**state["next"])
        return cls(running, following, state["pass"], served, resuming=served > 0)


def first_serving(reuse: Any, reaugment: bool, batch_size: int) -> Serving:
    """`reuse` is what the user gave: a number, or "auto", which begins with 1."""
    if isinstance(reuse, str) and reuse != "auto":
        raise ValueError(f'reuse must be a number or "auto", not {reuse!r}')
    return Serving(1 if reuse == "auto" else reuse, reaugment, batch_size)


UNCOMPARED_SEED = 0
"""What processes have that serve one order, and cannot compare what they draw."""


def settle_seed(seed: int | torch.Generator | None, uncompared: bool) -> int:
    """The seed that was given; else one that is drawn, as a DataLoader draws one, from its
    generator or from torch's. `uncompared`: whether others must have drawn the same."""
    if isinstance(seed, int):
        return seed
    if uncompared:
        return UNCOMPARED_SEED
    return draw_seed(seed)


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from a generator; None: from torch's own."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"ReuseLoader needs a map-style data set with len() and [i], or a stream that can be"
            f" iterated, not {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise SourceError("the data set is empty: there is nothing to serve")


def check_state(state: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a saved state that a loader with the state `here` could not go on from."""
    if (pieces := state.get("pieces", 1)) != 1:
        raise StateError(
            f"the saved state is one of a view that cuts batches into {pieces} pieces, so its count"
            " of batches is another: load it into such a view of a SharedStream"
        )
    check_order(state, here, ("samples", *SAME_AFTER_RESUME), state["served_batches"])
    if state["served_batches"] and state["world_size"] != here["world_size"]:
        raise StateError(
            f"the saved loader state is in the middle of pass {state['pass']} on"
            f" {state['world_size']} ranks, this run has {here['world_size']}: resume on"
            f" {state['world_size']} ranks, or from a state that was saved at the end of a pass"
        )


def check_order(
    state: dict[str, Any], here: dict[str, Any], keys: Sequence[str], served: int
) -> None:
    """Refuse a state that differs in one of `keys`, or that is in the middle of a pass whose order
    this version does not compute."""
    for key in keys:
        if state[key] != here[key]:
            raise StateError(
                f"the saved loader state has {key}={state[key]}, this loader has {key}={here[key]},"
                f" so it would serve another order: make the loader with {key}={state[key]}"
            )
    version = state.get("order_version", 1)
    if served and version != ORDER_VERSION:
        raise StateError(
            f"the saved loader state is in the middle of pass {state['pass']} of order version"
            f" {version}, this version of the loader serves order version {ORDER_VERSION}: resume"
            " from a state of the end of a pass, or with the version of the loader that saved it"
        )


@dataclass(frozen=True, slots=True)
class Adopted:
    """The settings of a DataLoader."""

    dataset: Any
    batch_size: int
    shuffle: bool
    sampler: Iterable[int] | OwnBatching | None
    """The sampler. None: `shuffle` describes its order completely."""
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    """The collate function. None: it is torch's default_collate."""
    pin_memory: bool
    workers: Workers
    seed: int | None = None
    """The seed of its DistributedSampler. None: it has none."""
    rank: tuple[int, int] | None = None
    """The rank that its DistributedSampler draws for, and the number of ranks."""
    notes: tuple[str, ...] = ()
    """The settings that have no effect, each in a sentence."""


def from_dataloader(
    dataloader: DataLoader[Any], splits: bool = True, once: bool = False
) -> Adopted:
    """`splits`: whether the data set's transform will be split, so that a thread that reads ahead
    runs only its known part. `once`: whether each sample is served once a pass."""
    _check(dataloader)
    theirs = OwnBatching.from_loader(dataloader)
    if theirs is not None and not once:
        if theirs.batch_size is None:
            raise LoaderError(theirs.refusal)
        theirs = None  # one thread at a time iterates the stream, and no sample comes twice
    dataset, workers = dataloader.dataset, dataloader.num_workers
    batches, collate = cast(BatchSampler, dataloader.batch_sampler), dataloader.collate_fn
    streamed = theirs is None and isinstance(dataset, IterableDataset)
    if theirs is None:
        collate = None if collate is default_collate else collate
        if not workers and not streamed:
            # A user's own code may not read ahead: it shares random generators with the training.
            workers = int(safe_in_threads(split_dataset(dataset)[0] if splits else dataset))
    context, init = dataloader.multiprocessing_context, dataloader.worker_init_fn
    if not dataloader.num_workers or _is_lightnings(init):
        init = None
    if streamed or not dataloader.num_workers:
        context = None
    adopted = Adopted(
        dataset=dataset,
        batch_size=batches.batch_size if theirs is None else theirs.batch_size or 1,
        shuffle=False,
        sampler=theirs,
        drop_last=theirs is None and batches.drop_last,
        collate=collate,
        pin_memory=dataloader.pin_memory,
        workers=Workers(
            workers or int(streamed),
            timeout=None if streamed else dataloader.timeout or None,
            start_method=None if context is None else cast(Any, context.get_start_method()),
            init=init,
        ),
        notes=tuple(_ignored_settings(dataloader, theirs)),
    )
    return adopted if theirs is not None else _with_order(adopted, batches.sampler)


def _is_lightnings(function: object) -> bool:
    function = function.func if isinstance(function, functools.partial) else function
    return getattr(function, "__name__", None) == "pl_worker_init_function"


def _check(dataloader: DataLoader[Any]) -> None:
    if not isinstance(dataloader, DataLoader):
        raise TypeError(
            f"expected a torch DataLoader, not a {type(dataloader).__name__}: give its data set to"
            " ReuseLoader(dataset, batch_size=...)"
        )
    kind = torch_class(dataloader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise LoaderError(
            f"{kind.__name__} has an __iter__ of its own, which nobody would call: give its data"
            " set to ReuseLoader instead"
        )


def _ignored_settings(dataloader: DataLoader[Any], theirs: OwnBatching | None) -> Iterator[str]:
    if type(dataloader).__module__.startswith(STATEFUL):
        yield "its load_state_dict has no effect: ReuseLoader has a state_dict of its own"
    streamed = theirs is None and isinstance(dataloader.dataset, IterableDataset)
    if streamed and dataloader.num_workers:
        yield (
            f"num_workers={dataloader.num_workers}, and what it says of them, has no effect: one"
            f" thread at a time iterates {type(dataloader.dataset).__name__}"
        )
    given = dataloader.worker_init_fn
    if dataloader.num_workers == 0 and given is not None and not _is_lightnings(given):
        yield "worker_init_fn has no effect with num_workers=0, as in torch"
    if dataloader.prefetch_factor not in (None, 2):  # 2 is what torch fills in
        given = dataloader.prefetch_factor
        yield f"prefetch_factor={given} has no effect: how much is read ahead is settled here"
    if dataloader.persistent_workers:
        why = "workers stay from pass to pass"
        if isinstance(dataloader.dataset, IterableDataset):
            why = "those of a stream start anew in each"
        yield f"persistent_workers=True has no effect: {why}"
    if dataloader.pin_memory_device:
        yield f"pin_memory_device={dataloader.pin_memory_device!r} has no effect"
    if not dataloader.in_order:
        yield "in_order=False has no effect: the order never depends on which worker was faster"
    if _is_lightnings(dataloader.worker_init_fn):
        yield "Lightning's seeding of workers has no effect: randomness is drawn per serve"


def _with_order(adopted: Adopted, sampler: Iterable[int]) -> Adopted:
    if isinstance(adopted.dataset, IterableDataset):
        return adopted  # its order is its own
    kind = torch_class(sampler)
    source = getattr(sampler, "dataset" if kind is DistributedSampler else "data_source", None)
    whole = source is not None and len(source) == len(adopted.dataset)
    if kind is SequentialSampler and whole:
        return adopted
    if isinstance(sampler, RandomSampler) and kind is RandomSampler and whole:
        once = sampler.num_samples == len(adopted.dataset) and not sampler.replacement
        return replace(adopted, shuffle=True) if once else replace(adopted, sampler=sampler)
    if isinstance(sampler, DistributedSampler) and kind is DistributedSampler and whole:
        notes = adopted.notes
        if sampler.drop_last and len(adopted.dataset) % sampler.num_replicas:
            notes += (
                "DistributedSampler(drop_last=True) has no effect: every rank gets the same number"
                " of samples, because a few are served twice",
            )
        return replace(
            adopted,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
            rank=(sampler.rank, sampler.num_replicas),
            notes=notes,
        )
    return replace(adopted, sampler=sampler)


@dataclass(frozen=True, slots=True)
class AdoptedArguments:
    """What `ReuseLoader` takes over from a DataLoader."""

    arguments: dict[str, Any]
    seed_from: str
    """Where the seed comes from. Empty: it was given, or `ReuseLoader` draws it."""
    notes: tuple[str, ...]
    """What has no effect, or is otherwise than with the DataLoader."""
    batches: int | None
    """How many batches an epoch of the DataLoader has. None: nobody knows."""

    def served_in(self, batches: Callable[[], int], reuse: int) -> "AdoptedArguments":
        """The same, which says that a pass with reuse has more batches than an epoch had."""
        if reuse == 1 or self.batches is None:
            return self
        longer = (
            f"{batches()} batches a pass (DataLoader: {self.batches}): divide max_epochs and"
            f" schedules by epoch by {reuse}"
        )
        return replace(self, notes=(*self.notes, longer))


def adopted_arguments(
    dataloader: DataLoader[Any], changes: Mapping[str, Any], reuse: int | str
) -> AdoptedArguments:
    """`changes` are arguments that were given beside the DataLoader, and replace what it says; and
    "decode", which says whether JPEGs may be decoded smaller (see `native_folder`)."""
    changes = dict(changes)
    check_word("decode", decode := changes.pop("decode", "exact"), get_args(Decoding))
    splits = changes.get("augment") is None and changes.get("once") is None
    adopted = from_dataloader(dataloader, splits, reuse == 1)
    values = {each.name: getattr(adopted, each.name) for each in fields(adopted)}
    given = {k: v for k, v in values.items() if v is not None and k != "notes"}
    if decode == "scaled":
        given["dataset"] = ScaledDecoding(dataloader.dataset)
    generator = getattr(dataloader.sampler, "generator", None) or dataloader.generator
    seed_from = ""
    if "seed" in given:
        seed_from = f"of its {type(dataloader.sampler).__name__}"
    elif generator is not None:
        given["seed"], seed_from = generator, "drawn from its generator"
    seed_from = "" if "seed" in changes else seed_from
    listed = not isinstance(dataloader.dataset, IterableDataset) and reuse != 1
    batches = len(dataloader) if listed else None
    workers = adopted.workers.changed_by(changes.get("workers", Workers()))
    arguments = given | changes | {"workers": workers}
    return AdoptedArguments(arguments, seed_from, adopted.notes, batches)
