"""Draws of one micro-batch from a generator of its own, in a graph that holds several.

    default generator   ....... |own state in| dropout |own state out| .......

Most ops draw from the default generator and can be given no other. So the state of the
micro-batch's own generator is put there for the draw, and is taken away again. The bits are those
of an eager micro-batch before which the default generator was seeded in the same way, whatever is
drawn between two of its draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from offload.program.generators import default_generator
from offload.program.kernels import Call, Calls


@dataclass(slots=True, eq=False)
class DrawState:
    """The generator of one micro-batch, which takes the place of the default one for a draw."""

    own: torch.Generator
    device: torch.device
    _others: torch.Tensor | None = field(default=None, repr=False)

    def enter(self, own: torch.Generator) -> None:
        default = default_generator(self.device)
        self._others = default.get_state()
        default.set_state(own.get_state())

    def leave(self, own: torch.Generator) -> None:
        default = default_generator(self.device)
        assert self._others is not None
        own.set_state(default.get_state())
        default.set_state(self._others)

    def around(self, calls: Sequence[Call]) -> Calls:
        """These calls, which draw from the micro-batch's own generator. It is an argument, so that
        `generators_of` finds it."""
        enter, leave = (Call(way, (self.own,), allocations=()) for way in (self.enter, self.leave))
        return Calls((enter, *calls, leave))
