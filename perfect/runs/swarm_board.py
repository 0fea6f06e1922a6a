"""Who is in the swarm now, and what each of them does: a table on a terminal, words elsewhere.

    generation 3   lanes   samples/s   sent        state
    a                  5         812   1.2 GiB     writes
    b                  3         540   1.2 GiB     this peer

`samples/s` are those of the latest step, while the member computed. `sent` are bytes of sums that
it has given to other members since it joined.
"""

from collections.abc import Sequence

import lightning as L
from rich import box
from rich.table import Table
from rich.text import Text

from perfect.report.words import size
from trainers.elastic.deciding.peer_figures import PeerFigures
from trainers.elastic.deciding.view import View
from trainers.elastic.peer.elastic_strategy import ElasticStrategy


def swarm_words(trainer: L.Trainer) -> list[str]:
    """Return the generation and its members in words; nothing if the run is no swarm's."""
    swarm = trainer.strategy
    if not isinstance(swarm, ElasticStrategy):
        return []
    return ["coming in" if swarm.view is None else words_of(swarm.view, swarm.figures)]


def swarm_board(trainer: L.Trainer) -> Table | None:
    """Return the generation and its members as a table; None if this peer is in none."""
    swarm = trainer.strategy
    if not isinstance(swarm, ElasticStrategy) or swarm.view is None:
        return None
    return board_of(swarm.view, swarm.figures, swarm.global_rank)


def words_of(view: View, figures: Sequence[PeerFigures]) -> str:
    """Say it in a line."""
    members = "; ".join(
        f"{one.name} {one.lanes} lanes {one.samples_per_second:.0f} samples/s {size(one.sent)} sent"
        for one in _members(view, figures)
    )
    return f"generation {view.generation}: {members}"


def board_of(view: View, figures: Sequence[PeerFigures], own_rank: int) -> Table:
    """Say it in a row for each member."""
    table = Table(f"generation {view.generation}", box=box.SIMPLE, pad_edge=False)
    for head in ("lanes", "samples/s", "sent"):
        table.add_column(head, justify="right")
    table.add_column("state")
    for rank, one in enumerate(_members(view, figures)):
        said = {
            "writes": rank == 0,
            "this peer": rank == own_rank,
            "computes nothing": not one.lanes,
            "a change is announced": one.announced,
        }
        table.add_row(
            Text(one.name),
            str(one.lanes),
            f"{one.samples_per_second:.0f}",
            size(one.sent),
            ", ".join(words for words, is_so in said.items() if is_so),
        )
    return table


def _members(view: View, figures: Sequence[PeerFigures]) -> list[PeerFigures]:
    """The members of the generation, also those of whom nothing was heard yet."""
    known = {one.name: one for one in figures}
    return [known.get(name, PeerFigures(name, 0, 0, 0.0, 0)) for name in view.names]
