"""The members of a generation, in the order in which they came: a member's rank is its place.

A generation is the time between two changes of membership. Its members have one gloo group, and
none of them joins or leaves it: who comes, goes or dies ends the generation.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One peer of a generation."""

    name: str
    """It is unique in the swarm, also among peers that have left."""
    host: str
    """The address at which other peers reach it."""
    port: int
    """Where it gives its state to peers that join."""


@dataclass(frozen=True, slots=True)
class View:
    """A generation: its number and its members."""

    generation: int
    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names by rank."""
        return tuple(member.name for member in self.members)

    def rank(self, name: str) -> int:
        """The rank of a member; raise ValueError for somebody else."""
        return self.names.index(name)
