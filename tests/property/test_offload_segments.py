"""Where a step is cut for the host, against all ways to cut it."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from offload.engines.segments import segments

Graph = tuple[list[bool], list[list[int]]]


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
def test_every_dependency_goes_within_a_segment_or_to_a_later_one(graph: Graph) -> None:
    captured, deps = graph
    cut = segments(captured, deps)
    where = {node: at for at, segment in enumerate(cut) for node in segment.nodes}
    assert sorted(where) == list(range(len(captured)))
    assert sum(len(segment.nodes) for segment in cut) == len(captured)
    for node, before in enumerate(deps):
        assert cut[where[node]].captured == captured[node]
        assert all(where[other] <= where[node] for other in before)


@given(graphs())
def test_a_segment_keeps_the_plans_order(graph: Graph) -> None:
    for segment in segments(*graph):
        assert list(segment.nodes) == sorted(segment.nodes)


@given(graphs(most=7))
def test_no_other_cut_has_fewer_captured_segments(graph: Graph) -> None:
    captured, deps = graph
    ours = sum(segment.captured for segment in segments(captured, deps))

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
