"""Which jobs of a process read their input together.

    job a --view--.                       each view is what the job's own loader would be
    job b --view--+-- SharedStream -- a copy of the loader
    job c --view----- SharedStream        c is elsewhere in the data: it reads alone

A view belongs to the stream that can give it the next batch. It looks for one whenever its job
begins or resumes a pass, and gets one of its own if there is none. A stream holds the first batches
of a pass for jobs that may join, as long as they fit into the window.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from loaders import ReuseLoader, SharedStream
from loaders.errors import SharingError
from loaders.identity.contents import GENERATORS, ContentDigest
from loaders.identity.file_states import FileStates
from loaders.sharing.follower import Follower, check_loader
from loaders.sharing.local_view import LocalView
from loaders.sharing.remote_view import RemoteSource
from trainers.fleet.inputs.input_link import InputLink
from trainers.random_state import TorchSettings

log = logging.getLogger(__name__)


def why_not_shareable(loader: object) -> str:
    """Return why jobs cannot read this loader together; "" if they can."""
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


class LoaderContents:
    """The contents of one loader, hashed before anybody reads: a data set may change itself."""

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
    """Return a digest of a thing without `besides`; "" if it cannot be computed."""
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


WINDOW = 64
"""Jobs that read together are at most this many batches apart."""
KEPT_BYTES = 256 << 20
"""And at most this many bytes of batches apart, for any number of jobs."""
LATE_JOBS = "jobs/coming"
"""No job can have this name."""
Waits = Callable[[tuple[str, ...]], bool]
"""Ends the turn of a job until these jobs had theirs. It returns False if the job cannot wait."""


@dataclass(slots=True, eq=False)
class InputStream:
    """A stream and its jobs."""

    label: str
    stream: SharedStream
    members: set[str] = field(default_factory=set)
    readers: dict[str, None] = field(default_factory=dict)
    """All past and present members, in the order of joining."""
    holder: Follower | None = None
    """Holds batches for jobs that may join."""

    def hold_batches(self, view: LocalView) -> None:
        """Hold the batches from the place of a view on, for jobs that may join."""
        self.holder = Follower(LATE_JOBS, view.follower.standing, holds_only=True)
        self.stream.follow(self.holder)

    def release_batches(self) -> None:
        if self.holder is not None:
            self.holder.away = True
            self.holder = None


@dataclass(slots=True, eq=False)
class SameInput:
    """Jobs whose loaders are equal."""

    contents: LoaderContents
    settings: TorchSettings
    streams: list[InputStream] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class InputMember:
    """One job."""

    job: str
    same: SameInput
    own: InputStream
    """Its first stream, if it can join no other one."""
    view: LocalView
    waits: Waits
    reads: InputStream | None = None


class SharedInputs:
    """One process's. Only the job with the baton calls it."""

    def __init__(self, name: str = "0", link: InputLink | None = None) -> None:
        """`name`: for the labels of streams. `link`: to the process that reads for all devices."""
        self._name = name
        self._link = link
        self._made = 0
        self._same: list[SameInput] = []
        self._members: dict[str, InputMember] = {}

    def view(self, job: str, loader: ReuseLoader, given: object, waits: Waits) -> LocalView:
        """Return what this job trains with. `given`: the user's loader. `waits` ends its turn."""
        self.leave(job)
        same = self._find_same_input(LoaderContents(copy.copy(loader), given))
        own = self._make_stream(same)
        view = own.stream.view(name=job)
        member = InputMember(job, same, own, view, waits)
        same.jobs.add(job)
        self._members[job] = member
        view.on_pass = lambda: self._begin_pass(member)
        view.on_wait = lambda names: self._wait(member, names)
        return view

    def leave(self, job: str) -> None:
        """Forget a job that has ended or left."""
        member = self._members.pop(job, None)
        if member is None:
            return
        member.view.close()
        member.view.on_pass = member.view.on_wait = None
        self._leave_stream(member)
        member.same.jobs.discard(job)
        if not member.same.jobs:
            self._same.remove(member.same)

    def rest(self, jobs: Iterable[str]) -> None:
        """Let nobody wait for these jobs until they read again."""
        for job in jobs:
            if job in self._members:
                self._members[job].view.rest()

    def label(self, job: str) -> str:
        """Return the name of the stream that a job reads; jobs with the same one share it."""
        member = self._members.get(job)
        if member is None or member.reads is None:
            return ""
        label = member.reads.label
        return label if self._link is None else self._link.label(label) or label

    def room(self, job: str) -> int:
        """Return the job's part of the bytes that its stream may keep."""
        member = self._members.get(job)
        if member is None or member.reads is None:
            return 0
        kept = member.reads.stream.most_bytes // len(member.reads.members)
        return kept if self._link is None else 2 * kept  # the input process keeps as much

    def close(self) -> None:
        """End all streams."""
        for job in list(self._members):
            self.leave(job)
        if self._link is not None:
            self._link.close()

    def _find_same_input(self, contents: LoaderContents) -> SameInput:
        settings = TorchSettings.current()
        known = [same for same in self._same if same.settings == settings]
        for same in known:
            if same.contents.same_object_as(contents):
                return same
        contents.hash_contents()
        for same in known:
            if same.contents.same_as(contents):
                return same
        self._same.append(same := SameInput(contents, settings))
        return same

    def _begin_pass(self, member: InputMember) -> None:
        """Begin or resume a pass in a stream that can give the job its batches."""
        view, streams = member.view, member.same.streams
        reads = self._find_stream(member)
        if reads is None:  # A job's own first stream may have other members after a pass.
            reads = member.own if member.reads is None else self._make_stream(member.same)
            streams.append(reads)
        if reads is not member.reads:
            self._leave_stream(member)
            if view.stream is not reads.stream:
                view.move_to(reads.stream)
            member.reads = reads
            reads.members.add(member.job)
            reads.readers[member.job] = None
        number = view.follower.standing.mark[0]
        while names := reads.stream.in_earlier_pass(number):
            if not self._wait(member, names):
                break
        if not reads.stream.has_begun(number) and (len(streams) > 1 or len(reads.readers) == 1):
            reads.release_batches()
            reads.hold_batches(view)

    def _find_stream(self, member: InputMember) -> InputStream | None:
        """Return a stream that reads this pass already, if possible the job's own one."""
        standing, own = member.view.follower.standing, member.reads
        number = standing.mark[0]
        stays = own is not None and own.stream.reaches(standing, member.view.follower)
        if own is not None and stays and own.stream.has_begun(number):
            return own
        others = [
            one for one in member.same.streams if one is not own and one.stream.reaches(standing)
        ]
        begun = [one for one in others if one.stream.has_begun(number)]
        if begun:
            return max(begun, key=lambda one: len(one.members))
        return own if stays else next(iter(others), None)

    def _make_stream(self, same: SameInput) -> InputStream:
        self._made += 1
        label = f"{self._name}.{self._made}"
        loader = copy.copy(same.contents.loader)
        source = None
        if self._link is not None:
            self._link.start_process()
            source = RemoteSource(loader, partial(self._link.open, label, loader))
        stream = SharedStream(loader, window=WINDOW, kept_bytes=KEPT_BYTES, source=source)
        return InputStream(label, stream)

    def _leave_stream(self, member: InputMember) -> None:
        """Remove a job from its stream, and end a stream without jobs."""
        reads, member.reads = member.reads, None
        if reads is None:
            return
        reads.members.discard(member.job)
        if reads.members:
            return
        member.same.streams.remove(reads)
        reads.release_batches()
        stats = reads.stream.stats
        decodes, jobs = stats.decoded + stats.extra_decodes, list(reads.readers)
        if len(jobs) > 1 and self._link is None:
            log.info("input shared by %s: samples decoded: %d", ", ".join(jobs), decodes)
        reads.stream.close()
        if self._link is not None:
            self._link.leave(reads.label)

    def _wait(self, member: InputMember, names: tuple[str, ...]) -> bool:
        reads = member.reads
        if LATE_JOBS in names and reads is not None:
            reads.release_batches()
            return True
        return member.waits(names)
