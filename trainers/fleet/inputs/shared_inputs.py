"""Which jobs of a process read their input together.

    job a --view--.                       each view is what the job's own loader would be
    job b --view--+-- SharedStream -- a copy of the loader
    job c --view----- SharedStream        c stands elsewhere in the data: it reads with nobody

A job's view belongs to the stream that can give it the next batch; it looks for one whenever it
begins or resumes a pass, and has one to itself where there is none. A stream holds the first
batches of a pass for those that may come, as long as they fit into the window.

Where devices have processes, the stream of each reads what `input_service.py` reads for all.
"""

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from loaders import ReuseLoader, SharedStream
from loaders.sharing.follower import Follower
from loaders.sharing.local_view import LocalView
from loaders.sharing.remote_view import RemoteSource
from trainers.dice import TorchSettings
from trainers.fleet.inputs.input_link import InputLink
from trainers.fleet.inputs.same_input import LoaderContents

log = logging.getLogger(__name__)

WINDOW = 64
"""Jobs that read together are at most so many batches apart."""
KEPT_BYTES = 256 << 20
"""And so many bytes of batches, for any number of jobs."""
COMING = "jobs/coming"
"""No job can be called so."""
Waits = Callable[[tuple[str, ...]], bool]
"""Ends the turn of a job until these jobs had theirs. False: the job cannot wait now."""


@dataclass(slots=True, eq=False)
class InputStream:
    """A stream and its jobs."""

    label: str
    stream: SharedStream
    members: set[str] = field(default_factory=set)
    readers: dict[str, None] = field(default_factory=dict)
    """All that were ever members, in the order of joining."""
    coming: Follower | None = None
    """Holds batches for jobs that may come."""

    def hold_from(self, view: LocalView) -> None:
        """Hold the batches from where a view stands, for jobs that may come."""
        self.coming = Follower(COMING, view.follower.standing, holds_only=True)
        self.stream.follow(self.coming)

    def let_go(self) -> None:
        if self.coming is not None:
            self.coming.away = True
            self.coming = None


@dataclass(slots=True, eq=False)
class SameInput:
    """Jobs whose loaders are equal."""

    contents: LoaderContents
    settings: TorchSettings
    """Under which its batches are made."""
    streams: list[InputStream] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class InputMember:
    """One job."""

    job: str
    same: SameInput
    own: InputStream
    """The stream that it begins with, if it can reach no other one."""
    view: LocalView
    waits: Waits
    reads: InputStream | None = None
    """None before its first batch."""


class SharedInputs:
    """One process's. Only the holder of the baton calls it."""

    def __init__(self, name: str = "0", link: InputLink | None = None) -> None:
        """`name` is used for the labels of streams. `link`: to what reads for several processes."""
        self._name = name
        self._link = link
        self._made = 0
        self._same: list[SameInput] = []
        self._members: dict[str, InputMember] = {}

    def view(self, job: str, loader: ReuseLoader, given: object, waits: Waits) -> LocalView:
        """Return what this job trains with instead of its loader. `given`: what the user gave to
        the job. `waits` is called where it needs the turns of others."""
        self.leave(job)
        same = self._same_as(LoaderContents(copy.copy(loader), given))
        own = self._new(same)
        view = own.stream.view(name=job)
        member = InputMember(job, same, own, view, waits)
        same.jobs.add(job)
        self._members[job] = member
        view.on_pass = lambda: self._begin(member)
        view.on_wait = lambda names: self._wait(member, names)
        return view

    def leave(self, job: str) -> None:
        """Forget a job that has ended or left."""
        member = self._members.pop(job, None)
        if member is None:
            return
        member.view.close()
        member.view.on_pass = member.view.on_wait = None
        self._part(member)
        member.same.jobs.discard(job)
        if not member.same.jobs:
            self._same.remove(member.same)

    def rest(self, jobs: Iterable[str]) -> None:
        """Have nobody wait for these jobs until they read again."""
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
        """Return the job's part of the bytes that its stream may come to keep."""
        member = self._members.get(job)
        if member is None or member.reads is None:
            return 0
        kept = member.reads.stream.most_bytes // len(member.reads.members)
        return kept if self._link is None else 2 * kept  # as much is kept where all are read

    def close(self) -> None:
        """End all streams."""
        for job in list(self._members):
            self.leave(job)
        if self._link is not None:
            self._link.close()

    # ---- where a job reads -----------------------------------------------------------------------

    def _same_as(self, contents: LoaderContents) -> SameInput:
        settings = TorchSettings.now()
        known = [same for same in self._same if same.settings == settings]
        for same in known:
            if same.contents.same_object_as(contents):
                return same
        contents.tell()
        for same in known:
            if same.contents.same_as(contents):
                return same
        self._same.append(same := SameInput(contents, settings))
        return same

    def _begin(self, member: InputMember) -> None:
        """A job begins or resumes a pass: it goes to the stream that can give it the batches."""
        view, streams = member.view, member.same.streams
        reads = self._found(member) or self._added(member)
        if reads is not member.reads:
            self._part(member)
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
            reads.let_go()
            reads.hold_from(view)

    def _found(self, member: InputMember) -> InputStream | None:
        """The stream that reads this pass already, before the job's own one before any other."""
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

    def _added(self, member: InputMember) -> InputStream:
        """A stream that no other job reads. A job's own one may belong to others after a pass."""
        made = member.own if member.reads is None else self._new(member.same)
        member.same.streams.append(made)
        return made

    def _new(self, same: SameInput) -> InputStream:
        self._made += 1
        label = f"{self._name}.{self._made}"
        loader = copy.copy(same.contents.loader)
        source = None
        if self._link is not None:
            self._link.wake()
            source = RemoteSource(loader, partial(self._link.open, label, loader))
        stream = SharedStream(loader, window=WINDOW, kept_bytes=KEPT_BYTES, source=source)
        return InputStream(label, stream)

    def _part(self, member: InputMember) -> None:
        """Take a job off its stream, and end a stream without jobs."""
        reads, member.reads = member.reads, None
        if reads is None:
            return
        reads.members.discard(member.job)
        if reads.members:
            return
        member.same.streams.remove(reads)
        reads.let_go()
        stats = reads.stream.stats
        decodes, jobs = stats.decoded + stats.extra_decodes, list(reads.readers)
        if len(jobs) > 1 and self._link is None:
            log.info("input shared by %s: samples decoded: %d", ", ".join(jobs), decodes)
        reads.stream.close()
        if self._link is not None:
            self._link.leave(reads.label)

    def _wait(self, member: InputMember, names: tuple[str, ...]) -> bool:
        reads = member.reads
        if COMING in names and reads is not None:
            reads.let_go()
            return True
        return member.waits(names)
