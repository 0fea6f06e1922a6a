"""What the anchor knows of the peers, and when it begins the next generation.

    waiting --found/copy--> copying --ready--> ready --+
                                                       |  Form: all living members are at the gate
    member --death of one, or a change--> at the gate -+------------------------> member

A generation ends at once where a member dies: `Break` calls the others to the gate, and nobody new
comes in, since members may be a step apart. When newcomers are ready, `Announce` sends the members
to the gate between two steps: then the newcomers come in.

A death is certain if the system of the peer's host closed the connection. A peer that is only
silent may be alive behind a cut link. So where there are several anchors, a generation begins only
if more members are here than are silent (`Electorate`): two halves never both train.

A new anchor knows nothing. It begins no run before the members of a running one had time to connect
again. It waits as long for the members that one of them names, unless their hosts report them as
dead (`AskHost`).

There is no clock here: `now`, in seconds, is given with every event that needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainers.elastic.deciding.electorate import Electorate
from trainers.elastic.deciding.view import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Expel,
    Form,
    FoundRun,
    Member,
    Order,
    Refuse,
    View,
)

MOST_FRUITLESS = 3
"""After so many generations without a death and without a step, as when two members cannot reach
each other, the youngest member is expelled."""
WITHOUT = "a newer generation has begun without this peer"


class PeerStanding(Enum):
    """What a peer is doing."""

    WAITING = "waits for somebody who has the state"
    COPYING = "copies the state"
    FOUNDING = "begins with its own state"
    READY = "has the state, and waits for a change"
    MEMBER = "trains"
    GATE = "waits for the next generation"


TRAINING = PeerStanding.MEMBER, PeerStanding.GATE
GIVING = PeerStanding.FOUNDING, *TRAINING
NEW = PeerStanding.WAITING, PeerStanding.COPYING, PeerStanding.READY


@dataclass(frozen=True, slots=True)
class Settings:
    """What the anchor was started with."""

    min_peers: int = 1
    heartbeat: float = 2.0
    """Seconds of silence after which a peer is expelled."""
    only_anchor: bool = True
    """Whether the peers know no other anchor."""
    standby: bool = False
    """Whether peers ask another anchor first. No run begins here: one may be under way there."""


@dataclass(slots=True)
class Peer:
    """One peer, as the anchor knows it."""

    member: Member
    seniority: int
    standing: PeerStanding
    seen: float
    has_step: int
    """The newest step that it could begin with, from a checkpoint of its own."""
    at_step: int = 0
    donor: str = ""
    knows: int = 0
    """The newest generation that it has heard of."""


@dataclass(slots=True)
class Generation:
    """One generation, as the anchor knows it."""

    number: int = 0
    names: tuple[str, ...] = ()
    """Its members, by rank."""
    began_at: int = 0
    """The newest step of a member when it began."""
    broken: bool = False
    """Whether a member has died."""
    announced: bool = False
    """Whether its members know that a change is due."""


@dataclass(slots=True)
class Roster:
    """Call its methods with what happens. Each returns the orders that the anchor sends then."""

    settings: Settings
    opened: float
    present: Generation = field(default_factory=Generation)
    peers: dict[str, Peer] = field(default_factory=dict)
    electorate: Electorate = field(default_factory=Electorate)
    awaited: dict[str, float] = field(default_factory=dict)
    """Members that others have named to this new anchor, and until when they may come back."""
    committed: int = 0
    """The newest step that a member has reported."""
    fruitless: int = 0
    finished: tuple[int, str] | None = None
    arrivals: int = 0

    def add_newcomer(self, member: Member, has_step: int, now: float) -> list[Order]:
        """A peer without the state has connected."""
        if member.name in self.peers:
            return [Refuse(member.name, f"a peer named {member.name} is there already")]
        self._add(member, PeerStanding.WAITING, now, has_step)
        orders: list[Order] = []
        if member.name in self.present.names:
            self.electorate.silent.discard(member.name)
            self.awaited.pop(member.name, None)
            orders = self._break(f"{member.name} does not know that it is a member")
        return [*orders, *self._next_orders(now)]

    def restore_member(self, member: Member, view: View, step: int, now: float) -> list[Order]:
        """A member of `view` has connected again, or has lost another anchor."""
        name, orders = member.name, list[Order]()
        if view.generation > self.present.number:
            orders += self._adopt_view(view, step, now)
            far = [other for other in view.members if other.name in self.awaited]
            orders += [AskHost(other) for other in far if other.name != name]
        another = view.generation == self.present.number and view.names != self.present.names
        if another or name not in self.present.names:
            self.peers.pop(name, None)
            return [*orders, Expel(name, WITHOUT)]
        self.electorate.silent.discard(name)
        self.awaited.pop(name, None)
        if name not in self.peers:
            self._add(member, PeerStanding.MEMBER, now, step)
            self.peers[name].seniority = self.present.names.index(name)
            self.arrivals = max(self.arrivals, len(self.present.names))
        peer = self.peers[name]
        peer.knows, peer.seen, peer.at_step = view.generation, now, step
        self.committed = max(self.committed, step)
        if view.generation < self.present.number:
            orders += self._break(f"{name} does not know this generation")
        if self.present.broken:
            orders.append(Break((name,), view.generation, "a newer generation is due"))
        elif self.present.announced:
            orders.append(Announce((name,), self.present.number))
        return [*orders, *self._next_orders(now)]

    def note_beat(self, name: str, step: int, now: float) -> list[Order]:
        """A peer is alive, and its weights are those after `step` steps."""
        if name in self.peers:
            peer = self.peers[name]
            peer.seen, peer.at_step = now, step
            self.committed = max(self.committed, step)  # Newcomers follow what was committed.
            if peer.standing in TRAINING:
                self._note_step(step)
        return []

    def mark_ready(self, name: str, donor: str, now: float) -> list[Order]:
        """A peer has the state of `donor`, follows it, and stands at the gate."""
        peer = self.peers.get(name)
        if peer is None or donor not in self._names_in(*GIVING):
            return []  # It is going to be told to copy again.
        if peer.standing in NEW:
            peer.standing, peer.donor = PeerStanding.READY, donor
        return self._next_orders(now)

    def enter_gate(
        self, name: str, generation: int, step: int, now: float, *, planned: bool
    ) -> list[Order]:
        """A member has left its generation, between two steps as all do (`planned`) or alone."""
        if name not in self.peers:
            return []
        peer = self.peers[name]
        if generation < peer.knows:
            return []  # It does not know yet that the next generation has begun.
        if peer.standing in NEW and (self.present.names or self.settings.standby):
            self.peers.pop(name)
            return [Expel(name, WITHOUT)]
        peer.standing, peer.at_step, peer.seen = PeerStanding.GATE, step, now
        self._note_step(step)
        expected = planned and generation == self.present.number
        if expected or self.present.broken or name not in self.present.names:
            return self._next_orders(now)
        return [*self._break(f"{name} could not reach the others"), *self._next_orders(now)]

    def end_run(self, name: str, step: int, digest: str, now: float) -> list[Order]:
        """A member has ended the whole run after `step` steps, of which the last had this total."""
        if name in self._names_in(*NEW):
            return []  # It has trained nothing.
        self.finished = step, digest
        self.peers.pop(name, None)
        self._restart_copies_from(name)
        return self._next_orders(now)

    def remove_lost(self, name: str, now: float, *, certain: bool, why: str) -> list[Order]:
        """A peer is gone: it left, or its connection was closed (`certain`), or it was silent."""
        was = self.peers.pop(name, None)
        if certain:
            self.electorate.silent.discard(name)
            if self.awaited.pop(name, None) is not None:
                return [*self._break(why), *self._next_orders(now)]
        if was is None:
            return self._next_orders(now)
        orders: list[Order] = [] if certain else [Expel(name, why)]
        if was.standing in TRAINING and name in self.present.names:
            if not certain:
                self.electorate.silent.add(name)
            orders += self._break(why)
        self._restart_copies_from(name)
        return [*orders, *self._next_orders(now)]

    def tick(self, now: float) -> list[Order]:
        """Expel peers that were silent for longer than the heartbeat."""
        allowed = self.settings.heartbeat
        orders: list[Order] = []
        for name in [n for n, p in self.peers.items() if now - p.seen > allowed]:
            if name in self.peers:
                quiet = now - self.peers[name].seen
                why = f"{name} was silent for {quiet:.1f} s, and {allowed:g} are allowed"
                orders += self.remove_lost(name, now, certain=False, why=why)
        if gone := [name for name, until in self.awaited.items() if now > until]:
            self.awaited = {n: until for n, until in self.awaited.items() if n not in gone}
            self.electorate.silent |= {*gone}
            orders += self._break(f"{', '.join(gone)} did not come to this anchor in {allowed:g} s")
        return [*orders, *self._next_orders(now)]

    def waits_for(self) -> str:
        """Return what the next generation waits for, or "" if none is due."""
        here = self._names_in(PeerStanding.GATE)
        if not here:
            return ""
        far = [name for name in self._names_in(PeerStanding.MEMBER) if name in self.present.names]
        if far := [*far, *self.awaited]:
            return f"members that are not at the gate yet: {', '.join(far)}"
        coming = len(here) + len(self._newcomers_to_enter())
        # After a death the members first end the step among themselves, and then wait for others.
        if coming < self.settings.min_peers and not self.present.broken:
            return f"peers: {coming} of {self.settings.min_peers} (--min-peers of the anchor)"
        if not self.settings.only_anchor and (silent := self.electorate.outnumbers(here)):
            gone = ", ".join(silent)
            return f"{gone}: silent, and as many as are here; they may train with another anchor"
        return ""

    def _adopt_view(self, view: View, step: int, now: float) -> list[Order]:
        """Take over a generation that another anchor began, from what a member reports."""
        orders: list[Order] = []
        for name in [n for n in self._names_in(*GIVING) if n not in view.names]:
            orders.append(Expel(name, WITHOUT))
            self.peers.pop(name)
            self._restart_copies_from(name)
        self.present = Generation(view.generation, view.names, step)
        self.electorate = Electorate([view.names])
        until = now + self.settings.heartbeat
        self.awaited = {name: until for name in view.names if name not in self.peers}
        self.committed, self.fruitless = step, 0
        if deaf := [name for name in view.names if name in self.peers]:
            orders += self._break(f"{', '.join(deaf)} does not know this generation")
        return orders

    def _note_step(self, step: int) -> None:
        """A step was committed: all members of this generation know the generation."""
        self.committed = max(self.committed, step)
        if step > self.present.began_at:
            self.electorate.settle(self.present.names)
            self.fruitless = 0

    def _break(self, why: str) -> list[Order]:
        """Let no newcomers into the next generation: members may be a step apart."""
        self.present.broken = True
        members = [name for name in self._names_in(*TRAINING) if name in self.present.names]
        return [Break(tuple(members), self.present.number, why)]

    def _add(self, member: Member, standing: PeerStanding, now: float, has_step: int) -> None:
        self.peers[member.name] = Peer(member, self.arrivals, standing, now, has_step)
        self.arrivals += 1

    def _names_in(self, *standings: PeerStanding) -> list[str]:
        peers = [peer for peer in self.peers.values() if peer.standing in standings]
        return [peer.member.name for peer in sorted(peers, key=lambda peer: peer.seniority)]

    def _next_orders(self, now: float) -> list[Order]:
        formed, begun = self._form_generation(), self._found_run(now)
        return [*formed, *begun, *self._assign_donors(), *self._announce_change()]

    def _form_generation(self) -> list[Order]:
        here = self._names_in(PeerStanding.GATE)
        if not here or self.waits_for():
            return []
        orders = self._expel_youngest(here)
        here = self._names_in(PeerStanding.GATE)
        names = [*here, *self._newcomers_to_enter()]
        names.sort(key=lambda name: self.peers[name].seniority)
        step = max(self.peers[name].at_step for name in here)
        number = self.present.number + 1
        self.present = Generation(number, tuple(names), step)
        self.electorate.add_view(self.present.names)
        for name in names:
            self.peers[name].standing = PeerStanding.MEMBER
            self.peers[name].knows = number
        view = View(number, tuple(self.peers[name].member for name in names))
        return [*orders, Form(view, step, self.finished)]

    def _expel_youngest(self, here: list[str]) -> list[Order]:
        """Expel the youngest member if all are alive and yet no step is made again and again."""
        came_to_none = self.committed <= self.present.began_at
        if self.present.broken and came_to_none and {*self.present.names} <= self.peers.keys():
            self.fruitless += 1
        if self.fruitless < MOST_FRUITLESS or len(here) < 2:
            return []
        self.fruitless = MOST_FRUITLESS - 1
        youngest = here[-1]
        self.peers.pop(youngest)
        self._restart_copies_from(youngest)
        why = (
            f"{MOST_FRUITLESS} generations came to no step, so some of their members cannot reach"
            f" each other, and {youngest} is the youngest: look at the network between them"
        )
        return [Expel(youngest, why)]

    def _newcomers_to_enter(self) -> list[str]:
        """The newcomers that come in with the next generation."""
        return [] if self.present.broken else self._names_in(PeerStanding.READY)

    def _found_run(self, now: float) -> list[Order]:
        """If nobody has the state, let the peer with the newest checkpoint begin."""
        waiting = self._names_in(PeerStanding.WAITING)
        if len(waiting) < len(self.peers) or not waiting or self.awaited:
            return []
        if self.finished is not None:
            return self._refuse_all(waiting, f"the run has ended, at step {self.finished[0]}")
        if self.settings.standby or now - self.opened < self.settings.heartbeat:
            return []
        if len(waiting) < self.settings.min_peers:
            return []
        if self.electorate.silent and not self.settings.only_anchor:
            return []
        first = max(waiting, key=lambda name: (self.peers[name].has_step, -waiting.index(name)))
        if self.peers[first].has_step == 0 < self.committed:
            why = (
                f"the swarm was at step {self.committed}, and nobody who is here has its state or a"
                " checkpoint: start a peer that has one, or a new anchor to begin anew"
            )
            return self._refuse_all(waiting, why)
        self.committed = self.peers[first].has_step
        self.peers[first].standing = PeerStanding.FOUNDING
        self.present = Generation(self.present.number, began_at=self.committed)
        self.electorate = Electorate()
        return [FoundRun(first)]

    def _refuse_all(self, names: Sequence[str], why: str) -> list[Order]:
        for name in names:
            self.peers.pop(name)
        return [Refuse(name, why) for name in names]

    def _assign_donors(self) -> list[Order]:
        """Give every waiting peer a member to copy from: the one with the fewest copies."""
        donors = self._names_in(*GIVING)
        orders: list[Order] = []
        for name in self._names_in(PeerStanding.WAITING) if donors else []:
            load = {d: sum(p.donor == d for p in self.peers.values()) for d in donors}
            donor = min(reversed(donors), key=lambda d: load[d])
            self.peers[name].standing, self.peers[name].donor = PeerStanding.COPYING, donor
            orders.append(CopyFrom(name, self.peers[donor].member))
        return orders

    def _restart_copies_from(self, donor: str) -> None:
        """Let peers that copied from a peer that is gone wait for another donor."""
        for peer in self.peers.values():
            if peer.donor == donor and peer.standing in (PeerStanding.COPYING, PeerStanding.READY):
                peer.standing, peer.donor = PeerStanding.WAITING, ""

    def _announce_change(self) -> list[Order]:
        members = self._names_in(PeerStanding.MEMBER)
        coming = self._names_in(PeerStanding.READY)
        if self.present.announced or self.present.broken or not members or not coming:
            return []
        self.present.announced = True
        return [Announce(tuple(members), self.present.number)]
