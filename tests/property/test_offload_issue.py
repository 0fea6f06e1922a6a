"""Which node is enqueued when, judged by a model, and where a step is cut for the host.

The model knows nothing but the edges: streams take their nodes in the order in which they were
enqueued, a node begins when the events that it waits for are done. `known` is what the host has
seen to be complete.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st
from support.products import examples

from offload.planning.cuts import Piece, cut_by_host
from offload.planning.issue import Chart, Issue, Issued

STREAMS = ("compute", "h2d", "d2h")
HOST = ("host",)


@dataclass
class Case:
    lanes: list[str]
    deps: list[list[int]]
    depth: int
    workers: int
    seed: int
    shuffled: bool

    @property
    def successors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.deps]
        for node, before in enumerate(self.deps):
            for dep in before:
                found[dep].append(node)
        return found

    def issue(self) -> tuple[Issue, list[int]]:
        rank = list(range(len(self.deps)))
        if self.shuffled:
            random.Random(self.seed).shuffle(rank)
        chart = Chart.from_lanes(self.lanes, self.successors, HOST)
        return Issue(chart, self.depth, dict.fromkeys(HOST, self.workers), rank), rank


@st.composite
def cases(draw: st.DrawFn, host: bool = True) -> Case:
    count = draw(st.integers(1, 40))
    lanes = draw(
        st.lists(st.sampled_from(STREAMS + (HOST if host else ())), min_size=count, max_size=count)
    )
    rng = random.Random(draw(st.integers(0, 2**32)))
    near = rng.choice((2, 8, 40))
    deps = [
        sorted({rng.randrange(max(0, n - near), n) for _ in range(rng.choice((0, 1, 1, 2, 3)))})
        if n
        else []
        for n in range(count)
    ]
    return Case(
        lanes,
        deps,
        draw(st.integers(1, 8)),
        draw(st.integers(1, 3)),
        draw(st.integers(0, 2**32)),
        draw(st.booleans()),
    )


@dataclass
class Model:
    """A device of any speed, and what the host knows of it."""

    case: Case
    rng: random.Random
    queues: dict[str, list[Issued]] = field(default_factory=dict)
    issued: list[int] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    known: set[int] = field(default_factory=set)
    host: list[int] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    before: dict[int, set[int]] = field(default_factory=dict)
    """Of every node: all that is complete when it begins, whatever the device does."""

    def on_host(self, node: int) -> bool:
        return self.case.lanes[node] in HOST

    def take(self, item: Issued) -> None:
        """The host enqueues it: is it allowed, and is it safe?"""
        case, node = self.case, item.node
        assert node not in self.issued
        for dep in case.deps[node]:
            if self.on_host(node) or self.on_host(dep):
                assert dep in self.known
            else:
                assert dep in self.issued
        self.issued.append(node)
        if self.on_host(node):
            assert not item.waits and not item.mark
            self.host.append(node)
            assert sum(case.lanes[n] == case.lanes[node] for n in self.host) <= case.workers
            return
        queue = self.queues.setdefault(case.lanes[node], [])
        assert (
            alone(case, {*self.issued} - {node})
            or len([i for i in queue if i.node not in self.known]) < case.depth
        )
        # What surely comes before: what the host knew, the stream, what the events say.
        sure = set(self.known)
        for other in [*([queue[-1].node] if queue else []), *item.waits]:
            sure |= self.before[other] | {other}
        assert set(case.deps[node]) <= sure
        for wait in item.waits:
            assert wait in self.marked and case.lanes[wait] != case.lanes[node]
            rest = set(self.known)
            for other in [*([queue[-1].node] if queue else []), *item.waits]:
                rest |= self.before[other] | {other} if other != wait else set()
            assert wait not in rest, "a wait that says nothing new"
        self.before[node] = sure
        if item.mark:
            self.marked.add(node)
        queue.append(item)

    def runnable(self) -> list[int]:
        found = [n for n in self.host if n not in self.done]
        for queue in self.queues.values():
            head = next((i for i in queue if i.node not in self.done), None)
            if head is not None and self.done.issuperset(head.waits):
                found.append(head.node)
        return found

    def run_one(self) -> None:
        node = self.rng.choice(self.runnable())
        assert self.done.issuperset(self.case.deps[node])
        self.done.add(node)

    def learn(self, issue: Issue) -> bool:
        """The host asks for the next event of every stream; True: it has learnt something."""
        told = [n for n in issue.marks() if n in self.done]
        told += [n for n in self.host if n in self.done]
        assert self.marked.issuperset(issue.marks())
        self.rng.shuffle(told)
        for node in told[: self.rng.choice((1, 3))]:
            issue.complete(node)
            if self.on_host(node):
                self.host.remove(node)
                self.known.add(node)
            else:
                queue = [i.node for i in self.queues[self.case.lanes[node]]]
                self.known.update(queue[: queue.index(node) + 1])
        return bool(told)


def alone(case: Case, issued: set[int]) -> bool:
    """All that are left are of one stream."""
    left = {lane for node, lane in enumerate(case.lanes) if node not in issued}
    return bool(issued) and len(left) == 1 and left <= {*STREAMS}


def best(case: Case, model: Model, rank: Sequence[int]) -> int | None:
    """By the rule as it is written: those of complete deps first, then by rank."""
    found: list[tuple[bool, int, int]] = []
    for node, deps in enumerate(case.deps):
        lane, host = case.lanes[node], model.on_host(node)
        busy = [n for n in model.issued if case.lanes[n] == lane and n not in model.known]
        full = len(busy) >= (case.workers if host else case.depth)
        if node in model.issued or (full and not alone(case, {*model.issued})):
            continue
        ready = model.known.issuperset(deps)
        firm = [d for d in deps if host or model.on_host(d)]
        if ready or (model.known.issuperset(firm) and set(deps) <= set(model.issued)):
            found.append((not ready, rank[node], node))
    return min(found)[2] if found else None


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.integers(0, 2**32))
def test_every_order_of_the_device_is_safe_and_comes_to_its_end(case: Case, seed: int) -> None:
    issue, rank = case.issue()
    model = Model(case, random.Random(seed))
    for _ in range(10 * len(case.deps) + 10):
        if len(model.done) == len(case.deps):
            break
        if model.rng.random() < 0.7:
            wanted = best(case, model, rank)
            item = issue.next()
            assert (item.node if item else None) == wanted
            if item is not None:
                model.take(item)
                continue
        if not model.learn(issue):
            assert model.runnable() or issue.unissued, "the host and the device wait for each other"
            if model.runnable():
                model.run_one()
    assert sorted(model.issued) == list(range(len(case.deps)))
    while model.learn(issue):
        pass
    assert not issue.unissued and len(model.done) == len(case.deps)


@settings(max_examples=examples(200), deadline=None)
@given(cases(host=False), st.integers(0, 2**32))
def test_without_a_depth_all_is_enqueued_at_once_and_the_events_alone_keep_every_edge(
    case: Case, seed: int
) -> None:
    case.depth = len(case.deps) + 1
    issue = Issue(Chart.from_lanes(case.lanes, case.successors, HOST), None)
    model = Model(case, random.Random(seed))
    while (item := issue.next()) is not None:
        model.take(item)
    assert not issue.unissued
    while model.runnable():
        model.run_one()
    assert len(model.done) == len(case.deps)


def test_a_long_stretch_of_one_stream_has_a_mark_now_and_then() -> None:
    # The last node is of another stream: until then the host must know how far the first is.
    chain = [[n + 1] for n in range(99)] + [[]]
    issue = Issue(Chart.from_lanes(["compute"] * 99 + ["d2h"], chain, ()), 6)
    marks = []
    while issue.unissued:
        while (item := issue.next()) is not None:
            marks += [item.node] if item.mark else []
        if issue.unissued:
            issue.complete(issue.marks()[0])
    assert marks == [*range(2, 99, 3)]


def test_what_is_left_of_one_stream_is_enqueued_without_a_look_at_the_device() -> None:
    chain = [[n + 1] for n in range(99)] + [[]]
    issue = Issue(Chart.from_lanes(["h2d"] + ["compute"] * 99, chain, ()), 6)
    found = []
    while (item := issue.next()) is not None:
        found.append((item.node, item.mark))
    assert found == [(n, n == 0) for n in range(100)]


Graph = tuple[list[bool], list[list[int]]]


def pieces(captured: list[bool], deps: list[list[int]]) -> tuple[Piece, ...]:
    return cut_by_host([not here for here in captured], deps)


@st.composite
def graphs(draw: st.DrawFn, most: int = 30) -> Graph:
    count = draw(st.integers(0, most))
    captured = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    deps = [
        sorted(draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else []
        for number in range(count)
    ]
    return captured, deps


@given(graphs())
def test_every_dependency_goes_within_a_piece_or_to_a_later_one(graph: Graph) -> None:
    captured, deps = graph
    cut = pieces(captured, deps)
    where = {node: at for at, piece in enumerate(cut) for node in piece.nodes}
    assert sorted(where) == list(range(len(captured)))
    assert sum(len(piece.nodes) for piece in cut) == len(captured)
    for node, before in enumerate(deps):
        assert cut[where[node]].on_host != captured[node]
        assert all(where[other] <= where[node] for other in before)


@given(graphs())
def test_a_piece_keeps_the_plans_order(graph: Graph) -> None:
    for piece in pieces(*graph):
        assert list(piece.nodes) == sorted(piece.nodes)


@given(graphs(most=7))
def test_no_other_cut_has_fewer_captured_pieces(graph: Graph) -> None:
    captured, deps = graph
    ours = sum(not piece.on_host for piece in pieces(captured, deps))

    def legal(turns: tuple[int, ...]) -> bool:
        """Node n is in turn turns[n]; the host acts before the captured ones of a turn."""
        return all(
            turns[other] < turns[node] or (turns[other] == turns[node] and fits(other, node))
            for node, before in enumerate(deps)
            for other in before
        )

    def fits(first: int, then: int) -> bool:
        return captured[first] == captured[then] or captured[then]

    fewest = next(
        used
        for used in range(len(captured) + 1)
        if any(
            legal(turns) and len({t for t, c in zip(turns, captured, strict=True) if c}) <= used
            for turns in product(range(used + 1), repeat=len(captured))
        )
    )
    assert ours == fewest
