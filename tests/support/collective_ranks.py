"""What test_collectives.py runs in two processes: steps in which ranks work together.

python collective_ranks.py FOLDER      every rank writes what came, by kind, to FOLDER/rankN.json
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from support import gloo_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as with_gradients
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import offload
from offload.errors import CaptureError

ROWS, WIDTH, LAYERS = 8, 16, 3
Change = Callable[[torch.Tensor], torch.Tensor]


def _all() -> Any:
    return distributed.group.WORLD


def _changed_in_place(collective: Callable[[torch.Tensor], Any]) -> Change:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        collective(x)
        return x

    return change


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(gloo_ranks.WORLD)]
    distributed.all_gather(parts, x.contiguous())
    return torch.stack(parts).sum(0)


def _gathered_into_one(x: torch.Tensor) -> torch.Tensor:
    parts = x.new_empty(gloo_ranks.WORLD * len(x), WIDTH)
    distributed.all_gather_into_tensor(parts, x.contiguous())
    return parts[: len(x)] + parts[len(x) :]


def _exchanged(x: torch.Tensor) -> torch.Tensor:
    halves = torch.empty_like(x)
    distributed.all_to_all_single(halves, x.contiguous())
    return halves


def _met(x: torch.Tensor) -> torch.Tensor:
    distributed.barrier()
    return x


def _summed_halves(x: torch.Tensor) -> torch.Tensor:
    half = functional.reduce_scatter_tensor(x.contiguous(), "sum", 0, _all())
    return torch.cat([half, half])


def sent(x: torch.Tensor) -> torch.Tensor:
    if distributed.get_rank():
        distributed.recv(x := torch.empty_like(x), 0)
    else:
        distributed.send(x.contiguous(), 1)
    return x


FORWARD: dict[str, Change] = {
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", _all()),
    "functional all_gather": lambda x: functional.all_gather_tensor(x, 0, _all())[: len(x)],
    "functional all_to_all": lambda x: functional.all_to_all_single(x, None, None, _all()),
    "functional reduce_scatter": _summed_halves,
    "all_reduce": _changed_in_place(distributed.all_reduce),
    "all_reduce, waited for": _changed_in_place(
        lambda x: distributed.all_reduce(x, async_op=True).wait()
    ),
    "all_reduce, maximum": _changed_in_place(
        lambda x: distributed.all_reduce(x, distributed.ReduceOp.MAX)
    ),
    "broadcast": _changed_in_place(lambda x: distributed.broadcast(x, 0)),
    "reduce": _changed_in_place(lambda x: distributed.reduce(x, 0)),
    "all_gather": _gathered,
    "all_gather_into_tensor": _gathered_into_one,
    "all_to_all_single": _exchanged,
    "barrier": _met,
}
BACKWARD: dict[str, Change] = {
    "all_gather": lambda x: torch.stack([*with_gradients.all_gather(x)]).sum(0),
    "all_reduce": lambda x: with_gradients.all_reduce(x),
    "functional all_gather": lambda x: functional.all_gather_tensor_autograd(x, 0, _all())[:ROWS],
    "functional reduce_scatter": lambda x: functional.reduce_scatter_tensor_autograd(
        torch.cat([x, x]), "sum", 0, _all()
    ),
}


class Parallel(nn.Module):
    """Layers of which each rank has its own part; `change` brings them together."""

    def __init__(self, change: Change, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = outer(torch.relu(self.change(inner(x))))
        return x * 1


def smallest(graph: offload.TaskGraph) -> offload.Plan:
    try:
        return offload.plan(graph, 64)
    except offload.BudgetTooSmall as error:
        return offload.plan(graph, error.needed)


def differences(ours: Iterable[torch.Tensor], eager: Iterable[torch.Tensor]) -> list[int]:
    pairs = enumerate(zip(ours, eager, strict=True))
    return [number for number, (one, other) in pairs if not torch.equal(one, other)]


def forward(module: nn.Module, x: torch.Tensor) -> list[int]:
    with torch.no_grad():
        eager = module(x) * 1
    found = [offload.prefill(module, x, budget=budget) for budget in (None, "6KiB")]
    return differences(found, [eager, eager])


def backward(change: Change, rank: int, x: torch.Tensor) -> list[int]:
    module = Parallel(change, rank)
    weights = [*module.parameters()]

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(module(x).square().mean(), weights)

    eager = step(x)
    made = smallest(offload.capture(step, x))
    with offload.Runner(made, order="random", seed=rank) as runner:  # each rank an order of its own
        found = [runner(x) for _ in range(2)]
    return [*differences(found[0], eager), *differences(found[1], eager)]


def captured(module: nn.Module, x: torch.Tensor) -> list[int]:
    graph = offload.capture(lambda x: module(x) * 1, x)
    with torch.no_grad(), offload.Runner(smallest(graph), order="random") as runner:
        before = differences([runner(x)[0]], [module(x) * 1])
        for part in module.parameters():
            part.mul_(2)
        return [*before, *differences([runner(x)[0]], [module(x) * 1])]


def refused(run: Callable[[], object]) -> str:
    try:
        run()
    except (CaptureError, RuntimeError) as error:
        return str(error)
    return "it is planned"


def found(rank: int, folder: Path) -> dict[str, Any]:
    torch.manual_seed(9 + rank)
    x = torch.randn(ROWS, WIDTH)
    mesh = init_device_mesh("cpu", (gloo_ranks.WORLD,))
    tensor_parallel = parallelize_module(
        nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh, {"0": ColwiseParallel()}
    )
    sharded: Any = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    not_called = refused(lambda: captured(sharded, x))
    parallel = [forward(tensor_parallel, x), forward(sharded, x)]
    return {
        "forward": {name: forward(Parallel(change, rank), x) for name, change in FORWARD.items()},
        "backward": {name: backward(change, rank, x) for name, change in BACKWARD.items()},
        "sent in a prefill": refused(lambda: offload.prefill(Parallel(sent, rank), x)),
        "sent": refused(lambda: offload.capture(Parallel(sent, rank), x)),
        "captured before its first call": not_called,
        "captured": [captured(tensor_parallel, x), captured(sharded, x)],
        "distributed tensors": parallel,
    }


if __name__ == "__main__":
    gloo_ranks.main(found)
