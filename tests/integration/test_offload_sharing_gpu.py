"""Two jobs on one GPU: parked in page-locked memory, and each going on in the other's tail."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import stage_jobs as jobs
from support.fake_gpu import not_on_a_fake_gpu

from offload.graph.builder import GraphBuilder
from offload.planning.host_tails import host_tail
from offload.plans.plan import plan
from offload.program.kernels import Program, Value
from offload.running.runner import Runner
from offload.running.stage import Stage

MIB = 1 << 20
COUNT, EACH = 64, 16 * MIB
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
def test_jobs_that_take_turns_and_tails_have_the_bits_of_each_alone(engine: str) -> None:
    one = jobs.Job.mixed(4, 4096, engine="cuda")
    other = jobs.Job.chain(3, 4096, engine="cuda")
    assert host_tail(one.plan.memgraph)
    with Stage(torch.device("cuda"), engine) as stage:
        first, second = Runner(one.plan, stage=stage), Runner(other.plan, stage=stage)

        class Tails:
            def on_tail(self) -> None:
                other.step(second)  # parks the job whose tail runs

            def tail_over(self) -> None:
                assert jobs.waiting(first, one)

        for tailed in (False, True, True, True):
            first.tails = Tails() if tailed else None
            one.step(first)
            other.step(second)
        place = first._memory.waiting
        assert place is not None and place.note == ""
        first.close()
        second.close()
    assert one.is_right() and other.is_right()


@pytest.mark.parametrize("engine", ["cuda", "cudagraph"])
def test_a_job_moves_between_budgets_and_to_the_host_and_back(engine: str) -> None:
    """Its kernels are of whole numbers, so their bits are those of every device."""
    job = jobs.Job.mixed(5, 4096, engine="cuda")
    program = replace(job.graph.program, device=torch.device("cpu"))
    here = plan(replace(job.graph, program=program), placement="copy", recompute=False)
    there = [
        plan(job.graph, budget, placement="copy", recompute=False)
        for budget in (job.plan.device_bytes, None)
    ]
    with (
        Stage(torch.device("cuda"), engine) as gpu,
        Stage() as host,
        Runner(job.plan, stage=gpu) as runner,
    ):
        job.step(runner)
        for made, stage in ((there[0], gpu), (here, host), (there[1], gpu), (there[0], gpu)):
            if stage.device != runner.stage.device:
                with pytest.warns(RuntimeWarning, match="later bits are those of the new device"):
                    moved = runner.move_to(made, stage=stage)
                assert moved.nbytes > 0
            else:
                runner.move_to(made, stage=stage)
            assert job.is_right()  # the weights are equal at the move
            job.step(runner)
    assert job.is_right()


@not_on_a_fake_gpu("it says nothing of time")
def test_a_hand_over_takes_little_more_than_its_copies() -> None:
    def job() -> Any:
        builder = GraphBuilder()
        weights = [builder.buffer(f"w{n}", EACH, "parameter") for n in range(COUNT)]
        builder.task("touch", weights, weights[:1], kernel=lambda _, writes: writes[0][:1].add_(1))
        tensors = {f"w{n}": torch.zeros(EACH, dtype=torch.uint8) for n in range(COUNT)}
        seen = Value(weights[0], torch.uint8, (1,), (1,))
        program = Program((), (seen,), tensors, device=torch.device("cuda"))
        return plan(builder.graph(program), placement="copy")

    there = torch.zeros(COUNT * EACH, dtype=torch.uint8, device="cuda")
    here = torch.zeros(COUNT * EACH, dtype=torch.uint8, pin_memory=True)
    ratios = []
    with Stage(torch.device("cuda")) as stage:
        runners = [Runner(job(), stage=stage) for _ in range(2)]
        for _ in range(6):
            for runner in runners:
                runner()
            before = stage.swaps
            runners[0]()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            here.copy_(there)
            there.copy_(here)
            torch.cuda.synchronize()
            floor = time.perf_counter() - begin
            ratios.append((stage.swaps.seconds - before.seconds) / floor)
        for runner in runners:
            runner.close()
    assert min(ratios) <= 1.2, ratios
