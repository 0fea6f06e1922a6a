"""Steps that ran, priced by what each of their nodes took."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
from support import offload_models as models
from support.live_training import LiveTraining, training_graph

import offload
from offload import Costs


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("engine", ["threads", "serial"])
def test_kernels_take_what_they_took_and_what_the_loop_took_before_them(
    name: str, engine: str
) -> None:
    case = models.cases()[name]
    model, optimizer, *_ = models.twin(case)
    graph = training_graph(model, case.loss, optimizer, *case.batches()[0], around=case.around)
    whole = offload.plan(graph)
    plan = offload.plan(graph, int(0.6 * whole.peak_bytes), costs=Costs(h2d=1e12, d2h=1e12))
    traces = []

    def ticking(runner: Any) -> Any:
        if engine == "serial":  # each node takes a second: seconds that no machine changes
            runner.stage.engine._clock = map(float, itertools.count()).__next__
        return nullcontext()

    with LiveTraining(
        model, case.loss, optimizer, plan, around=case.around, beside=ticking, engine=engine
    ) as step:
        for batch in case.batches()[:1]:
            step(*batch)
            traces.append(step.runner.trace)
    plan = step.planner.plans[0]
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
    graph = training_graph(model, case.loss, optimizer, *case.batches()[0], around=case.around)
    plan = offload.plan(graph, int(0.6 * offload.plan(graph).peak_bytes))
    for batch in case.batches():
        models.torch.manual_seed(1)
        with LiveTraining(model, case.loss, optimizer, plan, around=case.around) as step:
            loss, *_ = step(*batch)
            # moves out, and in again elsewhere
            plan = step.planner.plans[0].measured([step.runner.trace]).remade()
        models.torch.manual_seed(1)
        assert models.torch.equal(loss, models.eager_step(case, other, plain, batch))
