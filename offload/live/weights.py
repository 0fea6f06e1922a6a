"""What lives from step to step: its storages give their bytes to homes of ours, which a plan moves.

the user's storage   --adopt-->   no bytes; shows those at home when somebody looks
every alias of it                 follows by itself, for it is the same storage
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from sys import getrefcount
from typing import Any

import torch

from offload.graph.taskgraph import Role
from offload.live.graphs import Weight
from offload.live.placing import place_tensors


class LiveWeights:
    """The adopted storages of a session."""

    def __init__(
        self,
        core: Any,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._core = core
        self._module = module
        self._optimizers = optimizers
        self.device = device
        groups = (group["params"] for each in optimizers for group in each.param_groups)
        self.parameters = tuple(dict.fromkeys((*module.parameters(), *chain(*groups))))
        self._number = count(1)
        self._known: dict[int, Weight] = {}
        self._names: set[str] = set()
        self._places: set[int] = set()
        """The places whose owner is another one in every step."""
        self._written: dict[int, dict[int, int]] = {}
        """By tape and slot."""
        self._claim_what_was_read()

    def _claim_what_was_read(self) -> None:
        """Weights and states that torch has read from a file look as if numpy had them, but if
        nobody else holds them, it has not. (It takes no tensor that requires gradients.)"""
        lone = torch.nn.Module()
        lone.register_buffer("lone", torch.empty(0))
        for part in self._module.modules():
            for tensors in (part.parameters(recurse=False), part.buffers(recurse=False)):
                self._claim(tensors, _count_references(lone.buffers(recurse=False)))
        for state in chain(*(each.state.values() for each in self._optimizers)):
            self._claim(state.values(), _count_references({"": torch.empty(0)}.values()))

    def _claim(self, tensors: Iterable[Any], alone: int) -> None:
        """`alone`: the references to a tensor that nobody else holds."""
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_sparse:
                continue
            if tensor.requires_grad or getrefcount(tensor) <= alone:
                storage = tensor.untyped_storage()
                self._core.claim(tensor)
                del storage

    @contextmanager
    def place_tensors(self) -> Iterator[None]:
        """Within it, all tensors of the module are on the device (placing.py)."""
        with place_tensors(self._core, self._module, self._optimizers, self.device) as places:
            for tensor, name, role in self.list_named():
                if tensor in places and places[tensor].id not in self._known:
                    self._add((places[tensor].id, places[tensor].home), name, role)
            yield

    def drop_lost(self) -> None:
        """Drop gradients without bytes, and states that a step has made which did not run: nobody
        could copy or move them."""
        for parameter in self.parameters:
            if parameter.grad is not None and self._core.is_lost(parameter.grad):
                parameter.grad = None
        for optimizer in self._optimizers:
            for parameter, state in [*optimizer.state.items()]:
                tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
                if any(map(self._core.is_lost, tensors)):
                    del optimizer.state[parameter]

    def copy_states(self) -> list[dict[Any, Any]]:
        """By optimizer: its states, to be put back."""
        return [{p: dict(s) for p, s in each.state.items()} for each in self._optimizers]

    def put_states_back(self, states: list[dict[Any, Any]]) -> None:
        """Drop states whose numbers no kernel has made."""
        for optimizer, before in zip(self._optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(before)

    def homes(self) -> dict[int, torch.Tensor]:
        """By number: the storages that are adopted, where their bytes are."""
        return {number: weight.home for number, weight in self._known.items()}

    def states(self) -> list[torch.Tensor]:
        """The tensors of the optimizers."""
        return [tensor for tensor, _, role in self.list_named() if role is Role.STATE]

    def adopt_weights(self, tape: Any) -> dict[int, Weight]:
        """The weights of a tape, by slot. New storages are adopted: those of the module, of the
        optimizers, and whatever else the step writes."""
        for tensor, name, role in self.list_named():
            if tensor.device.type == self.device.type and tape.can_adopt(tensor):
                self._add(self._core.adopt(tensor), name, role)
        origins = tape.origins
        for slot in tape.written:
            is_the_users = origins[slot] == self._core.GIVEN and not tape.is_exposed(slot)
            if is_the_users and tape.nbytes(slot):
                self._adopt_written(tape, slot)
        return {slot: self._known[n] for slot, n in enumerate(tape.origins) if n >= 0}

    def alive_weights(self) -> Collection[Weight]:
        """Every weight whose owner is alive, and all places for what crosses a cut."""
        alive = {*self._core.adopted(), *self._places}
        self._known = {number: weight for number, weight in self._known.items() if number in alive}
        self._names = {weight.name for weight in self._known.values()}
        return self._known.values()

    def _add(self, adopted: tuple[int, torch.Tensor], name: str, role: Role) -> Weight:
        number, home = adopted
        name = f"{name}#{next(self._number)}" if name in self._names else name
        self._names.add(name)
        self._known[number] = Weight(name, role, home)
        return self._known[number]

    def _adopt_written(self, tape: Any, slot: int) -> None:
        """Adopt what the step writes, such as a batch, which is another one in every step."""
        number, home = tape.adopt(slot)
        self._add((number, home), "tensor", Role.BUFFER)
        self._written.setdefault(tape.leaf, {})[slot] = number
        self._places.add(number)

    def take_places(self, tape: Any) -> None:
        """Give what the tape writes the place that was its predecessor's."""
        if not (places := self._written.get(tape.leaf)):
            return
        taken, origins = {*self._core.adopted()}, tape.origins
        for slot, place in places.items():
            is_free = place not in taken and origins[slot] == self._core.GIVEN
            if is_free and not tape.is_exposed(slot):
                tape.adopt_at(slot, place, self._known[place].home)

    def forget_places(self) -> None:
        """Drop the places that nobody has at present."""
        self._places &= {*self._core.adopted()}
        self._written.clear()

    def states_among(self, tape: Any, slots: Collection[int]) -> dict[int, str]:
        """The names of those slots that are states of an optimizer."""
        named = ((tensor, name) for tensor, name, role in self.list_named() if role is Role.STATE)
        names = {slot: name for tensor, name in named for slot in tape.slots_of([tensor])}
        return {slot: name for slot, name in names.items() if slot in slots}

    def place_across_cut(self, nbytes: int, state: str | None) -> tuple[int, Weight]:
        """A place for what is made before a cut and used after it, and its number. `state`: its
        name, if it is an optimizer's."""
        number, home = self._core.new_id(), torch.empty(nbytes, dtype=torch.uint8)
        self._places.add(number)
        role = Role.STATE if state else Role.BUFFER
        return number, self._add((number, home), state or f"cut.{next(self._number)}", role)

    def list_named(self) -> Iterator[tuple[torch.Tensor, str, Role]]:
        """The tensors of the module and of the optimizers."""
        names: dict[torch.Tensor, str] = {}
        for name, parameter in self._module.named_parameters():
            names[parameter] = name
            yield _local_tensor(parameter), name, Role.PARAMETER
        for name, buffer in self._module.named_buffers():
            yield _local_tensor(buffer), name, Role.BUFFER
        for parameter, state in chain(*(each.state.items() for each in self._optimizers)):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield (
                        _local_tensor(value),
                        f"{names.get(parameter, 'optimizer')}.{key}",
                        Role.STATE,
                    )


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank has; any other tensor as it is."""
    with torch.no_grad():  # with gradients it would be a new view
        return getattr(tensor, "to_local", lambda: tensor)()


def _count_references(tensors: Iterable[torch.Tensor]) -> int:
    """The number of references to the first tensor in a walk over them."""
    for tensor in tensors:
        return getrefcount(tensor)
    raise ValueError("there is no tensor")
