"""What a step may do with the batch's index, the epoch and other stand-ins: pass them on."""

import operator
from typing import Any

import pytest

from offload import CaptureError
from trainers.offloading.tracing.batch_texts import BatchText
from trainers.offloading.tracing.guarded_numbers import AskedNumber, GuardedNumber, NumberQuestion
from trainers.offloading.tracing.opaque_numbers import EpochUsed, OpaqueEpoch, OpaqueNumber
from trainers.offloading.tracing.side_effects import DeferredResult

PASSED_ON = frozenset(
    {"__doc__", "__format__", "__getattribute__", "__getnewargs__", "__new__", "__repr__"}
    | {"__sizeof__", "from_bytes", "__index__"}
)
"""`__index__`: nobody asks an int for it. What an index decides differs in the two traces."""


ALONE = frozenset(
    {"__hash__", "__bool__", "__neg__", "__pos__", "__invert__", "__abs__", "__int__", "__float__"}
    | {"__round__", "__trunc__", "__floor__", "__ceil__", "bit_length", "bit_count", "to_bytes"}
    | {"as_integer_ratio", "conjugate", "is_integer"}
)
"""They take no argument."""


def use(number: Any, name: str) -> Any:
    found = getattr(number, name)
    return found(*(() if name in ALONE else (3,))) if callable(found) else found


@pytest.mark.parametrize("name", sorted(vars(int).keys() - PASSED_ON))
def test_whatever_an_int_can_be_used_for_is_refused(name: str) -> None:
    with pytest.raises(CaptureError, match="training_step uses batch_idx"):
        use(OpaqueNumber.of("training_step", 7), name)
    with pytest.raises(EpochUsed):
        use(OpaqueEpoch.of("training_step", 7), name)


def test_the_index_may_be_printed() -> None:
    index = OpaqueNumber.of("training_step", 7)
    assert f"{index} {index:03d} {index!r}" == "7 007 7"
    assert "%d %s" % (index, index) == "7 7"  # noqa: UP031


def test_the_result_of_a_metric_may_not_be_compared() -> None:
    result = DeferredResult(0, "self.accuracy")
    for compare in operator.eq, operator.ne, operator.lt:
        with pytest.raises(CaptureError, match="only known after the step"):
            compare(result, 1.0)


def test_text_of_the_batch_may_not_be_put_behind_other_text() -> None:
    with pytest.raises(CaptureError, match="reads the text of the batch"):
        "folder/" + BatchText.at(0, False)


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: divmod(n, 4)[0],
        lambda n: divmod(100, n + 1)[1],
        abs,
        lambda n: +n,
        lambda n: ~n,
        lambda n: -n,
    ],
)
def test_a_guarded_number_answers_as_an_int_does_and_asks(ask: Any) -> None:
    asked = AskedNumber("batch_idx", 9)
    assert int(ask(GuardedNumber(asked, 9))) == ask(9)
    assert asked.fits(9) and not asked.fits(21)


def test_a_number_for_which_a_step_would_fail_has_other_answers() -> None:
    assert not NumberQuestion(lambda n: 1 << (n - 3), 2).holds(0)
