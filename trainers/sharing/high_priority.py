"""A net, or a training step, that has the device whenever it asks, between two nodes of a training.

    training   | F1 F2 |  stands aside  | F3 F4 ...
    request          ^ asks | answer |      from any thread; the higher priority first

Its memory is one of two:

    a reserve    asked for before the training was planned, whose budget is smaller by it. Its
                 weights stay there
    borrowed     asked for later, beside a training with a budget: for every answer the first bytes
                 of the training's arena go to the host and come back, and so do its own weights

The net's own Python runs in every request, as a live step, in a thread of the guest's, so it may
change between two of them. An answer has the bits that it has alone. Who draws random numbers, may
draw some, or borrows memory comes only while a step stands aside (gate.py), and rolls dice of its
own: between two steps the training's thread may draw too, or read its tensors. While no training
runs nobody stands aside, so only the thread that opened the block may draw then.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from offload import Costs, OffloadError
from offload.gate import Gate
from offload.live.session import LiveSession
from offload.running.drivers.cuda import Cuda
from offload.running.stage import Stage
from trainers.dice import Dice
from trainers.sharing.guest_planner import GuestPlanner
from trainers.sharing.waits import Waits


class Host(Protocol):
    """The training whose device is used."""

    @property
    def gate(self) -> Gate: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def costs(self) -> Costs | None: ...

    @property
    def stage(self) -> Stage | None:
        """The stage of its steps; None before the first one and after the last."""
        ...

    def guest_driver(self) -> Cuda | None:
        """A driver of the device for a guest; None: the engine's own."""
        ...


class HighPriority:
    """A context manager. Call it with the net's inputs, or with a batch, from any thread."""

    def __init__(
        self,
        host: Host,
        work: Callable[..., Any],
        net: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        budget: int | None,
        *,
        priority: int = 0,
        seed: int = 0,
        borrows: bool = False,
        left: Callable[["HighPriority"], object],
    ) -> None:
        """`work` makes the answer of some inputs. `net`, `optimizers`: whose tensors it uses.
        `budget`: the bytes of the device that it may take. `borrows`: whether it has no memory of
        its own. `left` is called at the end."""
        self._host = host
        self._work = work
        self._net = net
        self._optimizers = optimizers
        self._budget = budget
        self._priority = priority
        self._seed = seed
        self._borrows = borrows
        self._left = left
        self._thread = ThreadPoolExecutor(1, "guest")
        """The session's."""
        self._session: LiveSession | None = None
        self._planner: GuestPlanner | None = None
        self._device = host.device
        self._dice: Dice | None = None
        """Its own, once it has been asked."""
        self._draws: bool | None = None
        """Whether it draws random numbers; None: nobody knows yet."""
        self._opened_by = threading.get_ident()
        self._starts: list[float] = []
        self._answers: list[float] = []
        self._aside = host.gate.stood_aside
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waits(self) -> Waits:
        """How long the requests took so far."""
        with self._lock:
            starts, answers = tuple(self._starts), tuple(self._answers)
        return Waits(starts, answers, self._host.gate.stood_aside - self._aside)

    def __call__(self, *inputs: torch.Tensor, priority: int | None = None) -> Any:
        """Return what the net makes of these inputs, or the loss of a training step."""
        self._check_open()
        _check_tensors(inputs)
        may_draw = self._draws is not False
        priority = self._priority if priority is None else priority
        inside = self._borrows or may_draw
        with self._host.gate.granted(priority, inside=inside) as guest:
            self._check_open()
            if may_draw and not guest.inside:
                self._check_thread()
            answer = self._in_thread(self._answer, inputs, may_draw)
        with self._lock:
            self._starts.append(guest.granted - guest.asked)
            self._answers.append(guest.ended - guest.asked)
        return answer

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError("this use of high priority is over: its block was left")

    def _check_thread(self) -> None:
        """Raise if the program may draw random numbers beside this request, which may do so."""
        if threading.get_ident() == self._opened_by:
            return
        why = "its net draws random numbers" if self._draws else "it is the first one: it may draw"
        raise OffloadError(
            f"no training runs, and this request uses the process's random generators, because"
            f" {why}: nobody keeps the rest of the program from drawing beside it. Ask from the"
            " thread that opened high_priority(), or while the training runs"
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no request run in this block. In it any thread may read and write the net's tensors,
        to give it newer weights; on a GPU, all of them take their bytes there meanwhile."""
        with self._host.gate.granted(self._priority):
            if self._session is None:
                yield
                return
            self._in_thread(partial(self._session.show_weights, copies=True))
            try:
                yield
            finally:
                self._in_thread(self._session.show_weights)

    def _in_thread(self, do: Callable[..., Any], *given: Any) -> Any:
        done = self._thread.submit(do, *given)
        try:
            return done.result()
        finally:
            wait([done])  # after Ctrl-C, too: it has the gate

    # ---- while it has the gate, in its own thread ------------------------------------------------

    def _answer(self, inputs: Sequence[torch.Tensor], may_draw: bool) -> Any:
        session, planner = self._opened()
        session.let_draw(may_draw)
        there = [each.to(self._device) for each in inputs]
        try:
            with self._own_dice() if may_draw else nullcontext(), session.step("request"):
                answer = self._work(*there)
            self._draws = bool(self._draws)
            return answer
        finally:
            planner.give_back()
            session.show_weights()
            self._draws = session.draws or self._draws

    def _opened(self) -> tuple[LiveSession, GuestPlanner]:
        """The session on the training's device."""
        if self._device != self._host.device:
            self._end()
            self._device = self._host.device
        if self._session is None or self._planner is None:
            driver = self._host.guest_driver()
            stage = Stage(self._device, None if driver is None else "cuda", driver=driver)
            planner = GuestPlanner(self._host.costs, stage, self._lender)
            of_session = {"budget": self._budget, "device": self._device, "planner": planner}
            session = LiveSession(self._net, *self._optimizers, **of_session)
            self._session, self._planner = session.__enter__(), planner
        return self._session, self._planner

    def _lender(self) -> Stage | None:
        """Whose arena it borrows, as long as there is a training."""
        return self._host.stage if self._borrows else None

    @contextmanager
    def _own_dice(self) -> Iterator[None]:
        """Roll its own dice for this block, and leave the training's as they lay."""
        training = Dice.now(self._device)
        try:
            if self._dice is None:
                _seed_all(self._seed)
                self._dice = Dice.now(self._device)
            else:
                self._dice.roll(self._device)
            yield
            before, self._dice = self._dice, Dice.now(self._device)
            self._draws = self._dice.of_python != before.of_python or self._draws
        finally:
            training.roll(self._device)

    def _end(self) -> None:
        session, self._session = self._session, None
        planner, self._planner = self._planner, None
        if session is not None and planner is not None:
            try:
                session.__exit__(None, None, None)
            finally:
                planner.close()

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Give its tensors memory of their own again. It may be called again."""
        if not self._closed:
            with self._host.gate.granted(self._priority):
                self._closed = True
                try:
                    self._in_thread(self._end)
                finally:
                    self._thread.shutdown()
        self._left(self)

    def __enter__(self) -> "HighPriority":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_tensors(inputs: Sequence[Any]) -> None:
    for number, one in enumerate(inputs):
        if not isinstance(one, torch.Tensor):
            raise OffloadError(
                f"input {number} is a {type(one).__name__}; a tensor is expected: make one of it"
            )


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
