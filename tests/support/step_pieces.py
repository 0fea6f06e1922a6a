"""A step of any work in pieces that are cut at given positions of its order."""

from collections.abc import Sequence
from itertools import pairwise

from offload.running.engines.pieces import WorkPiece
from offload.running.engines.work import StepWork


def cut(work: StepWork, positions: Sequence[int]) -> list[WorkPiece]:
    borders = sorted({0, len(work.runs), *positions})
    return [WorkPiece([*range(a, b)], work.part([*range(a, b)])) for a, b in pairwise(borders)]
