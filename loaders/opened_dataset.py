"""A user's data set as a pipeline reads it: opened by its backend, its transform cut in two.

dataset (path or map-style) --backend--> map-style data set --split_dataset--> data set without
the random part of its transform, and that part; or, if all of it is in memory, its columns
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loaders.adopting.adoption import decoded_columns, split_dataset
from loaders.adopting.native_folder import NativeFolder, ScaledDecoding, decoded_natively
from loaders.adopting.torchvision_steps import name_of
from loaders.adopting.transforms import TransformSplit, take_transform
from loaders.arguments import check_dataset
from loaders.backends import open_source
from loaders.batching.batches import each_view
from loaders.batching.user_views import WholeSample
from loaders.options import LoaderOptions, check_stream
from loaders.pixels.augmentation import RandomResizedCrop, first_step
from loaders.slots.leaves import leaves_of, picture_number
from loaders.sources.datasets import counts_of, unwrapped
from loaders.sources.randomness import seeded_randomness
from loaders.streams.streamed_samples import StreamedSamples, as_stream
from loaders.workers.decode_work import PassOrder


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """Samples that lie decoded in memory, so that they need no slots."""

    columns: tuple[Any, ...]
    rows: NDArray[np.int64] | None
    """The row of each sample in the columns. None: sample i is row i."""

    def rows_of(self, order: PassOrder, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of the samples at positions of a pass."""
        ids = order.ids(positions)
        return ids if self.rows is None else self.rows[ids]


@dataclass(frozen=True, slots=True)
class OpenedDataset:
    """A data set that is ready to be read."""

    dataset: Any  # map-style: len() and [i]
    split: TransformSplit | None
    """The two parts of the data set's own transform, where the user gave no augmentation."""
    decoded: DecodedColumns | None
    scaled: bool = False
    """Whether JPEGs may be decoded smaller than they are."""
    decoding: str = ""
    """Who decodes the pictures of a folder of torchvision's. Empty: it is none."""

    @property
    def counted(self) -> dict[str, Any]:
        """What `LoaderStats` says of who decoded."""
        total: Counter[str] = Counter()
        for counts in counts_of(self.dataset):
            total.update(counts.snapshot())
        return {"decoders": tuple(sorted(total.items()))}


def open_dataset(dataset: Any, options: LoaderOptions) -> OpenedDataset:
    scaled = isinstance(dataset, ScaledDecoding)
    dataset = dataset.dataset if scaled else dataset
    if (source := as_stream(dataset)) is not None:
        check_stream(options)
        _check_parts(options, None)
        return OpenedDataset(StreamedSamples(source), None, None)
    dataset = open_source(dataset, options.backend)
    check_dataset(dataset)
    split = None
    if options.augment is None and options.once is None:
        if (apart := take_transform(dataset)) is not None:
            dataset, redone = apart
            report = (
                "cached: the data set's columns; redone at every serve:"
                f" {name_of(redone.transform)} (it may be random)"
            )
            split = TransformSplit(None, WholeSample(redone), batched=False, report=report)
        else:
            dataset, split = split_dataset(dataset)
    dataset, decoding = decoded_natively(dataset, scaled)
    split = None if split is None else _for_its_pictures(split, dataset)
    _check_parts(options, split)
    opened = OpenedDataset(dataset, split, None, scaled, decoding)
    if scaled:
        _check_scaled(opened, options)
    if any(given is not None for given in (options.once, options.cache, options.collate)):
        return opened
    there = decoded_columns(dataset)
    columns = None if there is None else DecodedColumns(tuple(there[0]), there[1])
    return replace(opened, decoded=columns)


def _check_parts(options: LoaderOptions, split: TransformSplit | None) -> None:
    """Refuse to say what goes with a picture that nothing moves."""
    moves = (options.augment, options.once, None if split is None else split.augment)
    if options.parts is not None and all(each is None for each in moves):
        raise ValueError("parts has no effect without augment: leave it out")


def _check_scaled(opened: OpenedDataset, options: LoaderOptions) -> None:
    """Refuse decode="scaled" where whole pictures are needed, or nobody of ours decodes them."""
    folder, workers, device = unwrapped(opened.dataset)[0], options.workers, options.device
    native = isinstance(folder, NativeFolder)
    decode = folder.transform if native else None
    augment = options.augment if opened.split is None else opened.split.augment
    crops = [isinstance(first_step(each), RandomResizedCrop) for each in each_view(augment)]
    apart = workers.kind == "process" or workers.init or workers.start_method or workers.timeout
    refused = {
        f"{type(folder).__name__} is {opened.decoding or 'no ImageFolder'}": not native,
        "its transform changes the whole picture before a crop": decode and not decode.keeps_pixels,
        "no RandomResizedCrop with a batched form comes first": not crops or not all(crops),
        "the cache keeps whole pictures": options.cache is not None,
        "a collate function gets whole samples": options.collate is not None,
        "once crops whole pictures": options.once is not None,
        "the device augments whole pictures": device is not None and device.augments,
        "only threads of the loader decode so": apart,
    }
    if why := [each for each, holds in refused.items() if holds]:
        raise ValueError(f'decode="scaled" has no effect here, because {why[0]}: leave it out')


def _for_its_pictures(split: TransformSplit, dataset: Any) -> TransformSplit:
    """The split for pictures as the data set's first sample has one."""
    if not split.rest:
        return split
    try:
        with seeded_randomness():  # torchvision's FakeData draws
            sample = dataset[0]
    except Exception:  # reading it later raises it
        return split
    number = picture_number(sample)
    return split if number is None else split.for_picture(leaves_of(sample)[number])
