"""Part j: a training that answers requests.

    at rest     a guest is open, and nobody asks
    ours        answers come between two nodes of a step

    round       steps alone | steps with the guest, or with 10 requests a second

A request's time begins when it is due, drawn beforehand.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.models import GPT2, TINY, Batch, Kind, LastWord, Size, decoder, text
from benchmarks.gpu.ours import replayed, stepping
from benchmarks.gpu.part import Found, Job, Row, Rows, Step
from benchmarks.gpu.timing import free, synchronize
from benchmarks.gpu.workloads import trained, workloads
from benchmarks.harness.report import Report, Target, format_spread, format_table, round_ratios
from benchmarks.offloading.live_steps import LiveSteps
from benchmarks.sharing.setting import NotingGate, Requests, Took
from offload import Costs
from offload.graph.rates import costs_of
from offload.measuring.calibration import take_samples
from offload.running.drivers.cuda import Cuda
from offload.running.stage import Stage
from trainers.sharing.guest_session import GuestSession
from trainers.sharing.high_priority import HighPriority, Percentiles

NAME = "sharing"
CLAIM = "Claim: a request starts within 4 ms, and 10 a second cost the training at most 3 %"
START, SLOWER, REST = 4.0, 1.03, 1.01
RATE = 10.0
"""Requests a second."""
TRAINED: Mapping[str, str] = {"llama-7b lora 8x1K": "8GiB", "gpt2-1.5b full 8x1K": "12GiB"}
"""With the budget of each."""
SMALL = "gpt2-small full 8x1K"
"""What quarter.sh has time for."""
SMOKE: Mapping[str, str] = {"llama lora": "minimum"}
WAYS = ("at rest", "ours, cuda", "ours, cudagraph")
SETTLING = 3
"""A new cut is run by the loop once, captured in the second step, and replayed in the third."""
SERVED = Kind(Size(50257, 768, 12, 12, 3072, 1, 128), "gpt2")
ASKED_SECONDS, ROUNDS = 4.0, 3


def steps(smoke: bool) -> Sequence[Step]:
    if smoke:
        return [Step("gpu.sharing:rows", tuple(f"{n}; {way}" for n in SMOKE for way in WAYS))]
    return [
        Step("gpu.sharing:rows", tuple(f"{name}; {way}" for way in WAYS), minutes=4)
        for name in TRAINED
    ]


@dataclass(slots=True)
class Training:
    """The steps whose device is asked for, and what a guest needs to know of them."""

    steps: LiveSteps
    batch: Batch
    gate: NotingGate
    costs: Costs
    on: str

    @property
    def device(self) -> torch.device:
        """With its number, as the guest's own step has it."""
        return self.stage.device

    @property
    def stage(self) -> Stage:
        return self.steps.runner.stage

    def guest_driver(self) -> Cuda:
        return Cuda(self.device, high=True)

    def expect_guests(self, expected: bool) -> None:
        """Have guests expected or not, and run the steps in which graphs are cut and captured anew
        for that."""
        self.gate.armed = expected
        for _ in range(SETTLING):
            self.steps(*self.batch)

    def step_seconds(self, seconds: float) -> float:
        """The mean of as many steps as begin within this time."""
        synchronize(self.on)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            self.steps(*self.batch)
            count += 1
        synchronize(self.on)
        return (time.perf_counter() - begin) / count


def rows(job: Job) -> Rows:
    made: tuple[str, Trainings] | None = None
    for cell in job.cells:
        name, way = cell.split("; ")
        if made is None or made[0] != name:
            made = None
            free(job.device)
            made = name, _trainings(name, job)
        engine = "cudagraph" if way.endswith("cudagraph") else "cuda"
        with made[1](engine) as training:
            yield cell, _compared(training, way.partition(",")[0], job)


Trainings = Callable[[str], AbstractContextManager[Training]]
"""Makes the steps of a workload, by an engine."""


def _trainings(name: str, job: Job) -> Trainings:
    small = trained(Kind(GPT2, "gpt2"), (), optimizer="auto")
    load = {**workloads(job.smoke), SMALL: small}[name]
    torch.manual_seed(0)
    batch = load.case.batch(job.device)
    module = load.case.build("cpu")
    costs = costs_of(take_samples(job.device, 0.5 if job.smoke else 2.5), load.precision)
    budget = {**TRAINED, **SMOKE, SMALL: "60 %"}[name]

    @contextmanager
    def training(engine: str) -> Iterator[Training]:
        gate, optimizer = NotingGate(), load.case.optimizer(module)
        given = load.case, module, optimizer, batch, job.device, engine, budget
        with stepping(*given, gate=gate, costs=costs, **load.options) as steps:
            steps.settle(*batch)
            yield Training(steps, batch, gate, costs, job.device)

    return training


def _compared(training: Training, way: str, job: Job) -> Row:
    """Rounds of steps alone and of steps with a guest, in one process and with one plan."""
    rounds = job.arguments.get("rounds", ROUNDS)
    seconds, repeats, rate = (0.2, 1, 50.0) if job.smoke else (ASKED_SECONDS, rounds, RATE)
    kind = Kind(TINY) if job.smoke else SERVED
    net = LastWord(decoder(kind, job.device, seed=7)).eval()
    torch.manual_seed(7)
    x = text(kind.size, job.device)[0]
    right = _answer(net, x)
    training.step_seconds(seconds)  # what is captured or measured first is no part of it
    seen: dict[str, list[float]] = {"alone": [], "asked": []}
    took: list[Took] = []
    starts: list[float] = []
    with _guest(training, net, x) as serve:
        for number in range(repeats):
            training.expect_guests(False)
            seen["alone"].append(training.step_seconds(seconds))
            training.expect_guests(True)
            training.gate.guests.clear()
            requests = Requests(serve, x, right, rate, number)
            if way == "ours":
                requests.begin()
            seen["asked"].append(training.step_seconds(seconds))
            requests.end()
            took += requests.took
            starts += [guest.granted - guest.asked for guest in training.gate.guests]
    row: Row = {
        "steps": seen, "answers": [one.seconds for one in took],
        "wrong": sum(not one.right for one in took),
    }  # fmt: skip
    if way == "ours":
        row |= {"starts": starts, "replayed": replayed(training.steps.runner)}
    return row


def _answer(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x)


@contextmanager
def _guest(training: Training, net: torch.nn.Module, x: torch.Tensor) -> Iterator[HighPriority]:
    session = GuestSession(training, net, (), None, borrows=False)
    serve = HighPriority(session, partial(_answer, net), on_close=lambda _: None)
    training.gate.close()
    with serve:
        for _ in range(2):  # the second one is planned, while no step runs
            serve(x)
        training.gate.open()
        try:
            yield serve
        finally:
            training.gate.close()


# ---- report -------------------------------------------------------------------------------------


def report(found: Found) -> Report:
    said = Report(NAME, CLAIM, {"requests a second": RATE, "rounds": ROUNDS})
    lines: list[list[str]] = []
    for cell, row in found.rows.items():
        over = round_ratios(row["steps"]["asked"], row["steps"]["alone"])
        waited = [
            f"{1e3 * part:.2f}" if times else ""
            for times in (row.get("starts", []), row["answers"])
            for part in _parts(times)
        ]
        lines.append([
            cell, format_spread([1e3 * one for one in row["steps"]["alone"]]),
            format_spread(over), *waited,
            f"{len(row['answers'])}", f"{row['wrong']}",
        ])  # fmt: skip
        slower = statistics.median(over)
        if "starts" in row:
            start = 1e3 * Percentiles.of_seconds(row["starts"]).p95 if row["starts"] else None
            said.asked.append(Target(f"{cell}: start p95", START, start, "ms"))
            said.asked.append(Target(f"{cell}: steps over steps alone", SLOWER, slower))
            said.asked.append(Target(f"{cell}: answers with other bits", 0, row["wrong"]))
        elif cell.endswith("at rest"):
            said.asked.append(Target(f"{cell}: steps over steps alone", REST, slower))
    head = [
        "", "step ms", "with it, over alone", "start p50 ms", "p95", "longest",
        "answer p50 ms", "p95", "longest", "answers", "wrong",
    ]  # fmt: skip
    said.tables["Steps and requests"] = format_table(head, lines)
    said.remarks = [
        "Steps with requests contain the answers' own time: 3 ms at 10 a second are 3 %."
    ]
    return said


def _parts(times: Sequence[float]) -> tuple[float, float, float]:
    if not times:
        return 0.0, 0.0, 0.0
    found = Percentiles.of_seconds(times)
    return found.p50, found.p95, found.most
