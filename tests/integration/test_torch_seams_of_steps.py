"""The private names of torch that tell what a step may change: hooks, schedules, compiled code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import offload.torch_seams as t


def _optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def _hooks_of_all_modules() -> bool:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    found = any(t.GLOBAL_HOOKS)
    handle.remove()
    return found and not any(t.GLOBAL_HOOKS)


def _scheduled() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.5)
    before = optimizer.step
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not t.counts_steps(before)
    return optimizer, schedule


def _step_is_counted() -> bool:
    optimizer, _ = _scheduled()
    return t.counts_steps(optimizer.step)


def _last_rates() -> bool:
    _, schedule = _scheduled()
    before = t.swap_last_rates(schedule, [0.25])
    return before == [0.5] and schedule.get_last_lr() == [0.25] and t.LAST_RATES in vars(schedule)


def _sees_a_compiled_call() -> bool:
    seen: list[int] = []
    compiled = torch.compile(torch.neg, backend="eager")
    with t.compiled_calls(lambda: seen.append(1)):
        compiled(torch.ones(1))
    return bool(seen)


def _has_a_conversion() -> bool:
    return callable(getattr(torch.nn.Module, t.CONVERSION))


def _has_compiled_graphs() -> bool:
    torch.compile(torch.neg)
    return callable(t.compiled_graphs().__call__)


def _keeps_only_with_autograd() -> bool:
    """The workspace of an LSTM's kernel, in the two modes."""
    given: Any = (torch.ones(1, 1, 2), *torch.nn.LSTM(2, 2).all_weights[0], *torch.zeros(2, 1, 2))
    given += (False, [], 2, 2, 1, True, False, False, True)
    assert {"mkldnn_rnn_layer"} == t.ASKING_AUTOGRAD
    with torch.no_grad():
        without = torch.mkldnn_rnn_layer(*given)[3]
    return torch.mkldnn_rnn_layer(*given)[3].numel() > 0 and without is None


def _generator_by_its_key() -> bool:
    own, default = torch.Generator(), torch.default_generator
    return t.generator_key(own) == t.generator_key(own) != t.generator_key(default)


def _compiled() -> bool:
    plain = torch.nn.Linear(1, 1)
    return t.is_compiled(torch.compile(plain)) and not t.is_compiled(plain)  # type: ignore[arg-type]


def _step_hooks(register: str) -> bool:
    optimizer = _optimizer()
    before = t.has_step_hooks(optimizer)
    getattr(optimizer, register)(lambda *_: None)
    return not before and t.has_step_hooks(optimizer)


def _schedule_is_quiet() -> bool:
    """Warnings are errors: a schedule warns where an optimizer has not stepped."""
    optimizer = _optimizer()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    t.mark_stepped(optimizer)
    schedule.step()
    return True


def _stepped() -> torch.optim.Optimizer:
    """An optimizer on which a schedule and a step have left what they leave."""
    optimizer = _optimizer()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


def _own_step() -> bool:
    """The `step` that its class was written with, which calls no hooks."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return "own"

    written = Own.step
    Own([torch.nn.Parameter(torch.ones(1))], 0.1)  # its constructor wraps the step
    return Own.step is not written and t.without_step_hooks(Own.step) is written


def _higher_order() -> bool:
    """Every higher-order operator says which keys it does not look past."""
    known = t.higher_order_operators.values()
    return all(
        isinstance(op, t.HigherOrderOperator) and op.non_fallthrough_keys is not None
        for op in known
    ) and bool(known)


TORCH: dict[str, Callable[[], bool]] = {
    "address_of": lambda: t.address_of(one := torch.ones(2)) == one.data_ptr(),
    "HigherOrderOperator": _higher_order,
    "higher_order_operators": _higher_order,
    "ASKING_AUTOGRAD": _keeps_only_with_autograd,
    "GLOBAL_HOOKS": _hooks_of_all_modules,
    "counts_steps": _step_is_counted,
    "LAST_RATES": _last_rates,
    "swap_last_rates": _last_rates,
    "compiled_calls": _sees_a_compiled_call,
    "CONVERSION": _has_a_conversion,
    "compiled_graphs": _has_compiled_graphs,
    "generator_key": _generator_by_its_key,
    "is_compiled": _compiled,
    "has_step_hooks": lambda: (
        _step_hooks("register_step_pre_hook") and _step_hooks("register_step_post_hook")
    ),
    "mark_stepped": _schedule_is_quiet,
    "without_step_hooks": _own_step,
    "OF_STEPS": lambda: "_opt_called" in t.OF_STEPS and hasattr(_stepped(), "_opt_called"),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_has_what_we_need_of_its_steps(name: str) -> None:
    assert TORCH[name]()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    "apply, maker",
    [
        (lambda part: prune.l1_unstructured(part, "weight", 0.5), "prune"),
        (torch.nn.utils.weight_norm, "weight_norm"),
        (torch.nn.utils.spectral_norm, "spectral_norm"),
    ],
)
def test_a_hook_that_computes_a_weight_says_which(apply: Any, maker: str) -> None:
    part = torch.nn.Linear(4, 4)
    assert t.computed_by_hooks(part.__dict__) == []
    apply(part)
    assert t.computed_by_hooks(part.__dict__) == [("weight", f"torch.nn.utils.{maker}")]


def test_precisions_of_float32_are_read_and_put_back_whichever_way_they_were_set() -> None:
    before = t.float32_precisions()
    try:
        every: Any = torch.backends
        every.cuda.matmul.fp32_precision = "tf32"  # torch's older getters raise from here on
        changed = t.float32_precisions()
        assert changed != before and changed.count("tf32") == before.count("tf32") + 1
        t.set_float32_precisions(before)
        assert t.float32_precisions() == before
    finally:
        t.set_float32_precisions(before)
