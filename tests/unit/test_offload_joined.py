"""Fused updates in one call."""

import copy
from typing import Any

import pytest
import torch

from offload.memory.cpu_shim import load
from offload.optimizer.joint_updates import JointUpdate, joined
from offload.optimizer.updates import update_of
from offload.program.kernels import Call, Value

SIZES = (3, 64, 1000, 4097)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
}


class Task:
    """Two groups of parameters, and a call for the update of each."""

    def __init__(self, kind: str, fused: bool = True) -> None:
        torch.manual_seed(0)
        make, options = KINDS[kind]
        self.parameters = [torch.nn.Parameter(torch.randn(n)) for n in SIZES]
        first, second = self.parameters[::2], self.parameters[1::2]
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second, "lr": 3e-3}]
        self.optimizer = make(groups, fused=fused, **options)
        self.tensors: list[torch.Tensor] = []
        self.calls = []
        for p in self.parameters:
            group = next(n for n, g in enumerate(groups) if any(p is q for q in g["params"]))
            update = update_of(self.optimizer, group, p)
            states = [self.optimizer.state[p][key] for key in update.states]
            p.grad = torch.randn_like(p)
            self.calls.append(Call(update, tuple(map(self._value, (p.data, p.grad, *states)))))

    def _value(self, tensor: torch.Tensor) -> Value:
        self.tensors.append(tensor)
        return Value(len(self.tensors) - 1, tensor.dtype, tuple(tensor.size()), tensor.stride())

    def view(self, value: Value) -> torch.Tensor:
        return self.tensors[value.buffer]

    def counted(self) -> None:
        for p in self.parameters:
            if "step" in self.optimizer.state.get(p, {}):
                self.optimizer.state[p]["step"] += 1

    def state(self) -> Any:
        state = self.optimizer.state_dict()["state"]
        return copy.deepcopy(([p.data for p in self.parameters], state))


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_a_group_is_the_optimizers_own_step_to_the_bit(kind: str) -> None:
    ours, theirs = Task(kind), Task(kind)
    runs = joined(ours.calls, ours.view)
    assert len(runs) == 2
    for step in range(3):
        ours.optimizer.param_groups[0]["lr"] = theirs.optimizer.param_groups[0]["lr"] = (
            0.1 / 2**step
        )
        for _, run in runs:
            run()
        ours.counted()
        theirs.optimizer.step()
        torch.testing.assert_close(ours.state(), theirs.state(), rtol=0, atol=0)


def test_what_was_fused_when_it_was_joined_may_be_so_no_more() -> None:
    ours, theirs = Task("adamw"), Task("adamw")
    runs = joined(ours.calls, ours.view)
    for task in (ours, theirs):
        for group in task.optimizer.param_groups:
            group["fused"] = None
    for _, run in runs:
        run()
    ours.counted()
    theirs.optimizer.step()
    torch.testing.assert_close(ours.state(), theirs.state(), rtol=0, atol=0)


def test_updates_that_are_not_fused_and_other_calls_stay_by_themselves() -> None:
    task = Task("adamw", fused=False)
    assert joined(task.calls, task.view) == []
    fused = Task("adamw")
    other = Call(torch.ops.aten.add_.Tensor, fused.calls[0].args[:2])
    assert joined([fused.calls[0], other], fused.view) == []


def test_a_call_for_several_allocates_what_calls_for_each_do() -> None:
    task = Task("adamw")
    shim = load()

    def allocated(run: JointUpdate) -> list[int]:
        return [event.nbytes for event in shim.record(run, lambda _: None)[1].events]

    [(_, several), _] = joined(task.calls, task.view)
    [(_, one)] = joined(task.calls[:1], task.view)
    assert len(several.updates) == 2
    assert allocated(several) == 2 * allocated(one) != []
