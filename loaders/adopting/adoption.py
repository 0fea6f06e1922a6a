"""A user's `DataLoader`, data set or arrays in memory, and what is read from them.

    DataLoader  --from_dataloader-->  Adopted(data set, batch size, order, collate, ...)
    data set    --split_dataset---->  one with the cached part of its transform, and the rest
    data set    --decoded_columns-->  its columns, if it is decoded in memory

Nothing here changes its arguments. Settings that cannot be adopted are refused; those without an
effect are named in `notes` or in the split's report.
"""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from loaders.adopting.torchvision_steps import (
    NOT_ONE_PICTURE,
    READ_TRANSFORMS,
    SAFE_IN_THREADS,
    is_from,
    known_size,
    torchvision_name,
    torchvision_reader,
)
from loaders.adopting.transforms import Decode, TransformSplit, flat_steps, split_transform
from loaders.errors import LoaderError
from loaders.sources.datasets import PictureArrays
from loaders.sources.samplers import STATEFUL, OwnBatching, torch_class

# Map-style: len() and [i]; torch's Dataset does not promise len().
DataSet = Any


@dataclass(frozen=True, slots=True)
class AdoptedWorkers:
    """The workers of a DataLoader."""

    count: int
    timeout: float | None = None
    start_method: str | None = None
    """How its multiprocessing_context starts processes. None: it has none."""
    worker_init_fn: Callable[[int], object] | None = None
    """Its worker processes call this with their numbers. None: the user gave no function."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """The settings of a DataLoader."""

    dataset: DataSet
    batch_size: int
    shuffle: bool
    sampler: Iterable[int] | OwnBatching | None
    """The sampler. None: `shuffle` describes its order completely."""
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    """The collate function. None: it is torch's default_collate."""
    pin_memory: bool
    workers: AdoptedWorkers
    seed: int | None = None
    """The seed of its DistributedSampler. None: it has none."""
    rank: tuple[int, int] | None = None
    """The rank that its DistributedSampler draws for, and the number of ranks."""
    notes: tuple[str, ...] = ()
    """The settings that have no effect, each in a sentence."""

    def arguments(self) -> dict[str, Any]:
        """As arguments of `ReuseLoader`, without its workers, and without those that are None."""
        names = [each.name for each in fields(self) if each.name not in ("workers", "notes")]
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


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
        workers=AdoptedWorkers(
            workers or int(streamed),
            None if streamed else dataloader.timeout or None,
            None if context is None else context.get_start_method(),
            init,
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


def split_dataset(dataset: DataSet) -> tuple[DataSet, TransformSplit | None]:
    """The data set, or a copy of it that applies only the cached part of its transform; and the
    split of the transform (None: it has none, or its own code applies it, in [i])."""
    if type(dataset) is Subset:
        inner, split = split_dataset(dataset.dataset)
        if inner is not dataset.dataset:
            dataset = copy.copy(dataset)
            dataset.dataset = inner
        return dataset, split
    whole = _split_parts(dataset)
    if whole is not None:
        return whole
    owner = torchvision_reader(dataset)
    both = getattr(dataset, "transforms", None)
    joint = both is not None and not is_from(both, "torchvision.datasets.vision")
    if owner is None or owner in NOT_ONE_PICTURE or joint:
        return dataset, None  # if it is random, `own_transforms` looks at what [i] does with it
    transform = getattr(both, "transform", None) if owner in READ_TRANSFORMS else dataset.transform
    if transform is None:
        return dataset, None
    split = split_transform(transform, known_size(dataset, owner))
    made = copy.copy(dataset)
    made.transform = split.decode
    if both is not None:
        made.transforms = copy.copy(both)
        made.transforms.transform = split.decode
    return made, split


def _split_parts(dataset: DataSet) -> tuple[DataSet, TransformSplit] | None:
    """A ConcatDataset with its parts split, if what is redone is the same for all of them."""
    if type(dataset) is not ConcatDataset:
        return None
    made, splits = zip(*map(split_dataset, dataset.datasets), strict=True)
    first = splits[0]
    for split in splits:
        if split is None or (split.size, split.augment) != (first.size, first.augment):
            return None
        same_steps = [*map(id, split.rest)] == [*map(id, first.rest)]
        if not same_steps and not (split.batched and first.batched):
            return None
    whole = copy.copy(dataset)
    whole.datasets = list(made)
    return whole, first


def decoded_columns(
    dataset: DataSet,
) -> tuple[list[torch.Tensor], NDArray[np.int64] | None] | None:
    """The columns of a data set that is decoded in memory (views; [N, C, H, W] for pictures), and
    the rows of its samples in them (None: row i is sample i). Returns None if it must be read."""
    if type(dataset) is Subset:
        inner = decoded_columns(dataset.dataset)
        if inner is None:
            return None
        columns, rows = inner
        ids = np.asarray(dataset.indices, dtype=np.int64)
        if rows is None:
            return columns, np.where(ids < 0, ids + len(columns[0]), ids)
        return columns, rows[ids]
    if type(dataset) is PictureArrays:
        return [_view(dataset.pixels).permute(0, 3, 1, 2), _view(dataset.labels)], None
    if type(dataset) is TensorDataset:
        return list(dataset.tensors), None
    owner = torchvision_reader(dataset)
    if owner not in ("CIFAR10", "MNIST") or dataset.target_transform is not None:
        return None
    decode = dataset.transform
    if decode is not None and not (isinstance(decode, Decode) and decode.keeps_pixels):
        return None
    labels, pixels = _column(dataset.targets), _column(dataset.data)
    dimensions = 3 if owner == "MNIST" else 4
    if labels is None or pixels is None or pixels.dtype != torch.uint8:
        return None
    if pixels.ndim != dimensions or len(labels) != len(pixels):
        return None
    if owner == "CIFAR10":
        return [pixels.permute(0, 3, 1, 2), labels], None
    # MNIST's [i] returns int(label).
    whole = labels.ndim == 1 and not labels.is_floating_point() and not labels.is_complex()
    return ([pixels[:, None], labels.long()], None) if whole else None


def _column(values: Any) -> torch.Tensor | None:
    """The values of all samples, as torch's default_collate would batch them. None: they must be
    read sample by sample."""
    if isinstance(values, list):
        kinds = {*map(type, values)}
        return default_collate(values) if kinds in ({int}, {float}, {bool}) else None
    if isinstance(values, np.ndarray) and values.dtype.kind in "biufc":
        return _view(values)
    return values if type(values) is torch.Tensor else None


def _view(array: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():  # a file may be mapped for reading; nobody writes to it
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


IN_MEMORY = (list, tuple, range, np.ndarray, torch.Tensor, TensorDataset)
CALLS_OTHERS = frozenset({"Lambda", "RandomApply", "RandomChoice", "RandomOrder"})
"""Transforms of torchvision that call functions of the user's."""


def safe_in_threads(dataset: Any) -> bool:
    """Whether reading `dataset` from several threads is known to be safe."""
    kind = type(dataset)
    if kind is Subset:
        return safe_in_threads(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(safe_in_threads, dataset.datasets))
    if kind is StackDataset:
        inside = dataset.datasets
        return all(map(safe_in_threads, inside.values() if isinstance(inside, dict) else inside))
    if kind in IN_MEMORY or kind.__module__.startswith("loaders."):
        return True
    if torchvision_reader(dataset) not in SAFE_IN_THREADS:
        return False
    opens = getattr(dataset, "loader", None)  # what a DatasetFolder opens its files with
    return (
        dataset.target_transform is None
        and (opens is None or getattr(opens, "__module__", "") == "torchvision.datasets.folder")
        and all(map(_is_safe_step, flat_steps(dataset.transform)))
    )


def why_not_sendable(dataset: Any) -> str:
    """Why a data set cannot be pickled for another process. Empty: it can."""
    try:
        pickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(dataset)
    except Exception as error:
        return str(error)
    return ""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes  # a large array comes as a PickleBuffer


def _is_safe_step(step: Any) -> bool:
    if isinstance(step, Decode):
        return all(map(_is_safe_step, step.steps))
    name = torchvision_name(step)
    return name is not None and name not in CALLS_OTHERS
