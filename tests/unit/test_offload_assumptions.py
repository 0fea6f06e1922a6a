"""Answers to what a step asks: how they are kept, compared, and computed from a tape."""

import pytest
import torch

from offload.errors import AssumptionFailed
from offload.graph.taskgraph import Role, TaskGraph
from offload.measuring.fake_answers import Learned
from offload.program.assumptions import Assumption, Check, same_start
from offload.tracing.capture import traced
from offload.tracing.questions import AssumedValues

WHERE = "model.py:3 in forward"


def test_the_first_trace_computes_answers_and_later_ones_get_the_same() -> None:
    asked: list[int] = []

    def compute() -> int:
        asked.append(len(asked))
        return 10 + asked[-1]

    values = AssumedValues((True,))
    values.begin()
    assert [values.next(compute) for _ in range(3)] == [True, 10, 11]
    values.begin()
    assert [values.next(compute) for _ in range(3)] == [True, 10, 11]
    assert asked == [0, 1]


def test_a_check_names_the_line_the_number_and_both_values() -> None:
    check = Check(4, (Assumption(3, "a count", WHERE), Assumption(False, "its value", WHERE)))
    check(torch.tensor(3), torch.tensor(0))
    with pytest.raises(AssumptionFailed, match=r"model.py:3 .* gave False .* gives True") as error:
        check(torch.tensor(3), torch.tensor(1))
    assert (error.value.number, error.value.found) == (5, True)


def test_a_nan_that_is_assumed_is_like_any_other_nan() -> None:
    Check(0, (Assumption(torch.nan, "its value", WHERE),))(torch.tensor(-torch.nan))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [((1, 2), (1,), True), ((), (1,), True), ((1, 2), (2,), False), ((torch.nan,),) * 2 + (True,)],
)
def test_answers_are_compared_as_far_as_both_are_known(
    one: tuple[float, ...], other: tuple[float, ...], same: bool
) -> None:
    assert same_start(one, other) is same


def graph_of(step: object, *batch: torch.Tensor) -> TaskGraph:
    return traced(step, *batch, learned=Learned(), assumed=AssumedValues())  # type: ignore[arg-type]


def test_an_answer_is_computed_by_what_leads_to_it_and_changes_nothing() -> None:
    counter, noise = torch.zeros(()), torch.Generator().manual_seed(1)
    before = noise.get_state()

    def step(x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        drawn = torch.rand(8, generator=noise)
        return x * 2 if bool((counter + drawn.sum() * 0 > 0.5).all()) else x

    graph = graph_of(step, torch.ones(8))
    assert graph.program.assumed == (True,)
    assert counter == 0 and torch.equal(noise.get_state(), before)


def test_what_is_written_before_a_check_is_written_into_a_copy() -> None:
    counter = torch.zeros(())

    def step(x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x * 2 if bool(x.sum() > 0) else x

    graph = graph_of(step, torch.ones(8))
    names = [task.name for task in graph.tasks]
    lasting = {b for b, buffer in enumerate(graph.buffers) if buffer.role is Role.BUFFER}
    [written] = [n for n, task in enumerate(graph.tasks) if not lasting.isdisjoint(task.writes)]
    [check] = [n for n, task in enumerate(graph.tasks) if task.checks]
    assert check < written and graph.tasks[written].after == (check,)
    assert names.index("add_") < check


def test_an_op_with_indices_waits_for_the_checks_before_it() -> None:
    table, rows = torch.arange(6.0), torch.tensor([0, 1])

    def step(x: torch.Tensor) -> torch.Tensor:
        first = table.index_select(0, rows)
        return first + (table.index_select(0, rows) if bool(x.sum() > 0) else x)

    graph = graph_of(step, torch.ones(2))
    after = [task.after for task in graph.tasks if "index_select" in task.name]
    [check] = [n for n, task in enumerate(graph.tasks) if task.checks]
    assert after == [(), (check,)]


def test_values_that_are_asked_for_one_after_the_other_are_checked_at_once() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * sum((x > 1).tolist(), 1)

    graph = graph_of(step, torch.arange(4.0))
    assert graph.program.assumed == (False, False, True, True)
    assert sum(task.checks for task in graph.tasks) == 1
