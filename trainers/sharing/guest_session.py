"""The live session of a guest: it plans the guest's steps, and runs them on a stage of its own.

reserved    the stage takes the memory that the plans need, and keeps it
borrowed    until `give_back`, the first bytes of the training's arena belong to the stage
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from offload import Costs, Plan, Runner, TaskGraph
from offload.gate import Gate
from offload.graph.taskgraph import HOST
from offload.live.runner_plans import PlainPlanner
from offload.live.session import LiveSession
from offload.plans.plan import Budget
from offload.running.drivers.cuda import Cuda
from offload.running.stage import Stage


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


class GuestPlanner(PlainPlanner):
    """The plans of one session."""

    def __init__(self, costs: Costs | None, stage: Stage, lender: Callable[[], Stage | None]):
        """`lender` returns the stage whose memory is borrowed; None: this one has its own."""
        super().__init__(costs)
        self._stage = stage
        self._lender = lender
        self._sizes: dict[int, int] = {}
        """The bytes of the device that all plans need, by arena."""
        self._lent: dict[int, int] = {}
        self._loan = ExitStack()

    def plan(self, graph: TaskGraph, budget: Budget) -> Plan:
        plan = super().plan(graph, budget)
        self._make_room(plan)  # tensors move to their places before it runs
        return plan

    def runner(self, plan: Plan, key: Hashable) -> Runner:
        return Runner(plan, key=key, stage=self._stage)

    def note_plan(self, key: Hashable, plan: Plan) -> None:
        self._make_room(plan)

    def run(self, runner: Runner, key: Hashable, batch: Collection[torch.Tensor]) -> Sequence[Any]:
        self._borrow()
        return super().run(runner, key, batch)

    def _make_room(self, plan: Plan) -> None:
        for number, nbytes in plan.memgraph.arenas.items():
            if number != HOST:
                self._sizes[number] = max(nbytes, self._sizes.get(number, 0))
        self._borrow()

    def _borrow(self) -> None:
        lender = self._lender()
        if lender is None or self._lent == self._sizes:
            return
        self.give_back()
        arena = self._loan.enter_context(lender.lend_to_guest(self._sizes))
        self._loan.enter_context(self._stage.borrow(arena))
        self._lent = {**self._sizes}

    def give_back(self) -> None:
        """Move the guest's tensors out of the borrowed memory."""
        self._lent = {}
        self._loan.close()

    def close(self) -> None:
        self._stage.close()


class GuestSession:
    """A session in a thread of its own. It opens with the first request, and again if the training
    has moved to another device. Callers must have the gate."""

    def __init__(
        self,
        host: Host,
        net: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        budget: int | None,
        borrows: bool,
    ) -> None:
        """`net`, `optimizers`: whose tensors it uses. `budget`: the bytes of the device that it may
        take. `borrows`: whether it has no memory of its own."""
        self.host = host
        self.borrows = borrows
        self.device = host.device
        self._net = net
        self._optimizers = optimizers
        self._budget = budget
        self._thread = ThreadPoolExecutor(1, "guest")
        # It starts here: a Ctrl-C beside its start would have the executor start another one.
        self._thread.submit(tuple).result()
        self._live: tuple[LiveSession, GuestPlanner] | None = None

    @property
    def is_open(self) -> bool:
        return self._live is not None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the session's thread."""
        try:
            return self._thread.submit(function, *arguments).result()
        except KeyboardInterrupt:
            wait([self._thread.submit(tuple)])  # the call has ended before: it has the gate
            raise

    def show_weights(self, copies: bool = False) -> None:
        """Let any thread read the net's tensors. `copies`: in memory that it may write."""
        if self._live is not None:
            self.call(lambda live: live.show_weights(copies=copies), self._live[0])

    def close(self) -> None:
        try:
            self.call(self._end)
        finally:
            self._thread.shutdown()

    # ---- in its own thread -----------------------------------------------------------------------

    def open(self) -> tuple[LiveSession, GuestPlanner]:
        """Return the session on the training's device."""
        if self.device != self.host.device:
            self._end()
            self.device = self.host.device
        if self._live is None:
            driver = self.host.guest_driver()
            stage = Stage(self.device, None if driver is None else "cuda", driver=driver)
            planner = GuestPlanner(self.host.costs, stage, self._lender)
            session = LiveSession(
                self._net, *self._optimizers, budget=self._budget, device=self.device,
                planner=planner,
            )  # fmt: skip
            self._live = session.__enter__(), planner
        return self._live

    def _lender(self) -> Stage | None:
        """Return the stage from which it borrows, while there is a training."""
        return self.host.stage if self.borrows else None

    def _end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            session, planner = live
            try:
                session.__exit__(None, None, None)
            finally:
                planner.close()
