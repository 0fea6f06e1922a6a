"""Private names of torch that need a process group, in which this process is alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import distributed

import offload.torch_seams as t


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield t.default_group()
    finally:
        distributed.destroy_process_group()


class Seen(t.TorchDispatchMode):
    """Notes what ops are given and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((t.schema_of(func).name, args, result))
        return result


def calls_of(collective: Callable[[torch.Tensor], object]) -> list[tuple[str, Any, Any]]:
    x = torch.ones(2)
    with Seen() as seen:
        collective(x)
    return [call for call in seen.calls if "c10d" in call[0]]


def test_ddps_three_calls_take_what_we_give_them(alone: Any) -> None:
    module = torch.nn.BatchNorm1d(2)
    t.verify_param_shapes(alone, [*module.parameters()])
    t.sync_module_states(module, alone, 1 << 20, 0, {*()}, broadcast_buffers=True)
    t.sync_params_and_buffers(alone, [b.detach() for b in module.buffers()], 1 << 20, 0)
    assert module.weight.tolist() == [1, 1]


def test_ops_of_torch_distributed_name_their_group_and_return_a_work(alone: Any) -> None:
    named: set[str] = set()
    for kind in (distributed.ReduceOp.MAX, distributed.ReduceOp.SUM):
        calls = calls_of(lambda x, kind=kind: distributed.all_reduce(x, kind))
        [(name, (_, group, reduction, *_), result)] = calls
        assert name == "c10d::allreduce_"
        assert t.group_or_reduction(group) == f"group {alone.group_name}"
        named.add(t.group_or_reduction(reduction))
        t.wait_for_work(result[-1])
    assert len(named) == 2 and all(name.startswith("reduction ") for name in named)


def test_a_work_that_a_trace_returns_is_over(alone: Any) -> None:
    class Traced(t.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return args[0], t.finished_work()

    x = torch.ones(2)
    with Traced():
        work = distributed.all_reduce(x, async_op=True)
    assert work.wait()


def test_a_functional_collective_returns_a_tensor_that_waits(alone: Any) -> None:
    pending = functional.all_reduce(torch.ones(2), "sum", alone)
    assert t.is_wrapper_subclass(pending) and not t.is_wrapper_subclass(torch.ones(2))
    inner = t.pending_tensor(pending)
    assert inner is not None and t.pending_tensor(torch.ones(2)) is None
    assert t.wait_tensor(inner).tolist() == [1, 1]
