"""Random numbers of a trace: which op draws from which generator, and whether that was reseeded.

    op      dropout ......... dropout ........... end of the step
    clock   moved by a draw   unchanged? moved     unchanged? else somebody seeded in between

Nothing is drawn while a step is traced. Instead the clock moves the real generator a little at
every draw, and puts it back when the trace is over. A step for a GPU draws from that GPU's
generator; on a machine without CUDA the clock moves the CPU's generator in its place. So it is with
every `torch.Generator` of the user that an op is given: the captured op gets it at every run.

The second trace begins with other seeds. So a step that seeds is found out even where it seeds what
was there already, and one that uses a seed or a state as a number does not do the same twice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.generators import default_generator
from offload.program.kernels import CPU
from offload.torch_seams import disable_current_modes, generator_key, schema_of

OTHER_SEED = 0x5DEECE66D5A5A5A5
"""The second trace has the first one's seeds with these bits turned over."""


class Clock:
    """Moves a generator at every draw of the trace, as the draw itself would. So it notices when
    code seeds it or sets it back in between, as checkpointing does before it recomputes."""

    def __init__(
        self, device: torch.device = CPU, generators: Iterable[torch.Generator] = ()
    ) -> None:
        """`generators`: those that the step can reach. Others are met at their first draw."""
        self._known: dict[int, tuple[torch.Generator, torch.Tensor, torch.Tensor]] = {}
        self._default = default_generator(device)
        """The generator of an op that was given none."""
        self._again = False
        """Whether this is the second trace."""
        for generator in (torch.default_generator, self._default, *generators):
            self.check(generator, "")

    def begin_again(self) -> None:
        """Begin the second trace, with other seeds than the first one had."""
        self._again = True
        with disable_current_modes():
            for key, (generator, start, _) in self._known.items():
                generator.manual_seed((generator.initial_seed() ^ OTHER_SEED) % (1 << 63))
                self._known[key] = (generator, start, generator.get_state())

    def check(self, generator: torch.Generator, where: str) -> None:
        """Raise `CaptureError` unless the generator stands where the last draw left it."""
        with disable_current_modes():
            now = generator.get_state()
            key = generator_key(generator)
            _, _, expected = self._known.setdefault(key, (generator, now, now))
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
        generator = given_generator(args, kwargs) or self._default
        key = generator_key(generator)
        if self._again and key not in self._known:
            raise CaptureError(
                f"{where}: the step draws from a torch.Generator that it makes itself, and a"
                " captured step makes none. Make it outside of the step"
            )
        self.check(generator, where)
        with disable_current_modes():
            torch.empty(1, device=generator.device).uniform_(generator=generator)
            _, start, _ = self._known[key]
            self._known[key] = (generator, start, generator.get_state())

    def restore(self) -> None:
        with disable_current_modes():
            for generator, start, _ in self._known.values():
                generator.set_state(start)


def given_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that an op is given."""
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator))
    return next(given, None)


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op draws random numbers. Attention without dropout has the tag but does not."""
    if given_generator(args, kwargs) is not None:
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    chance = next((a for a in schema_of(func).arguments if a.name == "dropout_p"), None)
    if chance is None:
        return True
    given = {a.name: value for a, value in arguments(func, args, kwargs)}
    return given.get("dropout_p", chance.default_value) != 0


def undrawn(given: Any) -> Any:
    """Arguments without a generator: some fakes take none, and none of them draws."""
    if isinstance(given, dict):
        return dict(zip(given, undrawn([*given.values()]), strict=True))
    return [None if isinstance(one, torch.Generator) else one for one in given]


def arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Each argument of a call with its entry in the op's schema."""
    for position, argument in enumerate(schema_of(func).arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
