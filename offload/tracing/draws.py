"""Random numbers of a trace: which op draws from which generator, and whether that was reseeded.

    op      dropout ......... dropout ........... end of the step
    clock   moved by a draw   unchanged? moved     unchanged? else somebody seeded in between

Nothing is drawn while a step is traced. Instead the clock moves the real generator a little at
every draw, and puts it back when the trace is over. A step for a GPU draws from that GPU's
generator; on a machine without CUDA the clock moves the CPU's generator in its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.kernels import CPU
from offload.program.trees import leaves
from offload.torch_seams import disable_current_modes, schema_of


class Clock:
    """Moves a generator at every draw of the trace, as the draw itself would. So it notices when
    code seeds it or sets it back in between, as checkpointing does before it recomputes."""

    def __init__(self, device: torch.device = CPU) -> None:
        self._known: dict[int, tuple[torch.Generator, torch.Tensor, torch.Tensor]] = {}
        self._default = default_generator(device)
        """The generator of an op that was given none."""
        for generator in (torch.default_generator, self._default):
            self.check(generator, "")

    def check(self, generator: torch.Generator, where: str) -> None:
        """Raise `CaptureError` unless the generator stands where the last draw left it."""
        with disable_current_modes():
            now = generator.get_state()
            _, _, expected = self._known.setdefault(id(generator), (generator, now, now))
            if not torch.equal(now, expected):
                raise CaptureError(
                    f"{where}: the step sets the state of the random numbers (by a seed, or by"
                    " checkpointing over a dropout), and a captured step can only draw. Seed"
                    " outside of the step; let the plan recompute instead of checkpointing"
                )

    def check_all(self, where: str) -> None:
        """Check all generators that the step may have touched."""
        for generator, _, _ in list(self._known.values()):
            self.check(generator, where)

    def draw(self, args: Any, kwargs: Any, where: str) -> None:
        """Note that an op with these arguments draws."""
        given = [g for g in leaves((args, kwargs)) if isinstance(g, torch.Generator)]
        generator = given[0] if given else self._default
        self.check(generator, where)
        with disable_current_modes():
            torch.empty(1, device=generator.device).uniform_(generator=generator)
            _, start, _ = self._known[id(generator)]
            self._known[id(generator)] = (generator, start, generator.get_state())

    def restore(self) -> None:
        with disable_current_modes():
            for generator, start, _ in self._known.values():
                generator.set_state(start)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that an op on this device draws from by default."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()  # this makes the generators
    return torch.cuda.default_generators[device.index or 0]


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers. Attention without dropout has the tag but does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    chance = next((a for a in schema_of(func).arguments if a.name == "dropout_p"), None)
    if chance is None:
        return True
    given = {a.name: value for a, value in arguments(func, args, kwargs)}
    return given.get("dropout_p", chance.default_value) != 0


def arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Each argument of a call with its entry in the op's schema."""
    for position, argument in enumerate(schema_of(func).arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
