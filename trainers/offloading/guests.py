"""Guests of high priority use the device of a strategy's run between two nodes of its steps.

    with strategy.high_priority(net, budget="1GiB") as serve:
        y = serve(x)                        from any thread, while the trainer fits

Before the run is planned its budget becomes smaller by that of the guest. Later a guest borrows the
run's arena for its answers (trainers/sharing/high_priority.py).
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.optim import Optimizer

from offload import Costs, OffloadError
from offload.gate import Gate
from offload.running.drivers.cuda import Cuda
from offload.running.stage import Stage
from offload.sizes import parse_size
from trainers.sharing.guest_session import GuestSession
from trainers.sharing.high_priority import HighPriority
from trainers.steps.target import Target

Loss = Callable[[Any, Any], torch.Tensor]


class Guests:
    """The guests of one strategy."""

    def __init__(
        self,
        target: Callable[[], Target],
        stage: Callable[[], Stage | None],
        module: Callable[[], torch.nn.Module | None],
    ) -> None:
        """`target`, `stage`, `module`: those of the run; there is no stage before the first step,
        and no module before the first run."""
        self.gate = Gate()
        self.gate.close()  # until the trainer sets the strategy up
        self._target = target
        self._stage = stage
        self._module = module
        self._nets: dict[HighPriority, torch.nn.Module] = {}
        """The nets of the guests that have not left."""
        self._reserves: dict[HighPriority, int] = {}
        self._known: list[HighPriority] = []

    # ---- for a guest -----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._target().device

    @property
    def costs(self) -> Costs | None:
        return self._target().costs

    @property
    def stage(self) -> Stage | None:
        return self._stage()

    def guest_driver(self) -> Cuda | None:
        target = self._target()
        return Cuda(target.device, high=True) if target.on_gpu else None

    # ---- for the strategy ------------------------------------------------------------------------

    def reserved(self) -> int:
        """Return the bytes that are taken off the run's budget."""
        return sum(self._reserves.values())

    @property
    def admitted(self) -> tuple[HighPriority, ...]:
        """All guests of this strategy, with those that have left."""
        return tuple(self._known)

    def admit(
        self,
        net: torch.nn.Module,
        budget: str | int | None,
        loss: Loss | None,
        optimizer: Optimizer | None,
        priority: int,
        seed: int,
        has_budget: bool,
    ) -> HighPriority:
        """`has_budget`: whether the run itself has a budget."""
        if (loss is None) != (optimizer is None):
            raise OffloadError(
                "a training job of high priority needs both loss= and optimizer=, and one was"
                " given: give both, or neither for answers without gradients"
            )
        try:
            nbytes = None if budget is None else parse_size(budget)
        except ValueError as error:
            raise OffloadError(f"high_priority(budget={budget!r}): {error}") from None
        if nbytes is None and has_budget:
            raise OffloadError(
                "this run has a budget, so high_priority() needs one, too: give budget='1GiB', what"
                " its net may take of the device"
            )
        for other in self._nets.values():
            _check_apart(net, other, "another net of high_priority(), whose block was not left")
        if not self.gate.closed:
            self._check_apart_from_module(net)
        borrows = has_budget and self._stage() is not None
        if loss is None or optimizer is None:
            work, optimizers = _answering(net), ()
        else:
            work, optimizers = _training(net, loss, optimizer), (optimizer,)
        session = GuestSession(self, net, optimizers, nbytes, borrows)
        guest = HighPriority(session, work, priority=priority, seed=seed, on_close=self._forget)
        if nbytes is not None and has_budget and not borrows:
            self._reserves[guest] = nbytes
        self._known.append(guest)
        self._nets[guest] = net
        self.gate.armed = True
        return guest

    def check(self) -> None:
        """Raise `OffloadError` if a guest has tensors of the module that is about to run."""
        for net in self._nets.values():
            self._check_apart_from_module(net)

    def explain(self) -> list[str]:
        """Return a line for each guest: how long its requests waited."""
        return [f"high priority: {guest.waits.describe()}" for guest in self._known]

    def log_waits(self, trainer: L.Trainer) -> None:
        """Give the loggers how long the requests of this run took."""
        for number, guest in enumerate(self._known):
            name = f"sharing{number}" if len(self._known) > 1 else "sharing"
            if metrics := guest.waits.metrics(name):
                for logger in trainer.loggers:
                    logger.log_metrics(metrics, trainer.global_step)

    def _check_apart_from_module(self, net: torch.nn.Module) -> None:
        module = self._module()
        if module is not None:
            _check_apart(net, module, "the module that this strategy runs")

    def _forget(self, guest: HighPriority) -> None:
        """Forget a guest's reserve. Plans that are made from now on have it."""
        self._reserves.pop(guest, None)
        self._nets.pop(guest, None)
        self.gate.armed = any(not guest.closed for guest in self._known)


def _answering(net: torch.nn.Module) -> Callable[..., Any]:
    @torch.no_grad()
    def answer(*inputs: torch.Tensor) -> Any:
        return net(*inputs)

    return answer


def _training(net: torch.nn.Module, loss: Loss, optimizer: Optimizer) -> Callable[..., Any]:
    def train(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net(*batch[:-1]), batch[-1])
        value.backward()
        optimizer.step()
        return value.detach()

    return train


def _check_apart(net: torch.nn.Module, other: torch.nn.Module, whose: str) -> None:
    """Raise `OffloadError` if the two have a tensor in common: each moves its own."""
    theirs = {id(tensor) for tensor in (*other.parameters(), *other.buffers())}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if id(tensor) in theirs:
            raise OffloadError(
                f"the net of high_priority() shares its tensor {name} with {whose}, and both would"
                " move it: give a copy, copy.deepcopy(net), and load newer weights into it between"
                " two requests"
            )
