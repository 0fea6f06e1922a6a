"""The anchor's knowledge: who is there, and when the next generation begins.

    waiting --found/copy--> copying --ready--> ready --+
                                                       |  Form: all living members are at the gate
    member --death of one, or a change--> at the gate -+------------------------> member

A generation ends at once where a member dies: `Break` calls the others to the gate, and nobody new
comes in, since members may stand a step apart. Where peers have come or want to leave, `Announce`
tells the members, and they go to the gate between two steps: then newcomers come in.

A death is certain where the connection was closed by the system of that peer's host. Who is only
silent may be alive behind a cut link. So where several anchors may be asked, a generation begins
only if more of the last one are there than are silent: two halves never train both.

No clock: `now` comes in seconds with every event that needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from trainers.elastic.deciding.view import Member, View


class Standing(Enum):
    """Where a peer stands."""

    WAITING = "waits for somebody who has the state"
    COPYING = "copies the state"
    FOUNDING = "begins with its own state"
    READY = "has the state, and waits for a change"
    MEMBER = "trains"
    GATE = "waits for the next generation"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the anchor was started with."""

    min_peers: int = 1
    heartbeat: float = 2.0
    """Seconds of silence after which a peer is expelled."""
    only_anchor: bool = True
    """Whether the peers know no other anchor."""


# ---- what the anchor says -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """Nobody has the state: this peer begins with its own, and gives it to the others."""

    peer: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Take the state from this member."""

    peer: str
    donor: Member


@dataclass(frozen=True, slots=True)
class Announce:
    """A change is due: go to the gate between two steps."""

    peers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Break:
    """The generation has ended: leave whatever you wait for, and go to the gate."""

    peers: tuple[str, ...]
    generation: int
    why: str


@dataclass(frozen=True, slots=True)
class Form:
    """The next generation begins."""

    view: View
    step: int
    """The steps that the one of its members has applied who has applied the most."""
    finished: tuple[int, str] | None
    """The step and the digest with which somebody has ended the whole run, if somebody has."""


@dataclass(frozen=True, slots=True)
class Expel:
    """This peer is no member any more. It has to join again."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """This peer cannot join."""

    peer: str
    why: str


Word = Found | Copy | Announce | Break | Form | Expel | Refuse


@dataclass(slots=True)
class Peer:
    """One peer, as the anchor knows it."""

    member: Member
    seniority: int
    standing: Standing
    seen: float
    has_step: int
    """The newest step that it could begin with, from a checkpoint of its own."""
    at_step: int = 0
    donor: str = ""


@dataclass(slots=True)
class Roster:
    """Call its methods with what happens. Each returns what is to be said, in order."""

    settings: Settings
    generation: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)
    view: tuple[str, ...] = ()
    """The names of the present generation, dead ones too."""
    silent: set[str] = field(default_factory=set)
    """Members of the present generation that are gone without a closed connection."""
    broken: bool = False
    """Whether a member of the present generation has died."""
    announced: bool = False
    committed: int = 0
    """The newest step that a member has told."""
    finished: tuple[int, str] | None = None
    arrivals: int = 0

    # ---- what happens ---------------------------------------------------------------------------

    def came(self, member: Member, has_step: int, now: float) -> list[Word]:
        """A peer without the state has come."""
        if member.name in self.peers:
            return [Refuse(member.name, f"a peer named {member.name} is there already")]
        self._add(member, Standing.WAITING, now, has_step)
        return self._next()

    def came_back(self, member: Member, view: View, step: int, now: float) -> list[Word]:
        """A member of `view` has found this anchor after another one, or a connection, was lost."""
        if view.generation < self.generation:
            return [Expel(member.name, "a newer generation has begun without this peer")]
        if view.generation > self.generation:
            self.generation, self.view = view.generation, view.names
            self.silent = {*view.names} - {*self.peers}
            self.broken = False
        self.silent.discard(member.name)
        if member.name not in self.peers:
            self._add(member, Standing.MEMBER, now, step)
            self.peers[member.name].seniority = view.rank(member.name)
            self.arrivals = max(self.arrivals, len(view.members))
        self.committed = max(self.committed, step)
        return self._next()

    def beat(self, name: str, step: int, now: float) -> list[Word]:
        """A peer is alive, and its weights are those after `step` steps."""
        if name in self.peers:
            peer = self.peers[name]
            peer.seen, peer.at_step = now, step
            if peer.standing in (Standing.MEMBER, Standing.GATE):
                self.committed = max(self.committed, step)
        return []

    def ready(self, name: str) -> list[Word]:
        """A peer has the state, and stands at the gate."""
        if name not in self.peers:
            return []
        self.peers[name].standing = Standing.READY
        return self._next()

    def at_gate(
        self, name: str, generation: int, step: int, now: float, *, planned: bool
    ) -> list[Word]:
        """A member has left its generation: between two steps, as all do (`planned`), or because it
        cannot reach others."""
        if name not in self.peers:
            return []
        peer = self.peers[name]
        if peer.standing is Standing.MEMBER and generation < self.generation:
            return []  # It has not heard yet that the next generation has begun.
        peer.standing, peer.at_step, peer.seen = Standing.GATE, step, now
        self.committed = max(self.committed, step)
        if planned or self.broken or name not in self.view:
            return self._next()
        return [*self._break(f"{name} could not reach the others"), *self._next()]

    def left(self, name: str) -> list[Word]:
        """A peer has said goodbye."""
        return self.lost(name, certain=True, why=f"{name} has left")

    def ended(self, name: str, step: int, digest: str) -> list[Word]:
        """A member has ended the whole run after `step` steps, of which the last had this total."""
        self.finished = step, digest
        self.peers.pop(name, None)
        return [*self._without_donor(name), *self._next()]

    def lost(self, name: str, *, certain: bool, why: str) -> list[Word]:
        """A peer is gone: its connection was closed (`certain`), or it was silent for too long."""
        was = self.peers.pop(name, None)
        if was is None:
            return []
        said: list[Word] = [] if certain else [Expel(name, why)]
        if was.standing in (Standing.MEMBER, Standing.GATE) and name in self.view:
            if not certain:
                self.silent.add(name)
            said += self._break(why)
        return [*said, *self._without_donor(name), *self._next()]

    def tick(self, now: float) -> list[Word]:
        """Expel who was silent for longer than the heartbeat."""
        late = [n for n, p in self.peers.items() if now - p.seen > self.settings.heartbeat]
        said: list[Word] = []
        for name in late:
            quiet = now - self.peers[name].seen
            allowed = self.settings.heartbeat
            why = f"{name} was silent for {quiet:.1f} s, and {allowed:g} are allowed"
            said += self.lost(name, certain=False, why=why)
        return said

    # ---- what follows ---------------------------------------------------------------------------

    def waits_for(self) -> str:
        """Say what keeps the next generation from beginning; "" if one is under way."""
        here = self._standing(Standing.GATE)
        if not here:
            return ""
        if far := [n for n in self.view if n in self.peers and n not in here]:
            return f"members that are not at the gate yet: {', '.join(far)}"
        coming = len(here) + len(self._entering())
        if coming < self.settings.min_peers:
            return f"{coming} peers of {self.settings.min_peers} (min_peers)"
        if self._may_be_outnumbered(here):
            gone = ", ".join(sorted(self.silent))
            return f"{gone}: silent, and as many as are here; they may train with another anchor"
        return ""

    def _break(self, why: str) -> list[Word]:
        """Newcomers do not come in with the next generation: members may stand a step apart."""
        self.broken = True
        return [Break(tuple(n for n in self.view if n in self.peers), self.generation, why)]

    def _add(self, member: Member, standing: Standing, now: float, has_step: int) -> None:
        self.peers[member.name] = Peer(member, self.arrivals, standing, now, has_step)
        self.arrivals += 1

    def _standing(self, *standings: Standing) -> list[str]:
        found = [peer for peer in self.peers.values() if peer.standing in standings]
        return [peer.member.name for peer in sorted(found, key=lambda peer: peer.seniority)]

    def _next(self) -> list[Word]:
        return [*self._formed(), *self._founded(), *self._donors(), *self._announcement()]

    def _formed(self) -> list[Word]:
        here = self._standing(Standing.GATE)
        if not here or self.waits_for():
            return []
        names = [*here, *self._entering()]
        names.sort(key=lambda name: self.peers[name].seniority)
        self.generation += 1
        self.view, self.silent = tuple(names), set()
        self.broken = self.announced = False
        for name in names:
            self.peers[name].standing = Standing.MEMBER
        view = View(self.generation, tuple(self.peers[name].member for name in names))
        return [Form(view, max(self.peers[name].at_step for name in here), self.finished)]

    def _entering(self) -> list[str]:
        """The newcomers that come in with the next generation."""
        return [] if self.broken else self._standing(Standing.READY)

    def _may_be_outnumbered(self, here: Sequence[str]) -> bool:
        if self.settings.only_anchor or not self.silent:
            return False
        return len([name for name in here if name in self.view]) <= len(self.silent)

    def _founded(self) -> list[Word]:
        """Where nobody has the state, the peer with the newest checkpoint begins."""
        waiting = self._standing(Standing.WAITING)
        if len(waiting) < len(self.peers) or len(waiting) < self.settings.min_peers or not waiting:
            return []
        if self.silent and not self.settings.only_anchor:
            return []
        first = max(waiting, key=lambda name: (self.peers[name].has_step, -waiting.index(name)))
        if self.peers[first].has_step == 0 < self.committed:
            why = (
                f"the swarm was at step {self.committed}, and nobody who is here has its state or a"
                " checkpoint: start a peer that has one, or a new anchor to begin anew"
            )
            return [Refuse(name, why) for name in waiting]
        self.committed = self.peers[first].has_step
        self.peers[first].standing = Standing.FOUNDING
        self.view, self.broken = (), False
        return [Found(first)]

    def _donors(self) -> list[Word]:
        """Give everybody who waits a member to copy from, the one with the fewest copies."""
        donors = self._standing(Standing.FOUNDING, Standing.MEMBER, Standing.GATE)
        said: list[Word] = []
        for name in self._standing(Standing.WAITING) if donors else []:
            load = {d: sum(p.donor == d for p in self.peers.values()) for d in donors}
            donor = min(reversed(donors), key=lambda d: load[d])
            self.peers[name].standing, self.peers[name].donor = Standing.COPYING, donor
            said.append(Copy(name, self.peers[donor].member))
        return said

    def _without_donor(self, donor: str) -> list[Word]:
        """Who copied from somebody who is gone begins to copy again."""
        for peer in self.peers.values():
            if peer.donor == donor and peer.standing in (Standing.COPYING, Standing.READY):
                peer.standing, peer.donor = Standing.WAITING, ""
        return []

    def _announcement(self) -> list[Word]:
        members = self._standing(Standing.MEMBER)
        if self.announced or self.broken or not members or not self._standing(Standing.READY):
            return []
        self.announced = True
        return [Announce(tuple(members), self.generation)]
