"""Where a step is cut for the host, against all ways to cut it."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from offload.planning.cuts import Piece, pieces_by_host

Graph = tuple[list[bool], list[list[int]]]


def pieces(captured: list[bool], deps: list[list[int]]) -> tuple[Piece, ...]:
    return pieces_by_host([not here for here in captured], deps)


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
