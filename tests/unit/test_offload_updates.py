"""The optimizer's update, parameter by parameter and piece by piece: the same bits."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from offload.errors import CaptureError
from offload.optimizer.updates import (
    advance,
    check_optimizer,
    chunk_borders,
    is_sliceable,
    sliced,
    update_of,
)
from offload.program.kernels import Call, Value

SIZES = (1, 17, 65, 4097, 32_769, 70_001)
WAYS: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"fused": True}, {"foreach": False})


def optimizers() -> list[Any]:
    made = []
    for how in WAYS:
        for more in ({}, {"weight_decay": 0.1, "maximize": True}, {"amsgrad": True}):
            made += [(Adam, {**how, **more}), (AdamW, {**how, **more})]
        for more in (
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"momentum": 0.9, "maximize": True, "weight_decay": 0.1},
        ):
            made.append((SGD, {"lr": 0.0123, **how, **more}))
    return made


def parameters(*sizes: int, seed: int = 0) -> list[torch.nn.Parameter]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(n, generator=dice)) for n in sizes]


def value(tensor: torch.Tensor, buffer: int) -> Value:
    return Value(buffer, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))


def run(call: Call, tensors: dict[int, torch.Tensor]) -> None:
    def view(v: Value) -> torch.Tensor:
        whole = tensors[v.buffer].detach()
        return whole.as_strided(v.size, v.stride, v.offset)

    args, kwargs = call.arguments(view)
    call.op(*args, **kwargs)


def state_of(optimizer: Any) -> list[Any]:
    return [
        (key, t) for state in optimizer.state.values() for key, t in state.items() if t is not None
    ]


def same(one: Any, other: Any) -> bool:
    return all(
        a == b and torch.equal(s, t)
        for (a, s), (b, t) in zip(state_of(one), state_of(other), strict=True)
    )


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("kind", "settings"), optimizers())
def test_updates_one_by_one_and_in_pieces_give_the_bits_of_a_joint_step(
    kind: Any, settings: dict[str, Any], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ours, whole = parameters(*SIZES), parameters(*SIZES)
        optimizer, plain = kind(ours, **settings), kind(whole, **settings)
        check_optimizer(optimizer)
        updates = [update_of(optimizer, 0, p) for p in ours]
        after = advance(optimizer, ours)
        for step in range(3):
            for g in (optimizer.param_groups[0], plain.param_groups[0]):
                g["lr"] = 0.01 / (step + 1)
            for p, g in zip(whole, parameters(*SIZES, seed=step + 1), strict=True):
                p.grad = g.detach().clone()
            plain.step()
            for p, g, update in zip(ours, parameters(*SIZES, seed=step + 1), updates, strict=True):
                states = [optimizer.state[p][key] for key in update.states]
                tensors = dict(enumerate([p, g, *states]))
                named = [value(t, n) for n, t in tensors.items()]
                call = Call(update, tuple(named))
                if step == 1:
                    run(call, tensors)
                    continue
                assert is_sliceable(call)
                # The states in buffers of their own, piece by piece.
                for start, stop in pairwise(chunk_borders(p.numel(), 8192)):
                    pieces = {n + 2: t[start:stop].clone() for n, t in enumerate(states)}
                    flat = [value(t, n) for n, t in pieces.items()]
                    run(sliced(call, start, stop, flat), {**tensors, **pieces})
                    for n, t in enumerate(states):
                        t[start:stop] = pieces[n + 2]
            after()
            for mine, theirs in zip(ours, whole, strict=True):
                assert torch.equal(mine, theirs)
        assert same(optimizer, plain)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("numel", [0, 1, 4096, 4097, 100_000])
@pytest.mark.parametrize("at_most", [1, 4096, 5000, 40_000, 10**9])
def test_pieces_cover_everything_once_and_begin_at_whole_pages(numel: int, at_most: int) -> None:
    borders = chunk_borders(numel, at_most)
    assert borders[0] == 0
    assert borders[-1] == numel
    assert all(a < b or numel == 0 for a, b in pairwise(borders))
    assert all(b % 4096 == 0 for b in borders[:-1])
    assert all(b - a <= max(at_most, 4096) for a, b in pairwise(borders))


def test_half_precision_on_a_cpu_is_not_cut() -> None:
    [p] = parameters(10_000)
    p = torch.nn.Parameter(p.detach().bfloat16())
    optimizer = AdamW([p])
    update = update_of(optimizer, 0, p)
    named = tuple(value(p, n) for n in range(4))
    assert not is_sliceable(Call(update, named))


def test_a_gradient_laid_out_otherwise_is_not_cut() -> None:
    p = torch.nn.Parameter(torch.randn(64, 128))
    update = update_of(SGD([p], 0.1), 0, p)
    turned = Value(1, p.dtype, (64, 128), (1, 64))
    assert not is_sliceable(Call(update, (value(p, 0), turned)))
    assert is_sliceable(Call(update, (value(p, 0), value(p, 1))))


def test_the_state_begins_as_the_optimizers_own() -> None:
    for kind, settings in optimizers():
        p, q = parameters(33)[0], parameters(33)[0]
        optimizer, plain = kind([p], **settings), kind([q], **settings)
        update_of(optimizer, 0, p)
        q.grad = torch.zeros_like(q)
        plain.step()
        mine, theirs = dict(state_of(optimizer)), dict(state_of(plain))
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert mine[key].dtype == theirs[key].dtype
            assert mine[key].size() == theirs[key].size()
            assert not mine[key].any()


def test_an_optimizer_without_state_stays_without() -> None:
    [p] = parameters(33)
    optimizer = SGD([p], 0.1)
    check_optimizer(optimizer)
    update_of(optimizer, 0, p)
    advance(optimizer, [p])()
    assert not optimizer.state


def test_state_that_is_there_is_used() -> None:
    [p] = parameters(33)
    optimizer = AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.copy(optimizer.state[p])
    update_of(optimizer, 0, p)
    assert all(optimizer.state[p][key] is before[key] for key in before)


def test_a_scheduler_takes_a_step_of_ours_for_the_optimizers() -> None:
    [p] = parameters(3)
    optimizer = SGD([p], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    advance(optimizer, [p])()
    scheduler.step()  # would warn, and warnings are errors
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


class Own(AdamW):
    """Who knows what it does."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad.sum() > 0:
                return super().step(closure)
        return None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), "LBFGS"),
        (lambda p: Own(p), "Own cannot be planned: it asks for the value"),
        (lambda p: Adam(p, differentiable=True, foreach=False), "differentiable=True"),
        (lambda p: AdamW(p, capturable=True), "capturable=True"),
    ],
)
def test_an_optimizer_that_does_something_else_is_refused(make: Any, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        check_optimizer(make(parameters(3)))


def test_an_optimizer_with_hooks_is_refused() -> None:
    optimizer = SGD(parameters(3), 0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="hooks"):
        check_optimizer(optimizer)


def test_dampening_works_once_there_is_momentum() -> None:
    p, q = parameters(33)[0], parameters(33)[0]
    both = [SGD([t], 0.1, momentum=0.9, dampening=0.1) for t in (p, q)]
    for t, optimizer in zip((p, q), both, strict=True):
        t.grad = torch.ones_like(t)
        optimizer.step()
    check_optimizer(both[0])
    update = update_of(both[0], 0, p)
    state = both[0].state[p]["momentum_buffer"]
    run(Call(update, tuple(value(p, n) for n in range(3))), {0: p, 1: torch.ones(33), 2: state})
    both[1].step()
    assert torch.equal(p, q)
    assert torch.equal(state, both[1].state[q]["momentum_buffer"])
