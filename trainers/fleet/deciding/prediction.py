"""Predicts how long a fleet will take, and how long without one, from the jobs' plans.

    serial    one job after the other, on one device
    fifo      one job a device, in the order of adding, each to its end
    pinned    the same, the longest job first
    fleet     a simulation of `decide`: turns, swaps, moves, memory
    bound     max(longest job, sum / devices): no order of turns ends before

Jobs that ask for several devices have as few of them as they may, but in the fleet's own row: there
they get more as soon as those fall free. A job's seconds are those of its start, its steps and its
validations. Checkpoints and the test at a job's end are not predicted, nor are jobs that a stop
rule ends early. The gain of hidden host tails is estimated by cycles in which each job of a device
takes a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from offload.sizes import format_count, format_size
from trainers.fleet.deciding.admission import HeldMemory, host_bytes, why_it_never_fits
from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Departed,
    Event,
    Finished,
    Leave,
    Planned,
    Start,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState, describe_inputs
from trainers.fleet.deciding.schedule import can_hide_tails

TURNS = 100
"""On simulation a device has about so many turns, however long it trains."""


@dataclass(frozen=True, slots=True)
class PredictedEnds:
    """Seconds until the last job is done."""

    serial: float
    fifo: float
    pinned: float
    fleet: float
    bound: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a fleet."""

    jobs: int
    devices: int
    ends: PredictedEnds
    binds: str
    """The reason of the bound, or that memory makes jobs wait."""
    moves: int
    swaps: float
    """The seconds of all changes from job to job, added up over the devices."""
    hidden: float
    """The seconds by which hidden host tails make the fleet shorter."""
    unknown: tuple[str, ...]
    """Jobs whose step time is unknown. They count as nothing."""
    host: int
    """The bytes of the host that all jobs take together, if none waits for memory."""
    host_room: int
    never: tuple[str, ...]

    @property
    def gain(self) -> float:
        """How many times longer one job a device would take."""
        return self.ends.fifo / self.ends.fleet if self.ends.fleet > 0 else 1.0

    def describe(self) -> str:
        """Return a line for each figure."""
        if not self.jobs:
            return "No job could be planned, so nothing is predicted."
        rows = [
            ("one after the other on one device", self.ends.serial, ""),
            ("one job a device, in order", self.ends.fifo, ""),
            ("one job a device, longest first", self.ends.pinned, ""),
            ("this fleet", self.ends.fleet, self._cost()),
            ("bound", self.ends.bound, self.binds),
        ]
        lines = [f"{format_count(self.jobs, 'job')} on {format_count(self.devices, 'device')}"]
        lines += [f"  {what:<34}{_duration(s):>9}  {more}".rstrip() for what, s, more in rows]
        room = f"of {format_size(self.host_room)}" if self.host_room else ""
        what = "host memory, all jobs at once"
        lines.append(f"  {what:<34}{format_size(self.host):>9}  {room}".rstrip())
        return "\n".join((*lines, *self._remarks()))

    def _cost(self) -> str:
        costs = [format_count(self.moves, "move")] if self.devices > 1 else []
        if self.swaps > 0:
            costs.append(f"{_duration(self.swaps)} of swaps")
        if self.hidden >= 0.1:
            costs.append(f"{_duration(self.hidden)} of host tails hidden")
        return ", ".join(costs)

    def _remarks(self) -> list[str]:
        remarks = ["Not counted: what is planned later, checkpoints, and the test at a job's end."]
        if self.gain > 1.01:
            remarks.append(f"Sharing makes it {self.gain:.2f} times shorter than one job a device.")
        elif self.devices == 1:
            remarks.append(
                "Sharing brings nothing on one device whose jobs have no host tails worth a swap:"
                " the jobs only proceed side by side, so that a stop rule can compare them."
            )
        else:
            remarks.append(
                "Sharing brings nothing here: one job a device ends as early. The jobs only proceed"
                " side by side, so that a stop rule can compare them."
            )
        if self.unknown:
            remarks.append(
                f"Nobody knows yet what a step takes of: {', '.join(self.unknown)}. They count as"
                " nothing until they have trained."
            )
        if self.never:
            remarks.append(
                f"These will fail, because they do not fit even alone: {', '.join(self.never)}."
            )
        return remarks


def predict(plans: Sequence[Planned], settings: FleetSettings) -> Prediction:
    """Predict the run of jobs that have been planned, in the order of adding."""
    never = tuple(plan.job for plan in plans if why_it_never_fits(plan.memory, settings))
    unknown = tuple(plan.job for plan in plans if plan.times.step_seconds <= 0)
    known = [_with_validations(p) for p in plans if p.job not in never and p.job not in unknown]
    seconds = [_seconds(plan) for plan in known]
    devices = settings.devices
    shortest = [min(_seconds(plan, width) for width in _widths(plan)) for plan in known]
    work = [min(width * _seconds(plan, width) for width in _widths(plan)) for plan in known]
    longest = max(shortest, default=0.0)
    bound = max(longest, sum(work) / devices)
    simulation = _simulate(known, settings)
    held = [HeldMemory(p.job, p.device, p.memory) for p in plans if p.job not in never]
    hidden = simulation.seconds * (1 - _share_with_tails(known, devices))
    return Prediction(
        jobs=len(plans),
        devices=devices,
        ends=PredictedEnds(
            serial=sum(seconds),
            fifo=_end_in_order(known, devices),
            pinned=_end_in_order(sorted(known, key=_seconds, reverse=True), devices),
            fleet=simulation.seconds - hidden,
            bound=bound - hidden if devices == 1 else bound,
        ),
        binds=_explain_bound(known, longest, bound, devices, simulation.waited),
        moves=simulation.moves,
        swaps=simulation.swaps,
        hidden=hidden,
        unknown=unknown,
        host=host_bytes(held, devices),
        host_room=settings.host_bytes,
        never=never,
    )


def explain_run(plans: Sequence[Planned], settings: FleetSettings) -> str:
    """Return the prediction in words, and which jobs read together."""
    inputs = describe_inputs({plan.job: plan.input for plan in plans})
    return "\n".join((predict(plans, settings).describe(), *inputs))


def _with_validations(plan: Planned) -> Planned:
    """Return the plan with its validations added to its steps."""
    each = plan.validation_seconds / max(1, plan.left)
    seconds = plan.times.step_seconds + each
    return replace(plan, times=replace(plan.times, step_seconds=seconds))


def _widths(plan: Planned) -> range:
    """Return the numbers of devices that a job may have."""
    return range(plan.devices, max(plan.devices, len(plan.seconds_by_devices)) + 1)


def _step_seconds(plan: Planned, width: int) -> float:
    if width == plan.devices:
        return plan.times.step_seconds
    predicted = plan.seconds_by_devices
    return plan.times.step_seconds * predicted[width - 1] / predicted[plan.devices - 1]


def _seconds(plan: Planned, width: int | None = None) -> float:
    """Return the seconds of a job; by default on as few devices as it may have."""
    return plan.seconds + plan.left * _step_seconds(plan, width or plan.devices)


def _explain_bound(
    plans: Sequence[Planned], longest: float, bound: float, devices: int, waited: Sequence[str]
) -> str:
    if waited:
        return f"and memory: {', '.join(waited)} would wait for it"
    if not plans:
        return "no job is known"
    if longest >= bound:
        job = max(plans, key=_seconds).job
        return f"job {job}: its steps follow each other"
    return f"all jobs together, on {format_count(devices, 'device')}"


def _end_in_order(plans: Sequence[Planned], devices: int) -> float:
    """Return the end, if each job goes to the devices that are free first and stays there."""
    free = [0.0] * devices
    for plan in plans:
        free.sort()
        free[: plan.devices] = [free[plan.devices - 1] + _seconds(plan)] * plan.devices
    return max(free)


def _share_with_tails(plans: Sequence[Planned], devices: int) -> float:
    """Estimate the share of the time that is left if tails are hidden."""
    groups: list[list[Planned]] = [[] for _ in range(devices)]
    for plan in sorted(plans, key=_seconds, reverse=True):
        min(groups, key=lambda group: sum(map(_seconds, group))).append(plan)
    plain = max(sum(map(_seconds, group)) for group in groups)
    return max(map(_seconds_in_cycles, groups)) / plain if plain > 0 else 1.0


def _seconds_in_cycles(group: Sequence[Planned]) -> float:
    """Return the seconds of one device, if its jobs take a step in turn as long as that pays."""
    left = {plan.job: plan.left for plan in group}
    clock = sum(plan.seconds for plan in group)
    while going := [plan for plan in group if left[plan.job] > 0]:
        cycle = sum(plan.times.step_seconds for plan in going)
        if can_hide_tails([plan.times for plan in going]):
            whole = [plan.times.step_seconds + plan.times.swap_seconds for plan in going]
            cycle = max(sum(whole) - sum(plan.times.tail_seconds for plan in going), *whole)
        cycles = min(left[plan.job] for plan in going)
        clock += cycles * cycle
        for plan in going:
            left[plan.job] -= cycles
    return clock


@dataclass(slots=True)
class SimulatedFleet:
    """The result of a simulated run."""

    seconds: float = 0.0
    moves: int = 0
    swaps: float = 0.0
    waited: tuple[str, ...] = ()


def _simulate(plans: Sequence[Planned], settings: FleetSettings) -> SimulatedFleet:
    """Simulate the run: without a stop rule, and with fewer, longer turns."""
    simulation = SimulatedFleet()
    by_job = {plan.job: plan for plan in plans}
    total = sum(map(_seconds, plans)) / settings.devices
    coarse = max(settings.quantum_seconds, total / TURNS)
    settings = replace(settings, rule=None, quantum=None, quantum_seconds=coarse)
    state = FleetState.without_jobs(settings)
    added = [Added(p.job, least=p.devices, most=_widths(p)[-1]) for p in plans]
    left = {plan.job: plan.left for plan in plans}
    last: list[str | None] = [None] * settings.devices
    due: list[tuple[float, int, Event]] = [(0.0, n, event) for n, event in enumerate(added)]
    number = len(due)
    while due:
        clock, _, event = heappop(due)
        simulation.seconds = max(simulation.seconds, clock)
        state, commands = decide(state, event)
        for command in commands:
            plan, device = by_job[command.job], command.device
            number += 1
            match command:
                case Start():
                    moved = state.jobs[plan.job].exit.target is not None
                    simulation.moves += moved
                    wait = (plan.seconds or settings.move_seconds) if moved else plan.seconds
                    each = _step_seconds(plan, command.width)
                    times = replace(plan.times, step_seconds=each, tail_seconds=0.0)
                    answer = replace(
                        plan, device=device, step=plan.step + plan.left - left[plan.job],
                        left=left[plan.job], times=times, devices=command.width,
                    )  # fmt: skip
                case Yield():
                    continue  # all have the same priority here
                case Leave():
                    step = plan.step + plan.left - left[plan.job]
                    wait, answer = 0.0, Departed(plan.job, device, step)
                case Turn():
                    swap = plan.times.swap_seconds if last[device] not in (None, plan.job) else 0.0
                    last[device] = plan.job
                    simulation.swaps += swap
                    width = state.jobs[plan.job].width
                    seconds = command.steps * _step_seconds(plan, width)
                    left[plan.job] -= command.steps
                    step = plan.step + plan.left - left[plan.job]
                    wait = swap + seconds
                    answer = TurnEnded(
                        plan.job, device, step, command.steps, left[plan.job], seconds, swap, None
                    )
                    if left[plan.job] <= 0:
                        answer = Finished(plan.job, device, step, seconds, None)
            heappush(due, (clock + wait, number, answer))
        if state.queue and clock > 0:
            simulation.waited = tuple(dict.fromkeys((*simulation.waited, *state.queue)))
    return simulation


def _duration(seconds: float) -> str:
    """Return the seconds for people, such as `2.5 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
