"""A net, or a training step, that has the device whenever it asks, between two nodes of a training.

    training   | F1 F2 |  stands aside  | F3 F4 ...
    request          ^ asks | answer |      from any thread; the higher priority first

Its memory is one of two:

    a reserve    asked for before the training was planned, whose budget is smaller by it. Its
                 weights stay there
    borrowed     asked for later, beside a training with a budget: for every answer the first bytes
                 of the training's arena go to the host and come back, and so do its own weights

The net's own Python runs in every request, as a live step in the guest's thread, so it may change
between two of them. An answer has the bits that it has alone.

A request that may draw random numbers, or that borrows memory, comes only while a step stands aside
(gate.py), and has a random state of its own: between two steps the training's thread may draw, too,
or read its tensors. While no training runs, only the thread that opened the block may draw.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch

from loaders.closing import ClosedAtEnd
from offload import OffloadError
from trainers.random_state import RandomState
from trainers.sharing.guest_session import GuestSession

SHARES = (0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of some seconds. NaN if there are none."""

    p50: float
    p95: float
    most: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Percentiles":
        if not seconds:
            return cls(*[float("nan")] * 3)
        ordered = sorted(seconds)
        p50, p95 = (ordered[ceil(share * len(ordered)) - 1] for share in SHARES)
        return cls(p50, p95, ordered[-1])

    def describe(self) -> str:
        p50, p95, most = (1e3 * value for value in (self.p50, self.p95, self.most))
        return f"{p50:.1f} / {p95:.1f} / {most:.1f} ms"


@dataclass(frozen=True, slots=True)
class Waits:
    """All requests so far."""

    starts: Sequence[float]
    """Seconds from each request to the moment when it had the device."""
    answers: Sequence[float]
    """Seconds from each request to its answer."""
    stood_aside: float
    """Seconds in which the training could have run, and stood aside."""

    def metrics(self, name: str = "sharing") -> dict[str, float]:
        """Return the metrics for loggers, in milliseconds."""
        if not self.answers:
            return {}
        metrics = {f"{name}/requests": float(len(self.answers))}
        for what, seconds in (("start", self.starts), ("answer", self.answers)):
            times = Percentiles.of_seconds(seconds)
            for key, value in (("p50", times.p50), ("p95", times.p95), ("max", times.most)):
                metrics[f"{name}/{what}_{key}_ms"] = 1e3 * value
        return metrics | {f"{name}/training_stood_aside_s": self.stood_aside}

    def describe(self) -> str:
        """Return one line."""
        if not self.answers:
            return "no request was made"
        start, answer = Percentiles.of_seconds(self.starts), Percentiles.of_seconds(self.answers)
        return (
            f"{len(self.answers)} requests; p50 / p95 / max:"
            f" {start.describe()} to the start, {answer.describe()} to the answer; the training"
            f" stood aside for {self.stood_aside:.2f} s"
        )


class RequestTimes:
    """Collects the times of requests, from any thread."""

    def __init__(self, stood_aside: float) -> None:
        """`stood_aside`: the seconds for which steps had stood aside before."""
        self._stood_aside = stood_aside
        self._starts: list[float] = []
        self._answers: list[float] = []
        self._lock = threading.Lock()

    def add(self, start: float, answer: float) -> None:
        with self._lock:
            self._starts.append(start)
            self._answers.append(answer)

    def summary(self, stood_aside: float) -> Waits:
        with self._lock:
            starts, answers = tuple(self._starts), tuple(self._answers)
        return Waits(starts, answers, stood_aside - self._stood_aside)


class HighPriority(ClosedAtEnd):
    """A context manager. Call it with the net's inputs, or with a batch, from any thread."""

    def __init__(
        self,
        session: GuestSession,
        work: Callable[..., Any],
        *,
        priority: int = 0,
        seed: int = 0,
        on_close: Callable[["HighPriority"], object],
    ) -> None:
        """`work` computes the answer for some inputs."""
        self._session = session
        self._gate = session.host.gate
        self._work = work
        self._priority = priority
        self._on_close = on_close
        self._random = GuestRandomState(seed)
        self._opened_by = threading.get_ident()
        self._times = RequestTimes(self._gate.stood_aside)
        self.closed = False

    @property
    def waits(self) -> Waits:
        """How long the requests took so far."""
        return self._times.summary(self._gate.stood_aside)

    def __call__(self, *inputs: torch.Tensor, priority: int | None = None) -> Any:
        """Return what the net makes of these inputs, or the loss of a training step."""
        self._check_open()
        for number, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                raise OffloadError(
                    f"input {number} is a {type(value).__name__}; a tensor is expected: make one of"
                    " it"
                )
        may_draw = self._random.draws is not False
        priority = self._priority if priority is None else priority
        inside = self._session.borrows or may_draw
        with self._gate.granted(priority, inside=inside) as guest:
            self._check_open()
            if may_draw and not guest.inside:
                self._check_thread()
            answer = self._session.call(self._answer, inputs, may_draw)
        self._times.add(guest.granted - guest.asked, guest.ended - guest.asked)
        return answer

    def _check_open(self) -> None:
        if self.closed:
            raise OffloadError("this use of high priority is over: its block was left")

    def _check_thread(self) -> None:
        """Raise if the program may draw random numbers beside this request, which may draw, too."""
        if threading.get_ident() == self._opened_by:
            return
        draws = self._random.draws
        why = "its net draws random numbers" if draws else "it is the first one: it may draw"
        raise OffloadError(
            f"no training runs, and this request uses the process's random generators, because"
            f" {why}: nobody keeps the rest of the program from drawing beside it. Ask from the"
            " thread that opened high_priority(), or while the training runs"
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no request run in this block. In it any thread may read and write the net's tensors,
        to give it newer weights; on a GPU, all of them take their bytes there meanwhile."""
        with self._gate.granted(self._priority):
            if not self._session.is_open:
                yield
                return
            self._session.show_weights(copies=True)
            try:
                yield
            finally:
                self._session.show_weights()

    def _answer(self, inputs: Sequence[torch.Tensor], may_draw: bool) -> Any:
        """Answer, in the session's thread."""
        session, planner = self._session.open()
        device, random_state = self._session.device, self._random
        session.let_draw(may_draw)
        on_device = [tensor.to(device) for tensor in inputs]
        own_state = random_state.restored(device) if may_draw else nullcontext()
        try:
            with own_state, session.step("request"):
                answer = self._work(*on_device)
            random_state.draws = bool(random_state.draws)
            return answer
        finally:
            planner.give_back()
            session.show_weights()
            random_state.draws = session.draws or random_state.draws

    def close(self) -> None:
        """Give its tensors memory of their own again. It may be called again."""
        if not self.closed:
            with self._gate.granted(self._priority):
                self.closed = True
                self._session.close()
        self._on_close(self)


class GuestRandomState:
    """The random state of a guest."""

    def __init__(self, seed: int) -> None:
        self.draws: bool | None = None
        """Whether the guest draws random numbers; None: it is unknown."""
        self._seed = seed
        self._state: RandomState | None = None

    @contextmanager
    def restored(self, device: torch.device) -> Iterator[None]:
        """Restore the guest's state for this block, and the training's state after it."""
        training = RandomState.capture(device)
        try:
            if self._state is None:
                torch.manual_seed(self._seed)
                random.seed(self._seed)
                np.random.seed(self._seed)
                self._state = RandomState.capture(device)
            else:
                self._state.restore(device)
            yield
            before, self._state = self._state, RandomState.capture(device)
            self.draws = self._state.without_torch != before.without_torch or self.draws
        finally:
            training.restore(device)
