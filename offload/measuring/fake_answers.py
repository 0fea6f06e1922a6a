"""Compares what kernels return with what their fakes said in the trace, and learns from it.

    trace      out (8, 4)   workspace (0,)         a plan knows results only by their fakes
    measured   out (8, 4)   workspace (28672,)     Misjudged, before anybody reads the 0 bytes
    learned    this op over such arguments: out (8, 4), workspace (28672,)
    traced again, with what is learned

A fake may err about sizes (workspaces), types, strides, and about which results share memory. A
plan made of that would be wrong, or call other kernels than eager does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.caching.plan_cache import PlanCache
from offload.errors import CaptureError
from offload.measuring.call_uses import Use
from offload.measuring.distinct_calls import at_zero, signature
from offload.measuring.kept_costs import KeptCosts
from offload.memory.placement import flat
from offload.program.kernels import Call, Value, alignment_on
from offload.program.layouts import KernelLayouts
from offload.program.trees import mapped
from offload.torch_seams import OpOverload, storage_key

ADVICE = "Write the step without this op, or report it"


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a kernel returned."""

    home: int
    """The address of its storage."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


Answer = tuple[Result | None, ...]
"""What a kernel returned, by position. The homes only tell which results share memory."""


class Misjudged(CaptureError):
    """Kernels return something else than what was traced."""

    def __init__(self, message: str, answers: dict[Any, Answer]) -> None:
        """`answers`: what kernels return, by their keys, as far as a trace can make use of it."""
        super().__init__(message)
        self.answers = answers


class Learned:
    """What the kernels of a step return where their fakes are wrong, and what they cost if that is
    kept."""

    def __init__(self, cache: PlanCache | None = None) -> None:
        """`cache`: where costs are kept for later starts of the same run."""
        self.kept = None if cache is None else KeptCosts(cache)
        self.layouts = KernelLayouts()
        self._answers: dict[Any, dict[Any, Answer]] = {}
        """By op, then by all of the call."""

    def add(self, answers: Mapping[Any, Answer]) -> bool:
        """Whether any of it is new, so that another trace differs."""
        new = {key: answer for key, answer in answers.items() if not _alike(answer, self._of(key))}
        for key, answer in new.items():
            self._answers.setdefault(key[0], {})[key] = answer
        return bool(new)

    def _of(self, key: Any) -> Answer | None:
        return self._answers.get(key[0], {}).get(key)

    def errs(self, op: Any) -> bool:
        """Whether the fakes of an op are known to be wrong somewhere."""
        return op in self._answers

    def of(self, call: Call, device: torch.device) -> Answer | None:
        """What is known about the results of a call in the trace."""
        return self._of(key_of(at_zero(call, alignment_on(device)), device))


def key_of(call: Call, device: torch.device) -> tuple[Any, ...]:
    """The key of a call at zero: the op of the trace and its arguments."""
    op = traced_op(call)
    return op, signature(replace(call, op=op, outputs=())), device


def traced_op(call: Call) -> Callable[..., Any]:
    """The op that the trace has for a call; something may wrap it (run_time_ops.py)."""
    return call.op if isinstance(call.op, OpOverload) else getattr(call.op, "op", call.op)


def results_of(returned: Any) -> Answer:
    """What a kernel returned; None for what is no tensor."""
    return tuple(
        Result(
            one.untyped_storage().data_ptr(), one.dtype, tuple(one.size()), tuple(one.stride())
        )
        if isinstance(one, torch.Tensor)
        else None
        for one in flat(returned)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """How a kernel's results differ from its fake's."""

    text: str
    learnable: bool = True
    fatal: bool = True
    """Whether other ops must not run on made-up results: memory of another size."""


def difference(call: Call, results: Answer, given: int, use: Use) -> Difference | None:
    """How the results of a call differ from its outputs. `given`: the address of the memory that
    all arguments lie in."""
    if not isinstance(traced_op(call), OpOverload):
        return None  # placement.py copies what a pass of ours returns in another layout
    homes: dict[int, int] = {}
    for position, value in enumerate(call.outputs):
        if value is None:
            continue
        found = results[position] if position < len(results) else None
        if found is None:
            if position in use.needed:
                text = f"result {position} is not made, and the trace has one"
                return Difference(text, learnable=False)
            continue
        if (found.dtype, found.size) != (value.dtype, value.size):
            return Difference(_against(position, found, value))
        if 0 in value.size:
            continue
        if use.rewritten and found.home == given:
            text = f"result {position} lies in an argument, and the trace has it in new memory"
            return Difference(text, learnable=False)
        if not _laid_out_alike(found, value):
            return Difference(_against(position, found, value), fatal=False)
        if homes.setdefault(value.buffer, found.home) != found.home:
            return Difference(f"result {position} has memory of its own", fatal=False)
    if use.rewritten and len(set(homes.values())) < len(homes):
        return Difference("two results share their memory", learnable=False)
    return None


def _laid_out_alike(found: Result, value: Value) -> bool:
    """A step along a dimension of one element leads nowhere."""
    steps = zip(value.size, found.stride, value.stride, strict=True)
    return all(real == fake for n, real, fake in steps if n > 1)


def _against(position: int, found: Result, value: Value) -> str:
    real, fake = (f"{t.dtype} {t.size} with strides {t.stride}" for t in (found, value))
    return f"result {position} is {real}, and the trace has {fake}"


def _alike(one: Answer, other: Answer | None) -> bool:
    """Whether two answers say the same. Their homes may be elsewhere."""
    return other is not None and _without_homes(one) == _without_homes(other)


def _without_homes(answer: Answer) -> list[Result | None]:
    names: dict[int, int] = {}
    return [r and replace(r, home=names.setdefault(r.home, len(names))) for r in answer]


def corrected(answer: Answer, result: Any) -> Any:
    """The fakes of a call, made anew where they differ from what is learned."""
    homes: dict[int, int] = {}
    told = iter([r for r, fake in zip(answer, flat(result), strict=True) if _is_tensor(fake)])

    def as_told(fake: torch.Tensor) -> torch.Tensor:
        if (found := next(told)) is None:
            return fake
        same = homes.setdefault(storage_key(fake), found.home) == found.home
        alike = (fake.dtype, tuple(fake.size())) == (found.dtype, found.size)
        if same and alike and tuple(fake.stride()) == found.stride:
            return fake
        return torch.empty_strided(found.size, found.stride, dtype=found.dtype, device=fake.device)

    return mapped(result, as_told)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
