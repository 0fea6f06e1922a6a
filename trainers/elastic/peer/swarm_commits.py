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

import numpy as np
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
from trainers.elastic.deciding.view import Form
from trainers.elastic.errors import Expelled, GenerationEnded, GroupBroken, SwarmStopped
from trainers.elastic.peer.anchor_link import AnchorLink
from trainers.elastic.peer.donated_state import DonatedState, Newcomer
from trainers.elastic.peer.donor import Donor
from trainers.elastic.peer.elastic_fit import Commits
from trainers.elastic.peer.step_log import StepLog
from trainers.elastic.reducing.canonical import all_gather_bytes, reduce_in_order
from trainers.elastic.reducing.graveyard import Graveyard
from trainers.elastic.reducing.group import TRANSFER_SECONDS, Group, GroupPlace, form_group
from trainers.elastic.work.digests import Commit, digest_of
from trainers.elastic.work.plain_work import PlainWork

log = logging.getLogger(__name__)

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


class Membership:
    """The group of the present generation. Between two generations there is none."""

    def __init__(self, link: AnchorLink) -> None:
        self.group: Group | None = None
        self._link = link
        self._graveyard = Graveyard()
        self._sent = 0

    @property
    def sent(self) -> int:
        """The bytes of sums that were sent, in this group and in all before it."""
        return self._sent + self._present().sent

    def enter(self, form: Form) -> Group:
        """Connect with the other members of a generation."""
        view, me, orders = form.view, self._link.member, self._link.orders
        timeout = 2 * orders.heartbeat
        self.group = form_group(
            self._link,
            GroupPlace(view.generation, view.rank(me.name), len(view.members), me.host),
            timeout,
            orders.check_generation,
            self._graveyard,
            max(timeout, TRANSFER_SECONDS),  # a member may be silent for a heartbeat
        )
        return self.group

    def leave(self) -> None:
        """Give the group up, if there is one."""
        group, self.group = self.group, None
        if group is not None:
            self._sent += group.sent
            group.abandon(self._graveyard)

    def gather(self, mine: bytes, most: int) -> list[bytes]:
        """Return every member's bytes, by rank. No member sends more than `most`."""
        return all_gather_bytes(self._present(), mine, most, self._link.orders.check_generation)

    def reduce(self, sums: Tensor, contributors: Sequence[int]) -> Tensor:
        """Return the total of the contributors' sums. `sums`: this member's."""
        total = torch.empty_like(sums)
        group, check = self._present(), self._link.orders.check_generation
        mine = sums if group.rank in contributors else None
        reduce_in_order(group, mine, total, check, contributors)
        return total

    def close(self) -> None:
        """Wait until all groups have ended. The link must be closed before."""
        self._graveyard.close()

    def _present(self) -> Group:
        assert self.group is not None
        return self.group


class StepShare:
    """What this member has of the step that is under way. It outlives a generation."""

    def __init__(self, work: PlainWork, step: int) -> None:
        work.begin(step)
        self.work = work
        self.done: list[int] = []
        """The lanes that are in the sums, in their order."""
        self.held: Commit | None = None
        """What the step came to. It is not applied before all members have it."""
        self.seconds = 0.0
        self.weights = work.weights_digest(step)
        self._trouble = ""
        self._checked = 0
        """How many of the lanes in the sums were checked; `_trouble` is what was found."""

    def compute(self, lanes: Sequence[int], check: Callable[[], None]) -> None:
        """Add lanes to the sums. `check` is called after each; where it raises, what is added
        stays."""
        latest = time.monotonic()
        left = lanes
        while left:
            count = self.work.compute(left)
            self.done += left[:count]
            left = left[count:]
            since, latest = latest, time.monotonic()
            self.seconds += latest - since
            check()

    def find_trouble(self) -> str:
        """Return why the lanes that are in the sums cannot count, or "" if they can. The sums are
        checked once for the same lanes, also where `check` has raised after them."""
        if self._checked < len(self.done):
            self._checked, self._trouble = len(self.done), self.work.trouble()
        return self._trouble


class SwarmCommits(Commits):
    """The commits of one peer of a swarm."""

    def __init__(
        self,
        link: AnchorLink,
        donor: Donor,
        trainer: TrainerSide,
        donated: DonatedState | None = None,
    ) -> None:
        """`donated`: where this peer has its state from, and gets commits until it is a member."""
        self.form: Form | None = None
        """The present generation, or the latest one."""
        self.gaps: list[tuple[str, float]] = []
        """Why generations ended unplanned, and the seconds until the next one had begun."""
        self.headers: tuple[Header, ...] = ()
        self._link = link
        self._donor = donor
        self._trainer = trainer
        self._newcomer = None if donated is None else Newcomer(link, donated)
        self._membership = Membership(link)
        self._share: StepShare | None = None
        self._kept = ""
        """The digest of the total that is applied last, which other members ask for."""
        self._had: tuple[int, ...] = ()
        """The lanes that were dealt to this peer last, by which all members deal the next step."""
        self._rate = LaneRate()

    @property
    def rate(self) -> float:
        """The lanes a second that this peer computes, of late; 0 before it is known."""
        return self._rate.rate

    def next(self, work: PlainWork) -> Commit:
        form = None
        if self._newcomer is not None:
            followed = self._newcomer.next()
            if isinstance(followed, Commit):
                return followed
            self._newcomer, form = None, followed
        step = self._link.step
        self._share = share = StepShare(work, step)
        planned, ended_at, why = False, 0.0, ""
        while True:
            try:
                if (group := self._membership.group) is None:
                    formed, form = form, None
                    group = self._enter(
                        formed or self._link.gate(step, self._give, planned=planned)
                    )
                    if ended_at:
                        self.gaps.append((why, time.monotonic() - ended_at))
                        self._trainer.log.gap(*self.gaps[-1], step)
                    ended_at = 0.0
                if (commit := self._attempt(share, group.rank)) is not None:
                    return commit
                planned = True
                self._membership.leave()
            except (GenerationEnded, GroupBroken) as error:
                planned, ended_at = False, ended_at or time.monotonic()
                of_gloo = error.__cause__
                why = f"{error} ({of_gloo})" if of_gloo else str(error)
                log.warning("step %d goes on in the next generation: %s", step, why)
                self._membership.leave()

    def applied(self, commit: Commit) -> None:
        self._trainer.log.commit(commit, self.headers)
        self._link.step = commit.step + 1
        self._kept = commit.digest
        share, self._share = self._share, None
        self._rate.end_step(computed=share is not None and bool(share.done))
        if self._donor.followed:
            self._donor.record(commit, self.rate)

    def end_run(self) -> None:
        """Report that the whole run has ended here, when newcomers that follow have all of it."""
        self._donor.finish()
        self._link.ended(self._link.step, self._kept)

    def close(self) -> None:
        """End everything. It is safe to call again."""
        if self._newcomer is not None:
            self._newcomer.close()
        self._membership.leave()
        self._donor.close()
        self._link.close()
        self._membership.close()
        self._trainer.log.close()

    def _enter(self, form: Form) -> Group:
        group = self._membership.enter(form)
        self.form = form
        self._trainer.set_rank(group.rank)
        self._trainer.log.generation(form.view, self._link.step)
        return group

    def _give(self) -> None:
        """Give the state to newcomers that wait for it."""
        if self._donor.wanted and self._trainer.may_give():
            self._donor.give(self._trainer.state, self._link.step)

    def _attempt(self, share: StepShare, rank: int) -> Commit | None:
        """Return the commit; None where the generation changes before anything is begun."""
        assert self.form is not None
        held = share.held
        if held is not None and self.form.finished == (self._link.step + 1, held.digest):
            return held
        lanes = share.work.lanes()
        while True:
            self._give()
            headers = self._exchange_headers(share)
            # Where no state can be given away, nobody could come to those who wait at the gate.
            least = self._link.orders.min_peers if self._trainer.may_give() else 1
            match decide(headers, rank, lanes, least):
                case Compute(mine):
                    self._had = (*share.done, *mine)
                    if not any(header.done for header in headers):
                        share.work.expect(mine)
                    self._compute(share, mine)
                case Reduce(contributors):
                    share.held = self._reduce(share, headers, contributors)
                    if self._vote(share.held):
                        return share.held
                    raise GroupBroken("the members' totals differ: the reduce is made again")
                case Apply():
                    assert share.held is not None
                    return share.held
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
                        self._exchange_headers(share)
                    raise SwarmStopped(why)

    def _exchange_headers(self, share: StepShare) -> list[Header]:
        mine = Header(
            name=self._link.member.name,
            step=self._link.step,
            done=tuple(share.done),
            had=self._had,
            held="" if share.held is None else share.held.digest,
            kept=self._kept,
            pace=MemberPace(
                rate=self._rate.rate,
                idle=self._rate.idle,
                seconds=round(share.seconds, 6),
                sent=self._membership.sent,
            ),
            announced=self._link.orders.announced,
            weights=share.weights,
            logs=share.work.logs if share.done else LaneLogs(),
            trouble=share.find_trouble(),
        )
        encoded = self._membership.gather(mine.encode(), MOST_HEADER_BYTES)
        try:
            headers = [Header.decode(header) for header in encoded]
        except (ValueError, RecursionError) as error:
            raise GroupBroken("a member sent something that is no header") from error
        self.headers = tuple(headers)
        return headers

    def _compute(self, share: StepShare, lanes: Sequence[int]) -> None:
        began = time.monotonic()
        share.compute(lanes, self._link.orders.check_generation)
        if lanes:
            self._rate.add_step(len(lanes), time.monotonic() - began)

    def _reduce(
        self, share: StepShare, headers: Sequence[Header], contributors: Sequence[int]
    ) -> Commit:
        with self._donor.standing_back():
            total = self._membership.reduce(share.work.sums, contributors)
        buffers = self._gather_buffers(share)
        return Commit(
            step=self._link.step,
            added=tuple((headers[rank].name, headers[rank].done) for rank in contributors),
            total=share.work.as_floats(total),
            logs=reduce(LaneLogs.plus, (headers[rank].logs for rank in contributors)),
            buffers=buffers,
            digest=digest_of([total, *buffers]),
        )

    def _vote(self, held: Commit) -> bool:
        """Return whether every member holds this total."""
        digests = self._membership.gather(held.digest.encode(), MOST_HEADER_BYTES)
        return is_equal_vote([digest.decode(errors="replace") for digest in digests])

    def _gather_buffers(self, share: StepShare) -> tuple[Tensor, ...]:
        """Return the buffers of the member that has computed the first lane."""
        forms = share.work.committed
        if not forms:
            return ()
        size = sum(form.numel() * form.element_size() for form in forms)
        has_first = share.work.lanes()[0] in share.done
        mine = pack(share.work.buffers()) if has_first else b""
        data = next((part for part in self._membership.gather(mine, size) if part), b"")
        if len(data) != size:
            raise GroupBroken(f"a member sent {len(data)} bytes of buffers, and {size} are needed")
        return unpack(data, forms)


def pack(tensors: Sequence[Tensor]) -> bytes:
    """Return the bytes of tensors, one after the other."""
    return b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def unpack(data: bytes, forms: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of `pack`, in the types and shapes of `forms`."""
    # torch.frombuffer refuses an empty memory, and so short a buffer may be.
    whole = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
    parts = whole.split([form.numel() * form.element_size() for form in forms])
    return tuple(
        part.clone().view(form.dtype).reshape(form.shape)  # A copy begins where its type may.
        for part, form in zip(parts, forms, strict=True)
    )
