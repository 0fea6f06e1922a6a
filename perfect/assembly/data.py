"""Builds the loaders of training, hold-out and test samples from config.data, .augment, .loader.

pictures -> train part -> ReuseLoader(augment)          hold-out, test -> ReuseLoader(reuse=1)
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from loaders import Cache, LoaderError, ReuseLoader, Workers
from loaders.adopting.adoption import decoded_columns
from loaders.backends import open_source
from loaders.errors import BackendMissing
from loaders.order.keyed_permutation import samples_per_rank
from loaders.pipeline import AHEAD, HELD
from loaders.sources.datasets import cifar10, picture_folder
from offload.sizes import format_size
from perfect.assembly.augmentation import build_augmentation, centre_crop, pictures_after
from perfect.assembly.own_class import construct_own
from perfect.config.schema import LANGUAGE_MODEL_NAMES, TEXTS, RunConfig
from perfect.errors import BuildError
from perfect.models import longest_sequence
from perfect.text.padding import PadToLengths, lengths_for
from perfect.text.text_lines import ReadText, TextLines, read_lines, read_wikitext

log = logging.getLogger(__name__)

EVALUATION_IN_MEMORY = 512 << 20
"""The decoded hold-out and test pictures are each kept in memory up to so many bytes."""


@dataclass(frozen=True, slots=True)
class Data:
    """The loaders of a run's training, hold-out and test samples."""

    train: ReuseLoader
    holdout: ReuseLoader | None
    test: ReuseLoader | None
    num_classes: int | None
    """The number of picture classes, or the size of a text's vocabulary."""
    datamodule: L.LightningDataModule | None = None

    def fit_arguments(self) -> dict[str, Any]:
        """Return what `Trainer.fit` is given of this data."""
        if self.datamodule is not None:
            return {"datamodule": self.datamodule}
        return {"train_dataloaders": self.train, "val_dataloaders": self.holdout}

    def close(self) -> None:
        """Close the loaders. This is also needed after a run that Lightning did not tear down."""
        for loader in filter(None, (self.train, self.holdout, self.test)):
            loader.close()


def build_data(config: RunConfig, *, prepare: bool = True) -> Data:
    """`prepare`: let a data module of the user's own prepare its data, which may download it."""
    if config.data.class_path is not None:
        return _own_data(config, prepare)
    if config.data.name in TEXTS:
        return _text(config)
    problems = [*_wrong_sizes(config)]
    try:
        train, test = _pictures(config)
    except BuildError as error:
        BuildError.check([error, *problems])
        raise
    try:
        learned, held = split_holdout(train.labels, config.data.holdout, config.seed)
    except BuildError as error:
        problems.append(error)
        learned, held = split_holdout(train.labels, 0, config.seed)  # to find what else is wrong
    asked = config.data.train_samples
    if asked is not None and asked > len(learned):
        why = f"is {asked}, but there are {len(learned)} samples: lower it"
        problems.append(BuildError("data.train_samples", why))
    elif asked is not None and asked < len(learned):
        labels = np.asarray(train.labels)[learned]
        learned = learned[split_holdout(labels, asked, config.seed)[1]]
    BuildError.check([*problems, *_wrong_batches(config, len(learned))])
    return Data(
        train=_train_loader(config, Subset(train, learned.tolist())),
        holdout=_evaluation_loader(config, train, held.tolist()) if len(held) else None,
        test=_evaluation_loader(config, test, range(len(test))),
        num_classes=len(train.classes),
    )


def _pictures(config: RunConfig) -> tuple[Any, Any]:
    """Return the pictures of training and of the test."""
    root = Path(config.data.root)
    train: Any
    try:
        if config.data.name == "cifar10":
            train, test = cifar10(root, train=True), cifar10(root, train=False)
        else:
            train, test = (_folder(config, root / part) for part in ("train", "val"))
            if test.classes != train.classes:
                odd = sorted(set(test.classes) ^ set(train.classes))
                raise LoaderError(
                    f"train and val under {root} hold different classes ({', '.join(odd[:5])}):"
                    " give both the same folders"
                )
    except BackendMissing as error:
        raise BuildError("loader.backend", str(error)) from error
    except LoaderError as error:
        raise BuildError("data.root", str(error)) from error
    return train, test


def _text(config: RunConfig) -> Data:
    """Build loaders of text. The tokens are in memory, and the loader only gathers rows of them."""
    given, model = config.data, config.model.name
    sequence = given.sequence or 0
    longest = longest_sequence(model) if model in LANGUAGE_MODEL_NAMES else None
    if longest is not None and sequence > longest:
        raise BuildError(
            "data.sequence", f"is {sequence}, but {model} has {longest} positions: lower it"
        )
    pad: PadToLengths | None = None
    try:
        if given.name == "lines":
            text = read_lines(Path(given.root), sequence, given.vocabulary)
            pad = _padding(config, text)
        else:
            text = read_wikitext(Path(given.root), sequence, given.vocabulary, given.test_text)
    except LoaderError as error:
        raise BuildError("data.root", str(error)) from error
    # A token takes two numbers of eight bytes, one as input and one as target.
    BuildError.check([*_small_buffer(config, (AHEAD + HELD) * sequence * 16)])
    learned = _first_samples(len(text.train), given.train_samples, "data.train_samples")
    held, tested = (
        _first_samples(len(part), given.evaluation_samples, "data.evaluation_samples")
        for part in (text.valid, text.test)
    )
    return Data(
        train=_train_loader(config, Subset(text.train, list(learned)), pad),
        holdout=_evaluation_loader(config, text.valid, held, pad),
        test=_evaluation_loader(config, text.test, tested, pad),
        num_classes=text.vocabulary,
    )


def _padding(config: RunConfig, text: ReadText[TextLines]) -> PadToLengths:
    """Return what pads batches to a few lengths: those of the YAML, or some that fit the texts."""
    asked = config.data.lengths
    if asked != "auto":
        return PadToLengths(tuple(asked))
    longest = max(max(part.lengths) for part in (text.train, text.valid, text.test))
    lengths = lengths_for(text.train.lengths, config.loader.batch_size, longest)
    log.info("batches are padded to %s tokens", ", ".join(map(str, lengths)))
    return PadToLengths(lengths)


def _first_samples(there: int, asked: int | None, key: str) -> range:
    if asked is not None and asked > there:
        raise BuildError(key, f"is {asked}, but there are {there} samples: lower it")
    return range(asked or there)


def _folder(config: RunConfig, path: Path) -> Any:
    given = config.data
    files = picture_folder(path, given.picture_size, exif=given.exif, pixel_limit=given.pixel_limit)
    return open_source(files, config.loader.backend)


def split_holdout(
    labels: Sequence[int] | np.ndarray, holdout: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids to train on and ids to hold out. Equally many of every class are held out."""
    labels = np.asarray(labels)
    if holdout >= len(labels):
        raise BuildError(
            "data.holdout",
            f"is {holdout}, but there are {len(labels)} training samples: lower it, to leave some",
        )
    order = np.random.default_rng(np.random.SeedSequence((seed, 7))).permutation(len(labels))
    # Rank of each sample within its class, in the shuffled order: take the lowest ranks.
    rank = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        rank[members] = np.arange(len(members))
    by_rank = order[np.argsort(rank[order], kind="stable")]
    return np.sort(by_rank[holdout:]), np.sort(by_rank[:holdout])


def _wrong_batches(config: RunConfig, samples: int) -> Iterator[BuildError]:
    """Find batches that are larger than a rank's share of the training set."""
    sizes = [(config.loader.batch_size, "loader.batch_size")]
    sizes += [(p.batch_size or 0, f"phases.{n}.batch_size") for n, p in enumerate(config.phases)]
    share = samples_per_rank(samples, config.trainer.devices)
    of = f" on {config.trainer.devices} devices" if config.trainer.devices > 1 else ""
    for size, key in sizes:
        if size > share:
            why = f"{size} is larger than the training set ({share} samples{of}): lower it"
            yield BuildError(key, why)


def _train_loader(
    config: RunConfig, dataset: Any, collate: PadToLengths | None = None
) -> ReuseLoader:
    first, keys = config.phases[0], config.loader
    BuildError.check([*_wrong_batches(config, len(dataset))])
    cache = None
    if keys.cache is not None and keys.cache_bytes is not None:
        cache = Cache(keys.cache, keys.cache_bytes, keys.cache_dir, keys.cache_key)
    return ReuseLoader(
        dataset,
        batch_size=config.loader.batch_size,
        reuse=first.reuse,
        buffer_batches=config.loader.buffer_batches,
        reaugment=first.reaugment,
        augment=build_augmentation(config.augment),
        collate=collate,
        mode=config.loader.mode,
        workers=Workers(config.loader.workers, config.loader.worker_kind),
        drop_last=config.loader.drop_last,
        seed=config.seed,
        pin_memory=torch.cuda.is_available() and config.trainer.accelerator != "cpu",
        buffer_bytes=config.loader.buffer_bytes,
        cache=cache,
        on_error=config.loader.on_error,
    )


def _evaluation_loader(
    config: RunConfig, dataset: Any, ids: Sequence[int], collate: PadToLengths | None = None
) -> ReuseLoader:
    in_files = collate is None and decoded_columns(dataset) is None
    return ReuseLoader(
        Subset(dataset, list(ids)),
        batch_size=min(
            config.loader.batch_size, samples_per_rank(len(ids), config.trainer.devices)
        ),
        reuse=1,
        augment=centre_crop(config.augment, _stored_side(config)),
        collate=collate,
        shuffle=False,
        workers=config.loader.workers,
        seed=config.seed,
        cache=Cache("ram", EVALUATION_IN_MEMORY) if in_files else None,
    )


def _stored_side(config: RunConfig) -> int:
    return 32 if config.data.name == "cifar10" else config.data.picture_size or 0


def _wrong_sizes(config: RunConfig) -> Iterator[BuildError]:
    """Find augmentations that do not fit their pictures, and a buffer without room for a batch."""
    side = _stored_side(config)
    (height, width), problems = pictures_after(config.augment, side)
    yield from problems
    # A pixel takes three bytes, and a label eight.
    yield from _small_buffer(
        config, (AHEAD + HELD) * (height * width * 3 + 8) + side * side * 3 + 8
    )


def _small_buffer(config: RunConfig, each: int) -> Iterator[BuildError]:
    """Find a buffer that holds no batch: a sample takes `each` bytes of it and under way."""
    batch = max([config.loader.batch_size, *(p.batch_size or 0 for p in config.phases)])
    least = batch * each
    if config.loader.buffer_bytes is not None and config.loader.buffer_bytes < least:
        yield BuildError(
            "loader.buffer_bytes",
            f"{format_size(config.loader.buffer_bytes)} is too small: a batch of {batch} in the"
            f" buffer and {AHEAD + HELD} under way take {least} bytes; raise it, or lower"
            " batch_size",
        )


def _own_data(config: RunConfig, prepare: bool) -> Data:
    datamodule = construct_own(config.data, "data", L.LightningDataModule)
    if prepare:
        datamodule.prepare_data()
    try:
        datamodule.setup("fit")
    except Exception as error:
        if prepare:
            raise
        raise BuildError(
            "data.class_path",
            f"its setup() fails ({type(error).__name__}: {error}). --check downloads nothing, so it"
            " has not called prepare_data(): call that once, or train",
        ) from error
    loader = datamodule.train_dataloader()
    if isinstance(loader, DataLoader):
        if loader.collate_fn is not torch.utils.data.default_collate:
            raise BuildError(
                "data.class_path",
                "its train DataLoader has a collate_fn of its own, which ReuseLoader would not"
                " call: return a ReuseLoader from train_dataloader()",
            )
        if not isinstance(loader.sampler, RandomSampler | SequentialSampler):
            raise BuildError(
                "data.class_path",
                f"its train DataLoader has a {type(loader.sampler).__name__}, which ReuseLoader"
                " would not use: return a DataLoader without a sampler, or a ReuseLoader",
            )
        if loader.batch_size != config.loader.batch_size:
            log.warning(
                "batches have %s samples (loader.batch_size), not the %s of the data module's"
                " DataLoader",
                config.loader.batch_size,
                loader.batch_size,
            )
        try:
            dataset = open_source(loader.dataset, config.loader.backend)
        except LoaderError as error:
            raise BuildError("loader.backend", str(error)) from error
        loader = _train_loader(config, dataset)
    elif not isinstance(loader, ReuseLoader):
        raise BuildError(
            "data.class_path",
            f"train_dataloader() gave a {type(loader).__name__}: return a DataLoader over a"
            " map-style data set, or a ReuseLoader",
        )
    else:
        for section in {"loader", "augment"} & config.model_fields_set:
            why = "has no effect, as the data module brings its own ReuseLoader: remove it"
            raise BuildError(section, why)
    datamodule.train_dataloader = lambda: loader  # Lightning must get this loader
    return Data(loader, None, None, None, datamodule)
