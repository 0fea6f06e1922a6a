"""Whatever dies, comes, freezes or is cut off, and whenever: the laws of a swarm.

`paper_swarm.py` looks at every commit: each lane of each step is in it once, nobody applies another
one, and whoever lives has applied them all in their order. At the end nothing dies any more, and
the swarm has to go on.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.paper_swarm import PaperPeer, PaperSwarm
from support.products import examples

from trainers.elastic.peer.step_log import Era, steps_that_count

MOST_PEERS = 6


class SwarmMachine(RuleBasedStateMachine):
    """Peers with one anchor, which may die too."""

    two_anchors = False

    @initialize(
        seed=st.integers(0, 2**32),
        lanes=st.sampled_from([1, 3, 5, 8]),
        peers=st.integers(1, 4),
        least=st.sampled_from([1, 1, 2, 3]),
        last=st.sampled_from([4, 9, 10**6]),
    )
    def begins(self, seed: int, lanes: int, peers: int, least: int, last: int) -> None:
        self.swarm = PaperSwarm(seed, lanes, least, last, self.two_anchors)
        for _ in range(peers):
            self.swarm.come()

    def any_peer(self, number: int) -> PaperPeer:
        awake = self.swarm.awake()
        return awake[number % len(awake)]

    @rule(times=st.sampled_from([1, 5, 20, 60, 150]))
    def something_happens(self, times: int) -> None:
        self.swarm.something_happens(times)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.1]))
    def time_passes(self, seconds: float) -> None:
        self.swarm.time_passes(seconds)

    @precondition(lambda self: len(self.swarm.awake()) < MOST_PEERS)
    @rule()
    def a_peer_comes(self) -> None:
        self.swarm.come()

    @precondition(lambda self: len(self.swarm.awake()) > 1)
    @rule(number=st.integers(0, MOST_PEERS), silently=st.booleans())
    def a_peer_dies(self, number: int, silently: bool) -> None:
        self.swarm.kill(self.any_peer(number), silently=silently)

    @precondition(lambda self: len(self.swarm.awake()) > 1)
    @rule(number=st.integers(0, MOST_PEERS))
    def a_peer_freezes(self, number: int) -> None:
        self.any_peer(number).frozen = True

    @rule()
    def frozen_peers_wake_up(self) -> None:
        self.swarm.wake_up()

    @rule()
    def the_anchor_dies(self) -> None:
        self.swarm.anchor_dies()

    @invariant()
    def nothing_beyond_the_last_step(self) -> None:
        assert all(peer.step <= self.swarm.last for peer in self.swarm.peers.values())

    def teardown(self) -> None:
        if hasattr(self, "swarm"):
            self.swarm.wake_up()
            self.swarm.goes_on()


class CutLinkMachine(SwarmMachine):
    """Two living members may be unable to reach each other, for ever."""

    @precondition(lambda self: len(self.swarm.awake()) > 1)
    @rule(number=st.integers(0, MOST_PEERS))
    def a_link_is_cut(self, number: int) -> None:
        one, other = self.any_peer(number), self.any_peer(number + 1)
        self.swarm.cuts.add(frozenset((one.name, other.name)))


class TwoAnchorsMachine(SwarmMachine):
    """Peers may be cut off from the first anchor, and find the second one. Only one side may train:
    `paper_swarm.py` keeps one list of commits for both."""

    two_anchors = True

    @precondition(lambda self: self.swarm.awake())
    @rule(number=st.integers(0, MOST_PEERS))
    def a_peer_is_cut_off(self, number: int) -> None:
        self.swarm.move(self.any_peer(number))

    def teardown(self) -> None:
        if hasattr(self, "swarm"):
            self.swarm.wake_up()
            self.swarm.settle(60)


FEW = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestOneAnchor = SwarmMachine.TestCase
TestOneAnchor.settings = FEW
TestCutLinks = CutLinkMachine.TestCase
TestCutLinks.settings = FEW
TestTwoAnchors = TwoAnchorsMachine.TestCase
TestTwoAnchors.settings = FEW


Steps = list[tuple[str, int]]


@st.composite
def some_lives(draw: st.DrawFn) -> tuple[list[Era], dict[str, int], Steps]:
    """Return the eras, how far each came, and the steps that the last one was made of."""
    eras: list[Era] = []
    ends: dict[str, int] = {}
    made: dict[str, Steps] = {}
    for number in range(1, draw(st.integers(1, 6)) + 1):
        name = draw(st.text("ab", min_size=1, max_size=2)) + str(number)
        parent = draw(st.sampled_from([None, *eras]))
        if parent is None:
            era, before = Era(name, number), Steps()
        else:
            step = draw(st.integers(parent.step, ends[parent.id]))
            era, before = Era(name, number, parent.id, step), made[parent.id][:step]
        ends[name] = era.step + draw(st.integers(0, 5))
        made[name] = before + [(name, step) for step in range(era.step, ends[name])]
        eras.append(era)
    return eras, ends, made[eras[-1].id]


@given(some_lives(), st.randoms())
@settings(max_examples=examples(200), deadline=None)
def test_just_the_steps_that_the_last_life_is_made_of_count(
    lives: tuple[list[Era], dict[str, int], Steps], dice: object
) -> None:
    eras, ends, made = lives
    shuffled = list(eras)
    dice.shuffle(shuffled)  # pyright: ignore[reportAttributeAccessIssue]
    counts = steps_that_count([*shuffled, *eras])
    logged = [(era.id, step) for era in eras for step in range(era.step, ends[era.id])]
    counted = [(name, step) for name, step in logged if step < counts.get(name, 0)]
    assert sorted(counted, key=lambda one: one[1]) == made
