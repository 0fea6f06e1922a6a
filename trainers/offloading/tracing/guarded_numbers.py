"""batch_idx and global_step in a step that branches on them: the questions that it asks are noted.

    traced at 7    (batch_idx + 1) % 4 == 0   asked, and answered True
    later          a graph serves every number of the trainer for which all answers are the same

Arithmetic with whole numbers gives another guarded number, a comparison asks a question. Every
other use asks for the number itself, so that the graph holds for it alone: to C a guarded number is
no int, and C asks for its `__index__`. The step is traced a second time with another number that
has the same answers, as a proof.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import (
    add,
    and_,
    eq,
    floordiv,
    ge,
    gt,
    le,
    lshift,
    lt,
    mod,
    mul,
    ne,
    neg,
    or_,
    pow,
    rshift,
    sub,
    truediv,
    xor,
)  # fmt: skip
from typing import Any, Self

from offload.watching.value_kinds import StandIn

FARTHEST = 20_000
"""So far from the number of the first trace the number of the second one is looked for."""
Function = Callable[[int], Any]


@dataclass(frozen=True, slots=True, eq=False)
class NumberQuestion:
    """What a step has asked about a number of the trainer."""

    ask: Function
    answer: Any

    def holds(self, number: int) -> bool:
        try:
            return self.ask(number) == self.answer
        except (ArithmeticError, ValueError):  # such as a shift by less than 0
            return False


@dataclass(frozen=True, slots=True, eq=False)
class AskedNumber:
    """A number of the trainer in one trace, and all that the step asks about it."""

    name: str
    value: int
    questions: list[NumberQuestion] = field(default_factory=list[NumberQuestion])

    def fits(self, number: int) -> bool:
        """Whether this number has all the answers."""
        return all(question.holds(number) for question in self.questions)

    def another(self) -> int:
        """Another number that has all the answers; if there is none, the same one, and the answers
        hold for it alone."""
        found = next((n for n in _near(self.value) if self.fits(n)), None)
        if found is None:
            self.questions.append(NumberQuestion(int, self.value))
            return self.value
        return found


def _near(number: int) -> Iterator[int]:
    """Other numbers: first 0, where code that does something every n batches does it."""
    if number:
        yield 0
    for distance in range(1, FARTHEST):
        yield number + distance
        if number >= distance:
            yield number - distance


@dataclass(frozen=True, slots=True, eq=False)
class NumberGuards:
    """The questions of one trace, with what reads their numbers now."""

    asked: Sequence[tuple[AskedNumber, Callable[[], int]]] = ()

    def hold(self) -> bool:
        return all(one.fits(read()) for one, read in self.asked)

    def change(self) -> str:
        """Say which number has other answers now; empty if none has."""
        for one, read in self.asked:
            if not one.fits(now := read()):
                return f"{one.name} is {now} after {one.value}"
        return ""


def _computing(operator: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """The methods of an operator for a guarded number on the left and on the right."""
    return (
        lambda self, other: self._computed(operator, other, False),
        lambda self, other: self._computed(operator, other, True),
    )


def _comparing(operator: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._compared(operator, other)


class GuardedNumber(StandIn):
    """A whole number that a step may compute with and branch on."""

    __slots__ = ("asked", "function", "live", "plain")

    def __init__(self, asked: AskedNumber, plain: int, function: Function = int) -> None:
        self.asked = asked
        self.plain = plain
        self.function = function
        self.live: Callable[[], int] | None = None
        """Reads the number anew, if it is one of the trainer's as it is."""

    def read_by(self, live: Callable[[], int]) -> Self:
        self.live = live
        return self

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `isinstance` of the user's code is told."""
        return int

    def _fixed(self) -> int:
        """The number itself: the graph holds for it alone."""
        return self._answer(self.function, self.plain)

    def _answer(self, ask: Function, answer: Any) -> Any:
        self.asked.questions.append(NumberQuestion(ask, answer))
        return answer

    def _computed(self, operator: Callable[[Any, Any], Any], other: Any, swapped: bool) -> Any:
        if isinstance(other, GuardedNumber):
            other = other._fixed()
        if not isinstance(other, int) or operator in (truediv, pow):
            mine = self._fixed()
            return operator(other, mine) if swapped else operator(mine, other)
        function = self.function

        def combined(number: int) -> Any:
            mine = function(number)
            return operator(other, mine) if swapped else operator(mine, other)

        result = operator(other, self.plain) if swapped else operator(self.plain, other)
        return GuardedNumber(self.asked, result, combined)

    def _compared(self, operator: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, GuardedNumber):
            other = other._fixed()
        if not isinstance(other, int | float):
            return operator(self._fixed(), other)
        function = self.function
        return self._answer(lambda n: operator(function(n), other), operator(self.plain, other))

    __add__, __radd__ = _computing(add)
    __sub__, __rsub__ = _computing(sub)
    __mul__, __rmul__ = _computing(mul)
    __mod__, __rmod__ = _computing(mod)
    __truediv__, __rtruediv__ = _computing(truediv)
    __pow__, __rpow__ = _computing(pow)
    __floordiv__, __rfloordiv__ = _computing(floordiv)
    __and__, __rand__ = _computing(and_)
    __or__, __ror__ = _computing(or_)
    __xor__, __rxor__ = _computing(xor)
    __lshift__, __rlshift__ = _computing(lshift)
    __rshift__, __rrshift__ = _computing(rshift)
    __eq__, __ne__ = _comparing(eq), _comparing(ne)  # pyright: ignore[reportAssignmentType]
    __lt__, __le__, __gt__, __ge__ = map(_comparing, (lt, le, gt, ge))

    def __bool__(self) -> bool:
        function = self.function
        return self._answer(lambda n: bool(function(n)), bool(self.plain))

    def __neg__(self) -> "GuardedNumber":
        function = self.function
        return GuardedNumber(self.asked, -self.plain, lambda n: neg(function(n)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fixed(), name)

    __int__ = __index__ = __trunc__ = _fixed

    def __float__(self) -> float:
        return float(self._fixed())

    def __hash__(self) -> int:
        return hash(self._fixed())

    def __repr__(self) -> str:
        return repr(self._fixed())

    def __format__(self, how: str) -> str:
        return format(self._fixed(), how)

    def __round__(self, digits: Any = None) -> int:
        return self._fixed()

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __abs__(self) -> int:
        return abs(self._fixed())

    def __pos__(self) -> Self:
        return self

    def __invert__(self) -> "GuardedNumber":
        return -self - 1
