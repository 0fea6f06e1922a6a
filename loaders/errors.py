"""What can go wrong between a file and a batch.

LoaderError
  SourceError       a data set that is missing, empty or unusable
  DecodeError       a sample that cannot be read (names the file and the reason)
  SampleShapeError  samples that do not fit one slot size
  StateError        a saved state of another data set or seed
  PassEnded         an iterator that another one has replaced
"""


class LoaderError(Exception):
    """Base of everything this package raises on purpose."""


class SourceError(LoaderError):
    """A data set that is missing, empty or unusable."""


class DecodeError(LoaderError):
    """A sample that cannot be read."""


class SampleShapeError(LoaderError):
    """Samples that do not fit one slot size."""


class StateError(LoaderError):
    """A saved state that belongs to another data set, seed or shape."""


class PassEnded(LoaderError):
    """An iterator was asked for more after the loader had begun another pass."""
