"""Steps that ran, priced by what each of their nodes took."""

import itertools

import pytest
from support import offload_models as models

import offload
from offload import Costs, Runner


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("engine", ["threads", "serial"])
def test_kernels_take_what_they_took_and_what_the_loop_took_before_them(
    name: str, engine: str
) -> None:
    case = models.cases()[name]
    model, optimizer, *_ = models.twin(case)
    with case.around():
        graph = offload.capture_training_step(model, case.loss, optimizer, *case.batches()[0])
    whole = offload.plan(graph)
    plan = offload.plan(graph, int(0.6 * whole.peak_bytes), costs=Costs(h2d=1e12, d2h=1e12))
    traces = []
    with Runner(plan, engine) as runner:
        if engine == "serial":  # each node takes a second: seconds that no machine changes
            runner.stage.engine._clock = map(float, itertools.count()).__next__
        for batch in case.batches():
            runner(*batch)
            traces.append(runner.trace)
    for trace in traces:
        # On no machine, however busy: whatever held a node up is in that node's own seconds.
        measured = plan.measured([trace])
        seconds = sum(task.seconds or 0 for task in measured.graph.tasks)
        assert trace.computed - 1e-9 <= seconds <= trace.seconds + 1e-9
        assert measured.predicted_seconds >= seconds - 1e-9
        if engine == "serial":  # copies and kernels would have run side by side
            assert measured.predicted_seconds <= trace.seconds + 1e-9
    assert plan.measured(traces).remade().measurement is not None


def test_a_step_that_was_remade_leaves_the_same_bits() -> None:
    case = models.cases()["gpt"]
    model, optimizer, other, plain = models.twin(case)
    with case.around():
        graph = offload.capture_training_step(model, case.loss, optimizer, *case.batches()[0])
    plan = offload.plan(graph, int(0.6 * offload.plan(graph).peak_bytes))
    for batch in case.batches():
        models.torch.manual_seed(1)
        with Runner(plan) as runner:
            loss, *_ = runner(*batch)
            plan = plan.measured([runner.trace]).remade()  # moves out, and in again elsewhere
        models.torch.manual_seed(1)
        assert models.torch.equal(loss, models.eager_step(case, other, plain, batch))
