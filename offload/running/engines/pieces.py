"""Runs a step as a list of pieces. Between two of them nothing of the step runs.

one piece     F1 F2 B2 B1 U1                    the usual step: everything may overlap
three         F1 F2 | B2 B1 | U1                others may use the device at each bar
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offload.running.engines.work import Engine, LaneRecord, Record, StepWork


@dataclass(frozen=True, slots=True, eq=False)
class WorkPiece:
    """Nodes of a step between two cuts, as separate work."""

    nodes: Sequence[int]
    """Their numbers in the step."""
    work: StepWork


def whole(work: StepWork) -> tuple[WorkPiece, ...]:
    """The step in one piece."""
    return (WorkPiece(range(len(work.runs)), work),)


def run_pieces(engine: Engine, pieces: Sequence[WorkPiece], record: Record) -> None:
    for piece in pieces:
        _run_piece(engine, piece, record)


def _run_piece(engine: Engine, piece: WorkPiece, record: Record) -> None:
    if isinstance(piece.nodes, range):  # numbered as in the step
        engine.run(piece.work, record)
        return
    own = Record()
    try:
        engine.run(piece.work, own)
    finally:
        _add(record, own, piece.nodes)


def _add(record: Record, own: Record, nodes: Sequence[int]) -> None:
    """Add the record of a piece to that of its step, with the step's numbers."""
    for ran in own.lanes:
        found = [nodes[node] for node in ran.nodes]
        record.lanes.append(LaneRecord(ran.name, found, ran.starts, ran.ends))
    record.failed = None if own.failed is None else nodes[own.failed]
    record.under_way = [nodes[node] for node in own.under_way]
    record.timed = record.timed and own.timed
    record.waited += own.waited
