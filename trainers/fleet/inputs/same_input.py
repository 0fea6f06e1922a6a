"""Whether two loaders would certainly serve the same batches.

    the same object was given to both jobs           yes
    all their contents can be hashed, and are equal  yes: data, rows, arrays, code, arguments, place
    something cannot be hashed (an open file, ...)   no
    something draws its own random numbers           no

Files and the environment are the same for all jobs of a process.
"""

from collections.abc import Iterator

from loaders import ReuseLoader
from loaders.errors import SharingError
from loaders.identity.contents import GENERATORS, ContentDigest
from loaders.identity.file_states import FileStates
from loaders.sharing.refusals import check_loader


def why_not_shareable(loader: object) -> str:
    """Return why jobs cannot read this loader together; "" if they can. A subclass of `ReuseLoader`
    may serve other batches."""
    if type(loader) is not ReuseLoader:
        return f"only a ReuseLoader can be read by several jobs, not a {type(loader).__name__}"
    if loader.world_size != 1:
        return f"it is one of {loader.world_size} ranks"
    if loader.on_error != "raise":
        return f"on_error={loader.on_error!r} counts for one reader what it leaves out"
    try:
        check_loader(loader)
    except SharingError as error:
        return str(error)
    return ""


def is_shareable(loader: object) -> bool:
    """Whether jobs can read this loader together."""
    return not why_not_shareable(loader)


class LoaderContents:
    """The contents of one loader. They are hashed before anybody reads, because a data set may keep
    something of what was read."""

    def __init__(self, loader: ReuseLoader, given: object) -> None:
        """`given`: the object that the user gave to the job."""
        self.loader = loader
        """It is never read."""
        self._given = given
        self._place = {**loader.state_dict(), "stats": None}
        self._data = self._rest = ""

    def hash_contents(self) -> "LoaderContents":
        """Compute the digests of all that the loader is made of."""
        dataset = self.loader.dataset
        self._data, self._rest = _digest(dataset), _digest(self.loader, dataset)
        return self

    def same_object_as(self, other: "LoaderContents") -> bool:
        """Return whether the user gave both jobs one loader, which has not moved since."""
        same = self._given is not None and self._given is other._given
        return same and self._place == other._place

    def same_as(self, other: "LoaderContents") -> bool:
        """Return whether both would serve the same batches."""
        if self._place != other._place:
            return False
        same_data = self.loader.dataset is other.loader.dataset or self._data == other._data != ""
        return same_data and self._rest == other._rest != ""


def _digest(thing: object, besides: object = None) -> str:
    """Return a digest of all that a thing is made of; "" if it cannot be computed. `besides`: an
    object that is left out."""
    contents = _CertainDigest(_NoFiles())
    contents.besides = besides
    try:
        contents.add(thing, "loader")
    except (RecursionError, OSError):
        return ""
    return "" if contents.unhashable else contents.hexdigest()


class _CertainDigest(ContentDigest):
    """Refuses generators, whose draws are part of the batches. The base class hashes their type."""

    besides: object = None

    def add(self, thing: object, where: str) -> None:
        if thing is not None and thing is self.besides:
            self.update("data set")
            return
        if isinstance(thing, GENERATORS):
            self.unhashable.append(where)
        super().add(thing, where)


class _NoFiles(FileStates):
    """Two loaders of a process see the same files, so their names are enough."""

    def file_state(self, name: str) -> str:
        return name

    def file_states(self, name: str) -> Iterator[str]:
        yield name
