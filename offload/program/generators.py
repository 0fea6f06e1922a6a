"""The generators that a graph's tasks draw from: the default one, and those that they are given.

torch.randn(4, generator=mine)    an argument of the call: each run draws from `mine` itself
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offload.errors import StepError
from offload.program.kernels import CPU, Call, Calls
from offload.torch_seams import generator_key


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that an op on this device draws from by default."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()  # this makes the generators
    return torch.cuda.default_generators[device.index or 0]


def generators_in(call: Call) -> list[torch.Generator]:
    """The generators among a call's arguments; there is one at most."""
    return [arg for arg in (*call.args, *call.kwargs.values()) if isinstance(arg, torch.Generator)]


def generators_of(graph: Any) -> tuple[torch.Generator, ...]:
    """The generators that the tasks of a TaskGraph are given, each once."""
    generators: dict[int, torch.Generator] = {}
    for task in graph.tasks:
        for call in task.kernel.calls if isinstance(task.kernel, Call | Calls) else ():
            generators |= {generator_key(g): g for g in generators_in(call)}
    return tuple(generators.values())


@dataclass(slots=True, eq=False)
class DrawState:
    """A generator that takes the place of a device's default one for a draw: that of a micro-batch,
    or the default one of the device that the step was captured on.

        default generator   ....... |its state in| dropout |its state out| .......

    Most ops draw from the default generator and can be given no other. The bits are those of an
    eager micro-batch before which the default generator was seeded in the same way."""

    generator: torch.Generator
    device: torch.device
    _others: torch.Tensor | None = field(default=None, repr=False)

    def enter(self, generator: torch.Generator, device: torch.device) -> None:
        default = default_generator(device)
        self._others = default.get_state()
        default.set_state(generator.get_state())

    def leave(self, generator: torch.Generator, device: torch.device) -> None:
        default = default_generator(device)
        assert self._others is not None
        generator.set_state(default.get_state())
        default.set_state(self._others)

    def wrap(self, calls: Sequence[Call]) -> Calls:
        """These calls, which draw from this generator. It is an argument, so that `generators_of`
        finds it, and so is the device, so that a task on another one has that one."""
        enter = Call(self.enter, (self.generator, self.device), allocations=())
        leave = Call(self.leave, (self.generator, self.device), allocations=())
        return Calls((enter, *calls, leave))


@dataclass(slots=True, eq=False)
class StepDraws:
    """The draws of a step on several devices, in any order: the place of each in the sequence of
    the first device's generator is known beforehand.

        in program order    [ a ][ b ][ c ]        the generator is at the end from the first on
        device 0             a .......... c        each task draws from its own place on
        device 1                  b
    """

    device: torch.device
    """The first device."""
    total: int
    """How far the step moves the generator on."""
    seed: int = 0
    offset: int = 0
    _others: tuple[int, int] = (0, 0)

    def begin(self, generator: torch.Generator) -> None:
        self.seed, self.offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(self.offset + self.total)

    def enter(self, start: int, device: torch.device) -> None:
        default = default_generator(device)
        self._others = default.initial_seed(), default.get_offset()
        default.manual_seed(self.seed).set_offset(self.offset + start)

    def leave(self, end: int, device: torch.device) -> None:
        default = default_generator(device)
        drawn = default.get_offset() - self.offset
        seed, offset = self._others
        default.manual_seed(seed).set_offset(offset)
        if drawn != end:
            raise StepError(
                f"a task on {device} moved the random generator to {drawn} from the step's begin,"
                f" and {end} was found when its kernels were measured. Other devices rely on that"
                " when they draw: train with devices=1"
            )

    def wrap(self, calls: Sequence[Call], start: int, end: int, *, begins: bool) -> Calls:
        """These calls, which draw what lies from start to end. `begins`: they are the first."""
        begin = Call(self.begin, (default_generator(self.device),), allocations=())
        enter = Call(self.enter, (start, self.device), allocations=())
        leave = Call(self.leave, (end, self.device), allocations=())
        return Calls((*([begin] if begins else []), enter, *calls, leave))


def draws_at_a_place(calls: Sequence[Call]) -> bool:
    """Whether a `StepDraws` says what these calls draw."""
    return any(isinstance(getattr(call.op, "__self__", None), StepDraws) for call in calls)


def draw_elsewhere(
    calls: Sequence[Call], first: torch.device, here: torch.device
) -> Sequence[Call]:
    """These calls, which on this device draw what they would draw on the first one."""
    if draws_at_a_place(calls):
        return calls
    made: list[Call] = []
    for call in calls:
        own = [g for g in generators_in(call) if g.device not in (here, CPU)]
        if not own or isinstance(getattr(call.op, "__self__", None), DrawState):
            made.append(call)
            continue
        given = tuple(None if arg is own[0] else arg for arg in call.args)
        by_name = {name: None if arg is own[0] else arg for name, arg in call.kwargs.items()}
        drawn = replace(call, args=given, kwargs=by_name)
        made += DrawState(own[0], here).wrap([drawn]).calls
    return DrawState(default_generator(first), here).wrap(made).calls
