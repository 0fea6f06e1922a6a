"""How long a fleet will take, beside what would be done without one. All from the jobs' plans.

    serial    one job after the other, on one device
    fifo      one job a device, in the order of adding, each to its end
    pinned    the same, the longest job first
    fleet     by `decide`, on paper: turns, swaps, moves, memory
    bound     max(longest job, sum / devices): no order of turns ends before

A job's seconds are those of its start, its steps and its validations. Checkpoints and the test at a
job's end are not predicted, so a run is longer than this; nor are jobs that a stop rule ends early,
so it is shorter with one. Host tails are counted by cycles in which each job of a device takes a
step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

from offload.sizes import say_size
from trainers.fleet.deciding.admission import HeldMemory, host_bytes, never_fits
from trainers.fleet.deciding.decide import decide
from trainers.fleet.deciding.events import (
    Added,
    Event,
    Finished,
    Leave,
    Left,
    Planned,
    Start,
    Turn,
    TurnEnded,
    Yield,
)
from trainers.fleet.deciding.fleet_state import FleetSettings, FleetState
from trainers.fleet.deciding.quantum import hides_tails
from trainers.fleet.deciding.shared_input import said_inputs

TURNS = 100
"""On paper a device has about so many turns, however long it trains."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds until the last job is done."""

    jobs: int
    devices: int
    serial: float
    fifo: float
    pinned: float
    fleet: float
    bound: float
    binds: str
    """What the bound comes from, or that memory makes jobs wait."""
    moves: int
    swaps: float
    """Seconds that changes from job to job cost in all, each at its device."""
    hidden: float
    """Seconds by which host tails under other jobs' steps make the fleet shorter."""
    unknown: tuple[str, ...]
    """Jobs of which nobody knows yet what a step takes. They count as nothing."""
    host: int
    """What all jobs together take of the host's memory, if nobody waits for it."""
    host_room: int
    """What they may take of it. 0: no limit is known."""
    never: tuple[str, ...]
    """Jobs that will never fit. They count as nothing."""

    @property
    def gain(self) -> float:
        """How many times longer one job a device, in order, would take."""
        return self.fifo / self.fleet if self.fleet > 0 else 1.0

    def said(self) -> str:
        """In plain words, a line for each figure."""
        if not self.jobs:
            return "No job could be planned, so nothing is predicted."
        rows = [
            ("one after the other on one device", self.serial, ""),
            ("one job a device, in order", self.fifo, ""),
            ("one job a device, longest first", self.pinned, ""),
            ("this fleet", self.fleet, self._cost()),
            ("bound", self.bound, self.binds),
        ]
        lines = [f"{_count(self.jobs, 'job')} on {_count(self.devices, 'device')}"]
        lines += [f"  {what:<34}{_duration(s):>9}  {more}".rstrip() for what, s, more in rows]
        return "\n".join((*lines, self._memory(), *self._remarks()))

    def _memory(self) -> str:
        room = f"of {say_size(self.host_room)}" if self.host_room else ""
        return f"  {'host memory, all jobs at once':<34}{say_size(self.host):>9}  {room}".rstrip()

    def _cost(self) -> str:
        costs = [_count(self.moves, "move")] if self.devices > 1 else []
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
    """What is to be expected of jobs that have been planned, in the order of adding."""
    never = tuple(plan.job for plan in plans if never_fits(plan.memory, settings))
    unknown = tuple(plan.job for plan in plans if plan.step_seconds <= 0)
    known = [_validated(p) for p in plans if p.job not in never and p.job not in unknown]
    seconds = [_seconds(plan) for plan in known]
    devices = settings.devices
    longest = max(seconds, default=0.0)
    bound = max(longest, sum(seconds) / devices)
    paper = _on_paper(known, settings)
    held = [HeldMemory(p.job, p.device, p.memory) for p in plans if p.job not in never]
    hidden = paper.seconds * (1 - _with_tails(known, devices))
    return Prediction(
        jobs=len(plans),
        devices=devices,
        serial=sum(seconds),
        fifo=_listed(seconds, devices),
        pinned=_listed(sorted(seconds, reverse=True), devices),
        fleet=paper.seconds - hidden,
        bound=bound - hidden if devices == 1 else bound,
        binds=_binds(known, longest, bound, devices, paper.waited),
        moves=paper.moves,
        swaps=paper.swaps,
        hidden=hidden,
        unknown=unknown,
        host=host_bytes(held, devices),
        host_room=settings.host_bytes,
        never=never,
    )


def explained(plans: Sequence[Planned], settings: FleetSettings) -> str:
    """What is to be expected, in plain words, and which jobs read together."""
    inputs = said_inputs({plan.job: plan.input for plan in plans})
    return "\n".join((predict(plans, settings).said(), *inputs))


def _validated(plan: Planned) -> Planned:
    """The plan with its validations shared out to its steps."""
    each = plan.validation_seconds / max(1, plan.left)
    return replace(plan, step_seconds=plan.step_seconds + each)


def _seconds(plan: Planned) -> float:
    return plan.seconds + plan.left * plan.step_seconds


def _binds(
    plans: Sequence[Planned], longest: float, bound: float, devices: int, waited: Sequence[str]
) -> str:
    if waited:
        return f"and memory: {', '.join(waited)} would wait for it"
    if not plans:
        return "no job is known"
    if longest >= bound:
        job = max(plans, key=_seconds).job
        return f"job {job}: its steps follow each other"
    return f"all jobs together, on {_count(devices, 'device')}"


def _listed(seconds: Sequence[float], devices: int) -> float:
    """The end, if each job goes to the device that is free first and stays there."""
    free = [0.0] * devices
    heapify(free)
    for length in seconds:
        heapreplace(free, free[0] + length)
    return max(free)


def _with_tails(plans: Sequence[Planned], devices: int) -> float:
    """The part of the time that is left where tails are hidden, as far as cycles tell."""
    groups: list[list[Planned]] = [[] for _ in range(devices)]
    for plan in sorted(plans, key=_seconds, reverse=True):
        min(groups, key=lambda group: sum(map(_seconds, group))).append(plan)
    plain = max(sum(map(_seconds, group)) for group in groups)
    return max(map(_cycled, groups)) / plain if plain > 0 else 1.0


def _cycled(group: Sequence[Planned]) -> float:
    """The seconds of one device, if each of its jobs takes a step in turn as long as that pays."""
    left = {plan.job: plan.left for plan in group}
    clock = sum(plan.seconds for plan in group)
    while going := [plan for plan in group if left[plan.job] > 0]:
        cycle = sum(plan.step_seconds for plan in going)
        if hides_tails(going):
            busy = sum(p.step_seconds - p.tail_seconds + p.swap_seconds for p in going)
            cycle = max(busy, max(plan.step_seconds + plan.swap_seconds for plan in going))
        cycles = min(left[plan.job] for plan in going)
        clock += cycles * cycle
        for plan in going:
            left[plan.job] -= cycles
    return clock


# ---- decide, on paper ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Paper:
    """What a run on paper has come to."""

    seconds: float = 0.0
    moves: int = 0
    swaps: float = 0.0
    waited: tuple[str, ...] = ()


def _on_paper(plans: Sequence[Planned], settings: FleetSettings) -> _Paper:
    """The run as `decide` would have it: without a stop rule, and with fewer, longer turns."""
    paper = _Paper()
    by_job = {plan.job: plan for plan in plans}
    total = sum(map(_seconds, plans)) / settings.devices
    coarse = max(settings.quantum_seconds, total / TURNS)
    state = FleetState.of(replace(settings, rule=None, quantum=None, quantum_seconds=coarse))
    left = {plan.job: plan.left for plan in plans}
    last: list[str | None] = [None] * settings.devices
    due: list[tuple[float, int, Event]] = [(0.0, n, Added(p.job)) for n, p in enumerate(plans)]
    number = len(due)
    while due:
        clock, _, event = heappop(due)
        paper.seconds = max(paper.seconds, clock)
        state, commands = decide(state, event)
        for command in commands:
            plan, device = by_job[command.job], command.device
            number += 1
            match command:
                case Start():
                    moved = state.jobs[plan.job].target is not None
                    paper.moves += moved
                    wait = (plan.seconds or settings.move_seconds) if moved else plan.seconds
                    answer = replace(
                        plan, device=device, step=plan.step + plan.left - left[plan.job],
                        left=left[plan.job], tail_seconds=0.0,
                    )  # fmt: skip
                case Yield():
                    continue  # all have the same priority here
                case Leave():
                    wait, answer = (
                        0.0,
                        Left(plan.job, device, plan.step + plan.left - left[plan.job]),
                    )
                case Turn():
                    swap = plan.swap_seconds if last[device] not in (None, plan.job) else 0.0
                    last[device] = plan.job
                    paper.swaps += swap
                    seconds = command.steps * plan.step_seconds
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
            paper.waited = tuple(dict.fromkeys((*paper.waited, *state.queue)))
    return paper


# ---- words --------------------------------------------------------------------------------------


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _duration(seconds: float) -> str:
    """For people: `2.5 h`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
