"""Peers, groups and anchors of a swarm on paper (paper_swarm.py).

PaperPeer.life   what a peer does, up to its next `yield`: there anything may happen elsewhere
PaperGroup       collectives: one that all have entered is complete at each member, or fails
                 there if somebody has died or hung up, as the dice say
PaperAnchor      messages to and from a roster, in order for each peer; late or lost with it
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainers.elastic.deciding.decision import (
    Apply,
    Compute,
    Reduce,
    Rejoin,
    ToGate,
    Wait,
    decide,
    is_equal_vote,
)
from trainers.elastic.deciding.header import Header, MemberPace
from trainers.elastic.deciding.roster import Roster, Settings
from trainers.elastic.deciding.view import (
    Announce,
    AskHost,
    Break,
    CopyFrom,
    Form,
    FoundRun,
    Member,
    Order,
    View,
)

if TYPE_CHECKING:
    from support.paper_swarm import PaperSwarm

Life = Generator[None]


class LawBroken(AssertionError):
    """Something happened that no history of deaths may bring about."""


class _Over(Exception):
    """The generation is over for this peer."""


class _Gone(Exception):
    """This peer ends: it was expelled or refused, or cannot go on."""


@dataclass
class PaperGroup:
    """The members of a generation, and what each has entered into each collective."""

    view: View
    entered: list[dict[str, tuple[str, Any]]] = field(default_factory=list)
    hung_up: set[str] = field(default_factory=set)

    def enter(self, number: int, name: str, kind: str, payload: Any) -> dict[str, tuple[str, Any]]:
        while len(self.entered) <= number:
            self.entered.append({})
        op = self.entered[number]
        if kinds := {other for other, _ in op.values()} - {kind}:
            raise LawBroken(f"collective {number} of {self.view}: {name} {kind}, others {kinds}")
        op[name] = kind, payload
        return op


class PaperAnchor:
    """A roster, and the peers' channels to it."""

    def __init__(self, swarm: "PaperSwarm", side: int, standby: bool) -> None:
        self.swarm = swarm
        self.side = side
        settings = Settings(swarm.min_peers, swarm.heartbeat, not swarm.two_anchors, standby)
        self.roster = Roster(settings, swarm.now)
        self.up: dict[str, deque[tuple[Any, ...]]] = {}
        self.down: dict[str, deque[Order]] = {}
        self.asked: list[str] = []
        """Members whose hosts shall say whether they are dead."""

    def connect(self, peer: "PaperPeer") -> None:
        view = peer.view if peer.form is None else peer.form.view
        self.up[peer.name] = deque([("hello", view, peer.step)])
        self.down[peer.name] = deque()
        if peer.form is not None:
            return
        if peer.ready:
            self.up[peer.name].append(("ready", peer.ready))
        elif peer.at_gate is not None:
            self.up[peer.name].append(("gate", *peer.at_gate))

    def deliver(self, name: str) -> None:
        """Hand one message to the roster."""
        kind, *told = self.up[name].popleft()
        roster, now = self.roster, self.swarm.now
        member = Member(name, "host", 1)
        if kind == "hello":
            view, step = told
            if view is None:
                self.say(roster.add_newcomer(member, 0, now))
            else:
                self.say(roster.restore_member(member, view, step, now))
        elif kind == "closed":
            del self.up[name], self.down[name]
            self.say(roster.remove_lost(name, now, certain=True, why="closed"))
        elif kind == "ready":
            self.say(roster.mark_ready(name, told[0], now))
        elif kind == "gate":
            self.say(roster.enter_gate(name, told[0], told[1], now, planned=told[2]))
        elif kind == "ended":
            self.say(roster.end_run(name, told[0], told[1], now))
        elif kind == "leave":
            self.say(roster.remove_lost(name, now, certain=True, why="left"))

    def say(self, words: Sequence[Order]) -> None:
        for word in words:
            if isinstance(word, AskHost):
                self.asked.append(word.member.name)
                continue
            if isinstance(word, FoundRun):
                self.swarm.begun_anew()
            if isinstance(word, Form):
                self.swarm.formed(word)
                names = word.view.names
            else:
                names = word.peers if isinstance(word, Announce | Break) else (word.peer,)
            for name in names:
                if name in self.down:
                    self.down[name].append(word)

    def hear_all(self) -> None:
        for peer in self.swarm.awake():
            while peer.anchor is self and self.up.get(peer.name):
                self.deliver(peer.name)

    def tick(self) -> None:
        """Living peers say so, and all they have said arrives; then silence is noticed."""
        self.hear_all()
        for peer in self.swarm.awake():
            if peer.anchor is self:
                self.say(self.roster.note_beat(peer.name, peer.step, self.swarm.now))
        self.hosts_answer()
        self.say(self.roster.tick(self.swarm.now))

    def hosts_answer(self) -> None:
        """A host on this side says that a process is dead. One that is gone itself says nothing."""
        asked, self.asked = self.asked, []
        for name in asked:
            peer = self.swarm.peers[name]
            here = peer.side == self.side or not self.swarm.two_anchors
            if name not in self.up and here and not peer.alive and peer.why != "silent":
                self.say(self.roster.remove_lost(name, self.swarm.now, certain=True, why="dead"))


class PaperPeer:
    """One peer: what it knows, and a life that goes on a little with each `step_on`."""

    def __init__(self, swarm: "PaperSwarm", name: str) -> None:
        self.swarm = swarm
        self.name = name
        self.rate = swarm.dice.choice((0.0, 1.0, 1.0, 3.0))
        self.side = 0
        self.alive, self.frozen = True, False
        self.why = ""
        self.history: list[str] = []
        self.run = 0
        """Which of the runs its history is of, where nobody had the state and one began anew."""
        self.follows: deque[str] | None = None
        self.followers: dict[str, deque[str]] = {}
        self.anchor: PaperAnchor | None = None
        # What the anchor has said.
        self.role: Order | None = None
        self.roles = 0
        self.form: Form | None = None
        self.view: View | None = None
        self.over: set[int] = set()
        self.announced: set[int] = set()
        self.expelled = ""
        # What this peer would tell another anchor.
        self.ready = ""
        self.at_gate: tuple[int, int, bool] | None = None
        # The step under way.
        self.trains = False
        self.done: list[int] = []
        self.had: tuple[int, ...] = ()
        self.held = self.kept = ""
        self.finished: tuple[int, str] | None = None
        self.group: PaperGroup | None = None
        self.collectives = 0
        self.stage = "new"
        self._life = self.life()

    @property
    def step(self) -> int:
        return len(self.history)

    # ---- the link to the anchor -----------------------------------------------------------------

    def tell(self, *message: Any) -> None:
        if self.anchor is not None and self.name in self.anchor.up:
            self.anchor.up[self.name].append(message)

    def hear(self) -> None:
        assert self.anchor is not None
        word = self.anchor.down[self.name].popleft()
        match word:
            case FoundRun() | CopyFrom():
                self.role, self.roles = word, self.roles + 1
                if isinstance(word, FoundRun):
                    self.run = self.swarm.runs
            case Announce(_, generation):
                self.announced.add(generation)
            case Break(_, generation):
                self.over.add(generation)
            case Form():
                self.form = word
            case _ if not isinstance(word, AskHost):
                self.expelled = word.why

    def check(self) -> None:
        if self.expelled:
            raise _Gone(self.expelled)
        if self.view is None:
            return
        newer = self.form is not None and self.form.view.generation > self.view.generation
        if newer or self.view.generation in self.over:
            raise _Over

    def end(self, why: str) -> None:
        """The process is gone: its host's system closes all its connections."""
        self.alive, self.why = False, why
        self.hang_up()
        self.tell("closed")
        self._life.close()

    def hang_up(self) -> None:
        if self.group is not None:
            self.group.hung_up.add(self.name)
        self.group = None

    # ---- life -----------------------------------------------------------------------------------

    def step_on(self) -> None:
        try:
            next(self._life)
        except _Gone as error:
            self.end(str(error))
        except StopIteration:
            self.end("ended")

    def life(self) -> Life:
        while self.role is None:
            yield
            self.check()
        if isinstance(self.role, CopyFrom):
            yield from self.newcomer()
        self.trains = True
        while self.step < self.swarm.last:
            yield from self.one_step()
        self.tell("ended", self.step, self.kept)

    def newcomer(self) -> Life:
        copied, told = 0, False
        while True:
            yield
            if self.expelled:
                raise _Gone(self.expelled)
            if not isinstance(self.role, CopyFrom):
                self.history, self.ready = [], ""
                return  # Nobody is left: it begins with its own state.
            donor = self.swarm.peers[self.role.donor.name]
            there = donor.alive and donor.side == self.side
            self.stage = "copying" if copied < self.roles else "follows"
            if copied < self.roles and self.form is None:
                self.ready, told, self.follows = "", False, None
                if there and donor.trains:
                    self.history, self.run, copied = [*donor.history], donor.run, self.roles
                    self.follows = donor.followers[self.name] = deque()
                continue
            if self.form is not None and self.step >= self.form.step:
                self.follows = None
                donor.followers.pop(self.name, None)
                self.enter(self.form)
                return
            if self.follows:
                self.history.append(self.follows.popleft())
                self.swarm.applied(self)
            elif self.form is not None and not there:
                raise _Gone("the donor died, and its last commits did not come")
            elif not told:
                self.ready, told = donor.name, True
                self.tell("ready", donor.name)

    def enter(self, form: Form) -> None:
        self.form, self.view, self.at_gate, self.ready = None, form.view, None, ""
        self.finished = form.finished

    def one_step(self) -> Life:
        self.done, self.held = [], ""
        planned = False
        while True:
            try:
                if self.group is None:
                    if self.view is None or self.at_gate is not None or self.collectives:
                        yield from self.gate(planned)
                    self.collectives = 0
                    assert self.view is not None
                    self.group = self.swarm.group(self.view)
                    yield from self.collective("form", None)
                if (commit := (yield from self.attempt())) is not None:
                    break
                planned = True
            except _Over:
                planned = False
            self.hang_up()
        self.history.append(commit)
        self.swarm.applied(self)
        self.kept, self.held = commit, ""
        for queue in self.followers.values():
            queue.append(commit)

    def gate(self, planned: bool) -> Life:
        self.stage = "gate"
        generation = 0 if self.view is None else self.view.generation
        self.at_gate = generation, self.step, planned
        self.tell("gate", *self.at_gate)
        while self.form is None or self.form.view.generation <= generation:
            yield
            if self.expelled:
                raise _Gone(self.expelled)
        self.enter(self.form)

    def attempt(self) -> Generator[None, None, str | None]:
        if self.held and self.finished == (self.step + 1, self.held):
            return self.held
        while True:
            headers: list[Header] = yield from self.collective("header", self.header())
            assert self.view is not None
            rank = self.view.rank(self.name)
            match decide(headers, rank, self.swarm.lanes, self.swarm.min_peers):
                case Compute(lanes):
                    self.had = (*self.done, *lanes)
                    self.stage = "compute"
                    for lane in lanes:
                        self.done.append(lane)
                        yield
                        self.check()
                case Reduce(contributors):
                    added = [(headers[r].name, headers[r].done) for r in contributors]
                    self.swarm.about_to_reduce(headers)
                    yield from self.collective("reduce", None)
                    self.held = repr((self.step, added))
                    if is_equal_vote((yield from self.collective("vote", self.held))):
                        return self.held
                    raise _Over
                case Apply():
                    return self.held
                case Wait():
                    continue
                case ToGate():
                    return None
                case Rejoin(why):
                    self.tell("leave")
                    raise _Gone(why)
                case other:
                    raise LawBroken(f"{self.name} at {self.step}: {other}; {headers}")

    def header(self) -> Header:
        assert self.view is not None
        announced = self.view.generation in self.announced
        weights, done = str(hash(tuple(self.history))), tuple(self.done)
        return Header(
            self.name, self.step, done, self.had, self.held, self.kept,
            pace=MemberPace(self.rate), announced=announced, weights=weights,
        )  # fmt: skip

    def collective(self, kind: str, payload: Any) -> Generator[None, None, list[Any]]:
        self.stage = kind
        assert self.group is not None
        group, number = self.group, self.collectives
        self.collectives += 1
        op = group.enter(number, self.name, kind, payload)
        names = group.view.names
        while True:
            yield
            self.check()
            complete = len(op) == len(names)
            cut = self.swarm.is_cut(names)
            fails = cut or bool(group.hung_up)
            lucky = not fails or self.swarm.dice.random() < 0.5
            if complete and lucky and not (kind == "form" and cut):
                return [op[name][1] for name in names]
            if fails:
                raise _Over
