"""The anchor's knowledge: who is there, and when the next generation begins.

    waiting --found/copy--> copying --ready--> ready --+
                                                       |  Form: all living members are at the gate
    member --death of one, or a change--> at the gate -+------------------------> member

A generation ends at once where a member dies: `Break` calls the others to the gate, and nobody new
comes in, since members may stand a step apart. Where peers have come, `Announce` tells the members,
and they go to the gate between two steps: then newcomers come in.

A death is certain where the connection was closed by the system of that peer's host. Who is only
silent may be alive behind a cut link. So where several anchors may be asked, a generation begins
only if more members are there than are silent (`Electorate`): two halves never train both.

An anchor that has just begun knows nothing. So it lets no run begin before members of one that is
under way could have come back, and waits as long for those whom one of them names, unless their
hosts say that they are dead (`AskHost`).

No clock: `now` comes in seconds with every event that needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainers.elastic.deciding.electorate import Electorate
from trainers.elastic.deciding.roster_words import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Expel,
    Form,
    Found,
    Refuse,
    Word,
)
from trainers.elastic.deciding.view import Member, View

MOST_FRUITLESS = 3
"""So many generations may end without a death and without a step, as when two members cannot reach
each other. Then the youngest member is expelled."""


WITHOUT = "a newer generation has begun without this peer"


class PeerStanding(Enum):
    """Where a peer stands."""

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
class Roster:
    """Call its methods with what happens. Each returns what is to be said, in order."""

    settings: Settings
    opened: float
    """When the anchor began to listen."""
    generation: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)
    view: tuple[str, ...] = ()
    """The names of the present generation, dead ones too."""
    electorate: Electorate = field(default_factory=Electorate)
    awaited: dict[str, float] = field(default_factory=dict)
    """Members that others have named to this new anchor, and until when they may come back."""
    broken: bool = False
    """Whether a member of the present generation has died."""
    announced: bool = False
    committed: int = 0
    """The newest step that a member has told."""
    began_at: int = 0
    """The newest step of a member when the present generation began."""
    fruitless: int = 0
    """Generations without a death that did not come to a step, since one did."""
    finished: tuple[int, str] | None = None
    arrivals: int = 0

    # ---- what happens ---------------------------------------------------------------------------

    def came(self, member: Member, has_step: int, now: float) -> list[Word]:
        """A peer without the state has come."""
        if member.name in self.peers:
            return [Refuse(member.name, f"a peer named {member.name} is there already")]
        self._add(member, PeerStanding.WAITING, now, has_step)
        said: list[Word] = []
        if member.name in self.view:
            self.electorate.silent.discard(member.name)
            self.awaited.pop(member.name, None)
            said = self._break(f"{member.name} has not heard of being a member")
        return [*said, *self._next(now)]

    def came_back(self, member: Member, view: View, step: int, now: float) -> list[Word]:
        """A member of `view` has found this anchor after another one, or a connection, was lost."""
        name, said = member.name, list[Word]()
        if view.generation > self.generation:
            said += self._adopted(view, step, now)
            far = [other for other in view.members if other.name in self.awaited]
            said += [AskHost(other) for other in far if other.name != name]
        another = view.generation == self.generation and view.names != self.view
        if another or name not in self.view:
            self.peers.pop(name, None)
            return [*said, Expel(name, WITHOUT)]
        self.electorate.silent.discard(name)
        self.awaited.pop(name, None)
        if name not in self.peers:
            self._add(member, PeerStanding.MEMBER, now, step)
            self.peers[name].seniority = self.view.index(name)
            self.arrivals = max(self.arrivals, len(self.view))
        peer = self.peers[name]
        peer.knows, peer.seen, peer.at_step = view.generation, now, step
        self.committed = max(self.committed, step)
        if view.generation < self.generation:
            said += self._break(f"{name} has not heard of this generation")
        if self.broken:
            said.append(Break((name,), view.generation, "a newer generation shall begin"))
        elif self.announced:
            said.append(Announce((name,), self.generation))
        return [*said, *self._next(now)]

    def beat(self, name: str, step: int, now: float) -> list[Word]:
        """A peer is alive, and its weights are those after `step` steps."""
        if name in self.peers:
            peer = self.peers[name]
            peer.seen, peer.at_step = now, step
            self.committed = max(self.committed, step)  # Newcomers follow what was committed.
            if peer.standing in TRAINING:
                self._stepped(step)
        return []

    def ready(self, name: str, donor: str, now: float) -> list[Word]:
        """A peer has the state of `donor`, follows it, and stands at the gate."""
        peer = self.peers.get(name)
        if peer is None or donor not in self._standing(*GIVING):
            return []  # It will hear that it has to copy again.
        if peer.standing in NEW:
            peer.standing, peer.donor = PeerStanding.READY, donor
        return self._next(now)

    def at_gate(
        self, name: str, generation: int, step: int, now: float, *, planned: bool
    ) -> list[Word]:
        """A member has left its generation: between two steps, as all do (`planned`), or because it
        cannot reach others."""
        if name not in self.peers:
            return []
        peer = self.peers[name]
        if generation < peer.knows:
            return []  # It has not heard yet that the next generation has begun.
        if peer.standing in NEW and (self.view or self.settings.standby):
            self.peers.pop(name)
            return [Expel(name, WITHOUT)]
        peer.standing, peer.at_step, peer.seen = PeerStanding.GATE, step, now
        self._stepped(step)
        expected = planned and generation == self.generation
        if expected or self.broken or name not in self.view:
            return self._next(now)
        return [*self._break(f"{name} could not reach the others"), *self._next(now)]

    def left(self, name: str, now: float) -> list[Word]:
        """A peer has said goodbye."""
        return self.lost(name, now, certain=True, why=f"{name} has left")

    def ended(self, name: str, step: int, digest: str, now: float) -> list[Word]:
        """A member has ended the whole run after `step` steps, of which the last had this total."""
        if name in self._standing(*NEW):
            return []  # It has trained nothing.
        self.finished = step, digest
        self.peers.pop(name, None)
        self._without_donor(name)
        return self._next(now)

    def lost(self, name: str, now: float, *, certain: bool, why: str) -> list[Word]:
        """A peer is gone: its connection was closed (`certain`), or it was silent for too long."""
        was = self.peers.pop(name, None)
        if certain:
            self.electorate.silent.discard(name)
            if self.awaited.pop(name, None) is not None:
                return [*self._break(why), *self._next(now)]
        if was is None:
            return self._next(now)
        said: list[Word] = [] if certain else [Expel(name, why)]
        if was.standing in TRAINING and name in self.view:
            if not certain:
                self.electorate.silent.add(name)
            said += self._break(why)
        self._without_donor(name)
        return [*said, *self._next(now)]

    def tick(self, now: float) -> list[Word]:
        """Expel who was silent for longer than the heartbeat."""
        allowed = self.settings.heartbeat
        said: list[Word] = []
        for name in [n for n, p in self.peers.items() if now - p.seen > allowed]:
            if name in self.peers:
                quiet = now - self.peers[name].seen
                why = f"{name} was silent for {quiet:.1f} s, and {allowed:g} are allowed"
                said += self.lost(name, now, certain=False, why=why)
        if gone := [name for name, until in self.awaited.items() if now > until]:
            self.awaited = {n: until for n, until in self.awaited.items() if n not in gone}
            self.electorate.silent |= {*gone}
            said += self._break(f"{', '.join(gone)} did not come to this anchor in {allowed:g} s")
        return [*said, *self._next(now)]

    # ---- what follows ---------------------------------------------------------------------------

    def waits_for(self) -> str:
        """Say what keeps the next generation from beginning; "" if one is under way."""
        here = self._standing(PeerStanding.GATE)
        if not here:
            return ""
        far = [name for name in self._standing(PeerStanding.MEMBER) if name in self.view]
        if far := [*far, *self.awaited]:
            return f"members that are not at the gate yet: {', '.join(far)}"
        coming = len(here) + len(self._entering())
        # After a death the members settle the step among themselves, and then wait for others.
        if coming < self.settings.min_peers and not self.broken:
            return f"peers: {coming} of {self.settings.min_peers} (--min-peers of the anchor)"
        if not self.settings.only_anchor and (silent := self.electorate.outnumbers(here)):
            gone = ", ".join(silent)
            return f"{gone}: silent, and as many as are here; they may train with another anchor"
        return ""

    def _adopted(self, view: View, step: int, now: float) -> list[Word]:
        """Take over what a member tells of a generation that this anchor did not begin."""
        said: list[Word] = []
        for name in [n for n in self._standing(*GIVING) if n not in view.names]:
            said.append(Expel(name, WITHOUT))
            self.peers.pop(name)
            self._without_donor(name)
        self.generation, self.view = view.generation, view.names
        self.electorate = Electorate([view.names])
        until = now + self.settings.heartbeat
        self.awaited = {name: until for name in view.names if name not in self.peers}
        self.broken = self.announced = False
        self.committed = self.began_at = step
        self.fruitless = 0
        if deaf := [name for name in view.names if name in self.peers]:
            said += self._break(f"{', '.join(deaf)} has not heard of this generation")
        return said

    def _stepped(self, step: int) -> None:
        """A step was committed: whoever is in this generation knows of it."""
        self.committed = max(self.committed, step)
        if step > self.began_at:
            self.electorate.settle(self.view)
            self.fruitless = 0

    def _break(self, why: str) -> list[Word]:
        """Newcomers do not come in with the next generation: members may stand a step apart."""
        self.broken = True
        members = self._standing(*TRAINING)
        return [Break(tuple(n for n in members if n in self.view), self.generation, why)]

    def _add(self, member: Member, standing: PeerStanding, now: float, has_step: int) -> None:
        self.peers[member.name] = Peer(member, self.arrivals, standing, now, has_step)
        self.arrivals += 1

    def _standing(self, *standings: PeerStanding) -> list[str]:
        found = [peer for peer in self.peers.values() if peer.standing in standings]
        return [peer.member.name for peer in sorted(found, key=lambda peer: peer.seniority)]

    def _next(self, now: float) -> list[Word]:
        return [*self._formed(), *self._founded(now), *self._donors(), *self._announcement()]

    def _formed(self) -> list[Word]:
        here = self._standing(PeerStanding.GATE)
        if not here or self.waits_for():
            return []
        said = self._without_youngest(here)
        here = self._standing(PeerStanding.GATE)
        names = [*here, *self._entering()]
        names.sort(key=lambda name: self.peers[name].seniority)
        step = max(self.peers[name].at_step for name in here)
        self.generation += 1
        self.view, self.began_at = tuple(names), step
        self.electorate.stand(self.view)
        self.broken = self.announced = False
        for name in names:
            self.peers[name].standing = PeerStanding.MEMBER
            self.peers[name].knows = self.generation
        view = View(self.generation, tuple(self.peers[name].member for name in names))
        return [*said, Form(view, step, self.finished)]

    def _without_youngest(self, here: list[str]) -> list[Word]:
        """Expel the youngest member where all live, and yet come to no step again and again."""
        came_to_none = self.committed <= self.began_at
        if self.broken and came_to_none and {*self.view} <= self.peers.keys():
            self.fruitless += 1
        if self.fruitless < MOST_FRUITLESS or len(here) < 2:
            return []
        self.fruitless = MOST_FRUITLESS - 1
        youngest = here[-1]
        self.peers.pop(youngest)
        self._without_donor(youngest)
        why = (
            f"{MOST_FRUITLESS} generations came to no step, so some of their members cannot reach"
            f" each other, and {youngest} is the youngest: look at the network between them"
        )
        return [Expel(youngest, why)]

    def _entering(self) -> list[str]:
        """The newcomers that come in with the next generation."""
        return [] if self.broken else self._standing(PeerStanding.READY)

    def _founded(self, now: float) -> list[Word]:
        """Where nobody has the state, the peer with the newest checkpoint begins."""
        waiting = self._standing(PeerStanding.WAITING)
        if len(waiting) < len(self.peers) or not waiting or self.awaited:
            return []
        if self.finished is not None:
            return self._refused(waiting, f"the run has ended, at step {self.finished[0]}")
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
            return self._refused(waiting, why)
        self.committed = self.began_at = self.peers[first].has_step
        self.peers[first].standing = PeerStanding.FOUNDING
        self.view, self.broken, self.electorate = (), False, Electorate()
        return [Found(first)]

    def _refused(self, names: Sequence[str], why: str) -> list[Word]:
        for name in names:
            self.peers.pop(name)
        return [Refuse(name, why) for name in names]

    def _donors(self) -> list[Word]:
        """Give everybody who waits a member to copy from, the one with the fewest copies."""
        donors = self._standing(*GIVING)
        said: list[Word] = []
        for name in self._standing(PeerStanding.WAITING) if donors else []:
            load = {d: sum(p.donor == d for p in self.peers.values()) for d in donors}
            donor = min(reversed(donors), key=lambda d: load[d])
            self.peers[name].standing, self.peers[name].donor = PeerStanding.COPYING, donor
            said.append(CopyFrom(name, self.peers[donor].member))
        return said

    def _without_donor(self, donor: str) -> None:
        """Who copied from somebody who is gone begins to copy again."""
        for peer in self.peers.values():
            if peer.donor == donor and peer.standing in (PeerStanding.COPYING, PeerStanding.READY):
                peer.standing, peer.donor = PeerStanding.WAITING, ""

    def _announcement(self) -> list[Word]:
        members = self._standing(PeerStanding.MEMBER)
        coming = self._standing(PeerStanding.READY)
        if self.announced or self.broken or not members or not coming:
            return []
        self.announced = True
        return [Announce(tuple(members), self.generation)]
