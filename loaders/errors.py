"""The errors between a file and a batch, and checks of arguments that several modules use."""

from collections.abc import Sequence
from numbers import Integral


class LoaderError(Exception):
    """Base of everything this package raises on purpose."""


class SourceError(LoaderError):
    """A data set that is missing, empty or unusable. Correct the path, or give a data set with
    samples in it."""


class FrozenDraw(SourceError):
    """A sample whose reading draws random numbers, with reuse or a cache, which would freeze them.
    Give what is random as `augment=`."""


class DecodeError(LoaderError):
    """A sample that cannot be read. Replace or remove the file that the message names, or pass over
    it with `on_error="skip"`."""


class SampleShapeError(LoaderError):
    """Samples of one batch that cannot be put together. Begin `augment` with a crop to one size,
    give a `collate`, or resize in the data set."""


class BufferTooSmall(LoaderError):
    """A memory limit that cannot hold what must be held. Raise the limit that the message names, or
    make the batch smaller."""


class CacheError(LoaderError):
    """A decoded cache that cannot be kept or read, or a data set that cannot be cached. Give
    `Cache` another `folder`, or a `key` where the message asks for it."""


class StateError(LoaderError):
    """A saved state of another data set, seed or setting. Load the state into a loader with the
    settings of the one that saved it."""


class PassEnded(LoaderError):
    """An iterator was asked for a batch after its loader had begun another pass or was closed. Take
    one iterator at a time, and no batch after `close()`."""


OTHER_ITERATOR = (
    "this pass has ended because the loader began another one or was closed: use one iterator at a"
    " time"
)


class SharingError(LoaderError):
    """A view of a shared stream was asked for what it cannot give: ask its own loader."""


class LaneError(LoaderError):
    """A `LaneLoader` was asked for what it cannot give, or its loader cannot be dealt in lanes.
    Change the argument that the message names."""


class BackendMissing(LoaderError):
    """A package that a backend needs is not installed. Install the extra that the message names:
    `pip install '.[dali]'`."""


class WorkerDied(LoaderError):
    """A worker process ended by itself: at its start, or again after it had been restarted. Look at
    the samples that the message names; memory may have run out."""


class SampleTimeout(LoaderError):
    """Reading or augmenting a sample took longer than `timeout` allows. Raise `timeout`, or pass
    over such samples with `on_error="skip"`."""


def check_has_effect(name: str, value: object, needed: str) -> None:
    if value is not None:
        raise ValueError(f"{name}={value!r} has no effect without {needed}: leave it out")


def check_at_least_one(name: str, value: int) -> None:
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def check_word(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value!r}")
