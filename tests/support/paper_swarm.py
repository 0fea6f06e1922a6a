"""A swarm on paper: real `decide`, `deal` and `Roster`, made-up lanes, wires and deaths.

Every commit is looked at as it is applied. A `LawBroken` names what must never happen. Peers,
groups and anchors are in paper_peers.py.
"""

import random
from collections.abc import Sequence

from support.paper_peers import LawBroken, PaperAnchor, PaperGroup, PaperPeer

from trainers.elastic.deciding.header import Header
from trainers.elastic.deciding.view import (
    Form,
    View,
)


class PaperSwarm:
    """All peers and anchors. `something_happens` lets one of them go on."""

    def __init__(
        self,
        seed: int,
        lanes: int = 5,
        min_peers: int = 1,
        last: int = 10**6,
        two_anchors: bool = False,
    ) -> None:
        self.dice = random.Random(seed)
        self.lanes = range(lanes)
        self.min_peers = min_peers
        self.last = last
        self.two_anchors = two_anchors
        self.heartbeat = 2.0
        self.now = 100.0
        self.peers: dict[str, PaperPeer] = {}
        self.groups: dict[tuple[int, tuple[str, ...]], PaperGroup] = {}
        self.anchors = {0: PaperAnchor(self, 0, standby=False)}
        if two_anchors:
            self.anchors[1] = PaperAnchor(self, 1, standby=True)
        self.cuts: set[frozenset[str]] = set()
        self.commits: list[str] = []
        self.generations = 0
        self.runs = 0

    # ---- what is looked at ----------------------------------------------------------------------

    def applied(self, peer: PaperPeer) -> None:
        if peer.run != self.runs:
            return
        step = peer.step - 1
        if step > len(self.commits):
            raise LawBroken(f"{peer.name} applied step {step} and step {step - 1} is nobody's")
        if step == len(self.commits):
            self.commits.append(peer.history[-1])
        if peer.history != self.commits[: peer.step]:
            raise LawBroken(f"step {step}: {peer.history[-1]} beside {self.commits[step]}")

    def about_to_reduce(self, headers: Sequence[Header]) -> None:
        lanes = sorted(lane for header in headers for lane in header.done)
        if lanes != [*self.lanes]:
            raise LawBroken(f"lanes {lanes} are reduced, and the step has {self.lanes}")

    def begun_anew(self) -> None:
        """Nobody had the state: the first steps are made once more. Who was frozen is left out and
        ends here: anchors that have died since cannot tell it."""
        members = [peer for peer in self.trainers() if peer.view is not None]
        left = [p for p in members if not p.frozen and p.anchor is self.anchors[p.side]]
        if left and not any(p.expelled for p in left):
            raise LawBroken(f"a run begins beside {[p.name for p in left]}\n{self}")
        for peer in members:
            self.kill(peer, silently=True)
        self.commits = []
        self.runs += 1

    def formed(self, form: Form) -> None:
        self.generations += 1
        if not form.view.members:
            raise LawBroken("a generation of nobody")

    def is_cut(self, names: Sequence[str]) -> bool:
        sides = {self.peers[name].side for name in names}
        return len(sides) > 1 or any(cut <= {*names} for cut in self.cuts)

    def group(self, view: View) -> PaperGroup:
        return self.groups.setdefault((view.generation, view.names), PaperGroup(view))

    # ---- what happens ---------------------------------------------------------------------------

    def awake(self) -> list[PaperPeer]:
        return [peer for peer in self.peers.values() if peer.alive and not peer.frozen]

    def come(self) -> PaperPeer:
        name = f"p{len(self.peers)}"
        self.peers[name] = PaperPeer(self, name)
        return self.peers[name]

    def connect_all(self) -> None:
        for peer in self.awake():
            self.connect(peer)

    def connect(self, peer: PaperPeer) -> None:
        anchor = self.anchors[peer.side]
        if peer.anchor is not anchor:
            peer.anchor = anchor
            anchor.connect(peer)

    def something_happens(self, times: int = 1) -> None:
        for _ in range(times):
            if not (awake := self.awake()):
                return
            peer, kind = self.dice.choice(awake), self.dice.randrange(8)
            anchor = peer.anchor
            if anchor is None or anchor is not self.anchors[peer.side]:
                if kind < 4:
                    self.connect(peer)
            elif kind == 0 and anchor.up.get(peer.name):
                anchor.deliver(peer.name)
            elif kind == 1 and anchor.down.get(peer.name):
                peer.hear()
            if kind > 1:
                peer.step_on()
            for name in [n for a in self.anchors.values() for n in a.up]:
                if not self.peers[name].alive and self.dice.random() < 0.05:
                    anchor = self.peers[name].anchor
                    if anchor is not None and anchor.up.get(name):
                        anchor.deliver(name)

    def time_passes(self, seconds: float) -> None:
        self.connect_all()
        for anchor in self.anchors.values():
            anchor.hear_all()
        self.now += seconds
        for anchor in self.anchors.values():
            anchor.tick()

    def kill(self, peer: PaperPeer, *, silently: bool = False) -> None:
        if silently:
            peer.alive, peer.why = False, "silent"
            peer.hang_up()
            peer._life.close()
        else:
            peer.end("killed")

    def anchor_dies(self, side: int = 0) -> None:
        standby = self.two_anchors
        self.anchors[side] = PaperAnchor(self, side, standby=standby)

    def move(self, peer: PaperPeer) -> None:
        """The peer is cut off from the first anchor and from those who are with it."""
        if peer.anchor is not None:
            peer.anchor.up.pop(peer.name, None)
            peer.anchor.down.pop(peer.name, None)
        peer.side, peer.anchor = 1, None

    def settle(self, rounds: int = 150) -> None:
        """Nothing dies any more, and everybody has its turn again and again."""
        for _ in range(rounds):
            self.time_passes(0.1)
            for anchor in self.anchors.values():
                for name in [*anchor.up]:
                    while anchor.up.get(name):
                        anchor.deliver(name)
            for _ in range(6):
                for peer in self.awake():
                    while peer.anchor is not None and peer.anchor.down.get(peer.name):
                        peer.hear()
                    peer.step_on()

    def wake_up(self) -> None:
        for peer in self.peers.values():
            peer.frozen = False

    def goes_on(self) -> None:
        """Settle, and see that whoever has the state trains or has ended, and newcomers have it."""
        had = self.trainers()
        before = max((peer.step for peer in had), default=0)
        self.settle(400 if self.cuts else 200)
        here = [peer for peer in self.peers.values() if peer.alive]
        if not had or len(here) < self.min_peers:
            return
        if self.last > len(self.commits) < before + 2:
            raise LawBroken(f"nobody comes beyond step {before}\n{self}")
        if waiting := [peer.name for peer in here if not peer.trains]:
            raise LawBroken(f"{waiting} wait for ever\n{self}")

    def trainers(self) -> list[PaperPeer]:
        """Who has the state and has not ended."""
        return [peer for peer in self.peers.values() if peer.alive and peer.trains]

    def __str__(self) -> str:
        told = [
            f"{p.name}: step {p.step} {p.stage} {'' if p.alive else f'gone ({p.why})'}"
            f" side {p.side} {'frozen' if p.frozen else ''}"
            f" view {p.view and (p.view.generation, p.view.names)}"
            for p in self.peers.values()
        ]
        rosters = [
            f"anchor {a.side}: {a.roster.present}"
            f" {[(n, p.standing.name, p.at_step) for n, p in a.roster.peers.items()]}"
            f" waits for {a.roster.waits_for()!r} {a.roster.electorate} {a.roster.awaited}"
            for a in self.anchors.values()
        ]
        return "\n".join([*told, *rosters])
