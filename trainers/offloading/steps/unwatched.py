"""Warns once of what a step reads and nobody can watch in every step."""

from lightning_utilities.core.rank_zero import rank_zero_warn

from offload.watching.state_reads import StateReads


class Unwatched:
    """The containers of one fit that are too large to be watched."""

    def __init__(self, who: str, found_by: str) -> None:
        """`who` does not watch them, and a change of them is `found_by`."""
        self._who = who
        self._found_by = found_by
        self._said: list[str] = []

    def say(self, reads: StateReads) -> None:
        new = [label for label in reads.too_large if label not in self._said]
        self._said += new
        if new:
            rank_zero_warn(
                f"{self._who} does not watch {', '.join(new)}, which the step reads: a change of it"
                f" is {self._found_by}. Keep it in a tensor"
            )
