"""Random numbers of a trace: which op draws, from which generator, and where that stands.

    op      dropout ......... dropout ........... end of the step
    clock   moved by a draw   as it was left? moved   as it was left?      else: seeded in between

Nothing is drawn while a step is traced. The clock moves the real generator instead, a little at
every draw, and it stands where it stood when the trace is over. A step for a GPU draws from that
GPU's generator; where there is no CUDA to ask, the CPU's keeps the time in its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.errors import CaptureError
from offload.kernels import CPU
from offload.trees import leaves


class Clock:
    """Moves a generator at every draw of the trace, as the draw itself would: one that was seeded
    or set back in between, as checkpointing does before it recomputes, does not go unseen."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._known: dict[int, tuple[torch.Generator, torch.Tensor, torch.Tensor]] = {}
        self._default = default_generator(device)
        """What an op draws from that was given none."""
        for generator in (torch.default_generator, self._default):
            self.check(generator, "")

    def check(self, generator: torch.Generator, where: str) -> None:
        """Raise `CaptureError` unless it stands where the last draw left it."""
        with _disable_current_modes():
            now = generator.get_state()
            _, _, expected = self._known.setdefault(id(generator), (generator, now, now))
            if not torch.equal(now, expected):
                raise CaptureError(
                    f"{where}: the state of the random numbers is set within the step (by a seed,"
                    " or by checkpointing over a dropout), and a captured step only draws on."
                    " Seed outside of it; let the plan recompute instead of checkpointing"
                )

    def check_all(self, where: str) -> None:
        """Those that the step may have touched."""
        for generator, _, _ in list(self._known.values()):
            self.check(generator, where)

    def draw(self, args: Any, kwargs: Any, where: str) -> None:
        """An op draws that was given these."""
        given = [g for g in leaves((args, kwargs)) if isinstance(g, torch.Generator)]
        generator = given[0] if given else self._default
        self.check(generator, where)
        with _disable_current_modes():
            torch.empty(1, device=generator.device).uniform_(generator=generator)
            _, start, _ = self._known[id(generator)]
            self._known[id(generator)] = (generator, start, generator.get_state())

    def restore(self) -> None:
        with _disable_current_modes():
            for generator, start, _ in self._known.values():
                generator.set_state(start)


def default_generator(device: torch.device) -> torch.Generator:
    """What an op on this device draws from."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()  # the generators are made there
    return torch.cuda.default_generators[device.index or 0]


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers: attention without dropout has the tag, and does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    chance = next((a for a in func._schema.arguments if a.name == "dropout_p"), None)
    if chance is None:
        return True
    given = {a.name: value for a, value in arguments(func, args, kwargs)}
    return given.get("dropout_p", chance.default_value) != 0


def arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """What an op was given, beside what its schema says of it."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
