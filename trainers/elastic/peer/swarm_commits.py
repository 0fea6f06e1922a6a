"""Commits that a swarm makes together, whoever comes, goes or dies meanwhile.

    header -> decide -> compute lanes -> header -> decide -> reduce -> vote -> commit
       ^                                                                |
       +---- any error: leave the group, gate, next generation ---------+

Nothing of a step is given up before its commit: the sums stay as they are, reduces work on copies,
and the total that was reduced is held until it is applied. So whatever was interrupted goes on in
the next generation, and `deciding/decision.py` says where.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from trainers.elastic.deciding.decision import (
    Apply,
    Compute,
    LaneRate,
    Reduce,
    Rejoin,
    Stop,
    ToGate,
    Wait,
    decide,
    is_equal_vote,
)
from trainers.elastic.deciding.header import Header, LaneLogs, MemberPace
from trainers.elastic.deciding.view import Form, View
from trainers.elastic.errors import Expelled, GenerationEnded, GroupBroken, SwarmStopped
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.peer.donated_state import DonatedState
from trainers.elastic.peer.donor import Donor
from trainers.elastic.peer.elastic_fit import Commits
from trainers.elastic.peer.step_log import StepLog
from trainers.elastic.reducing.canonical import all_gather_bytes, reduce_in_order
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import TRANSFER_SECONDS, Group, GroupPlace, form_group
from trainers.elastic.wire.wire_errors import WireError
from trainers.elastic.work.digests import Commit, digest_of
from trainers.elastic.work.plain_work import PlainWork

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02
LAST_COMMITS_SECONDS = 30.0
MOST_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class TrainerSide:
    """What the commits need of the trainer."""

    state: Callable[[], dict[str, Any]]
    may_give: Callable[[], bool]
    """Whether a run that begins with such a checkpoint goes on exactly."""
    set_rank: Callable[[int], None]
    """Called when a generation begins."""
    log: StepLog


class SwarmCommits(Commits):
    """The commits of one peer of a swarm."""

    def __init__(
        self, link: AnchorLink, donor: Donor, host: TrainerSide, donated: DonatedState | None = None
    ) -> None:
        """`donated`: where this peer has its state from, and gets commits until it is a member."""
        self.view: View | None = None
        self.gaps: list[tuple[str, float]] = []
        """Why generations ended unplanned, and the seconds until the next one had begun."""
        self.headers: tuple[Header, ...] = ()
        self._link = link
        self._donor = donor
        self._host = host
        self._donated = donated
        self._told_ready = False
        self._formed: Form | None = None
        self._group: Group | None = None
        self._graveyard = Graveyard()
        self._step = link.step
        self._done: list[int] = []
        self._held: Commit | None = None
        self._kept = ""
        self._had: tuple[int, ...] = ()
        self._rate = LaneRate()
        self._seconds = 0.0
        self._sent = 0
        self._weights = ""
        self._trouble = ""
        self._finished: tuple[int, str] | None = None
        """With which step and digest others have ended the run."""

    @property
    def rate(self) -> float:
        """The lanes a second that this peer computes, of late; 0 before it is known."""
        return self._rate.rate

    def next(self, work: PlainWork) -> Commit:
        if self._donated is not None and (commit := self._followed()) is not None:
            return commit
        work.begin(self._step)
        self._done, self._held, self._trouble, self._seconds = [], None, "", 0.0
        self._weights = work.weights_digest(self._step)
        planned, ended_at, why = False, 0.0, ""
        while True:
            try:
                if self._group is None:
                    self._enter(planned=planned)
                    if ended_at:
                        self.gaps.append((why, time.monotonic() - ended_at))
                        self._host.log.gap(*self.gaps[-1], self._step)
                    ended_at = 0.0
                if (commit := self._attempt(work)) is not None:
                    return commit
                planned = True
                self._leave_group()
            except (GenerationEnded, GroupBroken) as error:
                planned, ended_at = False, ended_at or time.monotonic()
                of_gloo = error.__cause__
                why = f"{error} ({of_gloo})" if of_gloo else str(error)
                log.warning("step %d goes on in the next generation: %s", self._step, why)
                self._leave_group()

    def applied(self, commit: Commit) -> None:
        self._host.log.commit(commit, self.headers)
        self._step = self._link.step = commit.step + 1
        self._kept, self._held = commit.digest, None
        self._rate.end_step(computed=bool(self._done))
        if self._donor.followed:
            self._donor.record(commit, self.rate)

    def end_run(self) -> None:
        """Say that the whole run has ended here, when newcomers that follow have all of it."""
        self._donor.finish()
        self._link.ended(self._step, self._kept)

    def close(self) -> None:
        """End everything. It is safe to call again."""
        if self._donated is not None:
            self._donated.close()
        self._leave_group()
        self._donor.close()
        self._link.close()
        self._graveyard.close()
        self._host.log.close()

    def _followed(self) -> Commit | None:
        """Return the donor's next commit; None when this peer has become a member."""
        assert self._donated is not None
        since = time.monotonic()
        while True:
            if self._formed is not None and self._step >= self._formed.step:
                self._donated.close()
                self._donated = None
                return None
            wait = POLL_SECONDS if self._formed is None else LAST_COMMITS_SECONDS
            donor = self._donated.donor.name
            try:
                commit = self._donated.next(wait)
            except WireError as error:
                raise Expelled(
                    f"{donor}, from whom this peer has its state, is gone before this peer became a"
                    f" member: start it again ({error})"
                ) from error
            if commit is not None:
                return commit
            if self._formed is not None:
                raise Expelled(f"commit {self._step} of the donor did not come in {wait:g} s")
            silent = time.monotonic() - since > LAST_COMMITS_SECONDS
            if silent and self._link.names_another(self._donated.donor):
                raise Expelled(
                    f"{donor}, whom this peer follows, is silent, and the anchor names another one:"
                    " start this peer again"
                )
            if not self._told_ready:
                self._link.ready(donor)
                self._told_ready = True
            self._formed = self._link.formed()

    def _enter(self, *, planned: bool) -> None:
        formed, self._formed = self._formed, None
        if formed is None:
            formed = self._link.gate(self._step, self._give, planned=planned)
        view = formed.view
        rank = view.rank(self._link.member.name)
        host = self._link.member.host
        timeout = 2 * self._link.heartbeat
        place = GroupPlace(view.generation, rank, len(view.members), host)
        self._group = form_group(
            self._link,
            place,
            timeout,
            self._link.alive,
            self._graveyard,
            max(timeout, TRANSFER_SECONDS),  # a member may be silent for a heartbeat
        )
        self.view = view
        self._host.set_rank(rank)
        self._host.log.generation(view, self._step)
        self._finished = formed.finished

    def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._sent += group.sent
            group.abandon(self._graveyard)

    def _give(self) -> None:
        """Give the state to newcomers that wait for it."""
        if self._donor.wanted and self._host.may_give():
            self._donor.give(self._host.state, self._step)

    def _attempt(self, work: PlainWork) -> Commit | None:
        """Return the commit; None where the generation changes before anything is begun."""
        assert self._group is not None and self.view is not None
        if self._held is not None and self._finished == (self._step + 1, self._held.digest):
            return self._held
        while True:
            self._give()
            headers = self._exchanged(work)
            # Where no state can be given away, nobody could come to those who wait at the gate.
            least = self._link.min_peers if self._host.may_give() else 1
            match decide(headers, self._group.rank, work.lanes(), least):
                case Compute(lanes):
                    self._had = (*self._done, *lanes)
                    if not any(header.done for header in headers):
                        work.expect(lanes)
                    self._compute(work, lanes)
                case Reduce(contributors):
                    self._held = self._reduced(work, headers, contributors)
                    if self._voted(self._held):
                        return self._held
                    raise GroupBroken("the members' totals differ: the reduce is made again")
                case Apply():
                    assert self._held is not None
                    return self._held
                case Wait():
                    continue
                case ToGate():
                    return None
                case Rejoin(why):
                    self._link.leave()
                    raise Expelled(why)
                case Stop(why):
                    # When this second exchange ends, all have read the first, and stop as well.
                    with contextlib.suppress(GenerationEnded, GroupBroken):
                        self._exchanged(work)
                    raise SwarmStopped(why)

    def _exchanged(self, work: PlainWork) -> list[Header]:
        assert self._group is not None
        mine = Header(
            name=self._link.member.name,
            step=self._step,
            done=tuple(self._done),
            had=self._had,
            held="" if self._held is None else self._held.digest,
            kept=self._kept,
            pace=MemberPace(
                rate=self._rate.rate,
                idle=self._rate.idle,
                seconds=round(self._seconds, 6),
                sent=self._sent + self._group.sent,
            ),
            announced=self._link.announced,
            weights=self._weights,
            logs=work.logs if self._done else LaneLogs(),
            trouble=self._trouble,
        )
        try:
            headers = [Header.decode(told) for told in self._gathered(mine.encode())]
        except (ValueError, RecursionError) as error:
            raise GroupBroken("a member told something that is no header") from error
        self.headers = tuple(headers)
        return headers

    def _gathered(self, mine: bytes) -> list[bytes]:
        assert self._group is not None
        return all_gather_bytes(self._group, mine, MOST_HEADER_BYTES, self._link.alive)

    def _compute(self, work: PlainWork, lanes: Sequence[int]) -> None:
        """Add lanes to the sums. What is added stays, also if the generation ends meanwhile."""
        began = latest = time.monotonic()
        left = lanes
        while left:
            count = work.compute(left)
            self._done += left[:count]
            left = left[count:]
            since, latest = latest, time.monotonic()
            self._seconds += latest - since
            self._link.alive()
        if lanes:
            self._rate.add_step(len(lanes), time.monotonic() - began)
            self._trouble = work.trouble()

    def _reduced(
        self, work: PlainWork, headers: Sequence[Header], contributors: Sequence[int]
    ) -> Commit:
        assert self._group is not None
        sums = work.sums
        total = torch.empty_like(sums)
        mine = sums if self._group.rank in contributors else None
        with self._donor.standing_back():
            reduce_in_order(self._group, mine, total, self._link.alive, contributors)
        buffers = self._first_buffers(work)
        return Commit(
            step=self._step,
            added=tuple((headers[rank].name, headers[rank].done) for rank in contributors),
            total=work.as_floats(total),
            logs=reduce(LaneLogs.plus, (headers[rank].logs for rank in contributors)),
            buffers=buffers,
            digest=digest_of([total, *buffers]),
        )

    def _voted(self, held: Commit) -> bool:
        told = self._gathered(held.digest.encode())
        return is_equal_vote([one.decode(errors="replace") for one in told])

    def _first_buffers(self, work: PlainWork) -> tuple[Tensor, ...]:
        """The buffers of whoever has computed the first lane."""
        forms = work.committed
        if not forms:
            return ()
        has_first = work.lanes()[0] in self._done
        mine = bytes(packed(work.buffers())) if has_first else b""
        assert self._group is not None
        size = sum(form.numel() * form.element_size() for form in forms)
        told = all_gather_bytes(self._group, mine, size, self._link.alive)
        found = next((data for data in told if data), b"")
        if len(found) != size:
            raise GroupBroken(f"a member told {len(found)} bytes of buffers, and {size} are needed")
        return unpacked(found, forms)


def packed(tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of tensors, one after the other."""
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def unpacked(data: bytes, forms: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of `packed`, in the types and shapes of `forms`."""
    found, at = [], 0
    for form in forms:
        size = form.numel() * form.element_size()
        part = torch.frombuffer(bytearray(data[at : at + size]), dtype=form.dtype)
        found.append(part.reshape(form.shape))
        at += size
    return tuple(found)
