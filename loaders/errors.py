"""The errors between a file and a batch.

LoaderError
  SourceError       a data set that is missing, empty or unusable
  DecodeError       a sample that cannot be read (names the file and the reason)
  SampleShapeError  samples of one batch that cannot be put together
  BufferTooSmall    a memory limit that cannot hold what must be held
  CacheError        a decoded cache that cannot be kept or read
  StateError        a saved state of another data set, seed or setting
  PassEnded         an iterator that another one has replaced, or whose loader was closed
  SharingError      a view of a shared stream that is asked for what it cannot give
  LaneError         a lane that is asked for what it cannot give
  WorkerDied        a worker process that was killed or crashed, twice
  SampleTimeout     a sample that took longer than `timeout` allows
  BackendMissing    a package that a backend needs and that is not installed
"""


class LoaderError(Exception):
    """Base of everything this package raises on purpose."""


class SourceError(LoaderError):
    """A data set that is missing, empty or unusable."""


class DecodeError(LoaderError):
    """A sample that cannot be read."""


class SampleShapeError(LoaderError):
    """Samples of one batch that cannot be put together."""


class BufferTooSmall(LoaderError):
    """A memory limit that cannot hold what must be held."""


class CacheError(LoaderError):
    """A decoded cache that cannot be kept or read, or a data set that cannot be cached."""


class StateError(LoaderError):
    """A saved state of another data set, seed or setting."""


class PassEnded(LoaderError):
    """An iterator was asked for a batch after its loader had begun another pass or was closed."""


class SharingError(LoaderError):
    """A view of a shared stream was asked for what it cannot give."""


class LaneError(LoaderError):
    """A `LaneLoader` was asked for what it cannot give, or its loader cannot be dealt in lanes."""


class BackendMissing(LoaderError):
    """A package that a backend needs is not installed."""


class WorkerDied(LoaderError):
    """A worker process ended by itself: at its start, or again after it had been restarted."""


class SampleTimeout(LoaderError):
    """Reading or augmenting a sample took longer than `timeout` allows."""
