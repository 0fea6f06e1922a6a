"""One peer of many: groups of micro-batches and single ones fill sums, a step of its own updates.

deal        group of K, group of K, single ...  -> sums -> totals -> update        one runner
reference   backward() of each, .grad.div(N), clip_grad_norm_, optimizer.step()    plain torch
"""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from products import every_value
from torch import nn

import offload
from offload import Clip, Runner
from offload.graph.memgraph import OFFLOAD, RELOAD, TASK
from offload.lowering.micro_batches import layer_by_layer
from offload.memory.host_needs import needs
from offload.tracing.recorder import Recorder

sys.path.insert(0, str(Path(__file__).parent))
from gradient_peer import (
    CLIPS,
    DEALS,
    OPTIMIZERS,
    WIDTH,
    K,
    Peer,
    Trained,
    assert_equal,
    eager,
    needed,
    number_of,
)
from support.captured_training import counting


@pytest.mark.parametrize(
    "optimizer, clip, share, engine, where",
    every_value(
        [*OPTIMIZERS], [*CLIPS], [None, 0.6, 0.0], ["threads", "serial"], ["device", "host"]
    ),
)
def test_a_peer_has_the_bits_of_plain_accumulation(
    optimizer: str, clip: str, share: float | None, engine: str, where: str
) -> None:
    expected = eager(optimizer, CLIPS[clip])
    peer = Peer(optimizer, CLIPS[clip])
    found: list[Any] = []
    with peer.runner(share, engine, optimizer=where) as runner:
        for step in range(len(DEALS)):
            found += peer.global_step(runner, step)
    assert_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("share", [None, 0.6, 0.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused adamw"])
def test_a_peer_with_a_gpu_has_the_bits_of_plain_accumulation(
    optimizer: str, share: float | None
) -> None:
    expected = eager(optimizer, CLIPS["norm"], "cuda")
    peer = Peer(optimizer, CLIPS["norm"], "cuda")
    found: list[Any] = []
    with peer.runner(share, "cuda") as runner:
        for step in range(len(DEALS)):
            found += peer.global_step(runner, step)
    on_host = [one if isinstance(one, torch.Tensor) else _on_host(one) for one in found]
    wanted = [one if isinstance(one, torch.Tensor) else _on_host(one) for one in expected]
    assert_equal(on_host, wanted)


def _on_host(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


def test_another_deal_captures_nothing_and_moves_no_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Peer("adamw", Clip(0.005))
    made: list[str] = []
    monkeypatch.setattr(Recorder, "run", noting(made, "capture", Recorder.run))
    with peer.runner(0.5) as runner:
        monkeypatch.setattr(offload.Plan, "replan", noting(made, "plan", offload.Plan.replan))
        peer.global_step(runner, 0)
        homes = addresses(peer)
        for step in range(1, len(DEALS)):
            peer.global_step(runner, step)
            assert addresses(peer) == homes
    assert made == []


def noting(made: list[str], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(what)
        return function(*args, **kwargs)

    return noted


def addresses(peer: Peer) -> list[int]:
    states = [t for state in peer.optimizer.state.values() for t in state.values() if t.dim()]
    tensors = [*peer.module.parameters(), *peer.module.buffers(), *states]
    return [t.data_ptr() for t in (*tensors, *peer.sums.values(), *peer.totals.values())]


def test_draws_of_a_group_leave_the_default_generator_alone() -> None:
    peer = Peer("sgd", None)
    with peer.runner(None) as runner:
        torch.manual_seed(99)
        expected = torch.get_rng_state()
        batch = [t for pair in peer.data[0][:K] for t in pair]
        runner.run((K, True), *batch)
        assert torch.equal(torch.get_rng_state(), expected)


def test_a_group_whose_micro_batches_draw_takes_turns_layer_by_layer() -> None:
    peer = Peer("sgd", None)
    turns = [task.turn for task in layer_by_layer(peer.graphs[K, True], K).tasks]
    changes = sum(a != b for a, b in itertools.pairwise(turns))
    assert changes > 2 * K  # one after the other it is K - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "fused adamw"])
def test_a_captured_graph_of_a_device_reads_the_present_count_and_rate(optimizer: str) -> None:
    clip, driver = Clip(0.005), counting()
    plain, planned = Trained(optimizer, "cuda"), Trained(optimizer, "cuda")
    torch.manual_seed(3)
    totals = {p: torch.randn_like(p) for p in planned.module.parameters()}
    graph = offload.capture_update_step(planned.module, planned.optimizer, totals, clip)
    plan = offload.plan(graph, needed(graph, optimizer="device"), optimizer="device")
    with Runner(plan, "cudagraph", driver=driver) as runner:
        for step, count in enumerate((7, 8, 64, 3)):
            for one in (plain, planned):
                for group in one.optimizer.param_groups:
                    group["lr"] = 2.0 ** -(7 + step)  # a fused kernel reads it as float32
            pairs = zip(plain.module.parameters(), totals.values(), strict=True)
            for p, total in pairs:
                p.grad = total.to(p.device).div(number_of(count, "cuda"))
            nn.utils.clip_grad_norm_(plain.module.parameters(), clip.limit)
            plain.optimizer.step()
            runner(torch.tensor(count, dtype=torch.float64))
            assert_equal([_on_host(planned.state())], [_on_host(plain.state())])
            for total in totals.values():
                total.mul_(1.5)
    assert driver.replays > driver.captures


class Counting(nn.Module):
    """Its buffer changes what it does, and its statistics change with every batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = self.seen.clone()
        for layer in self.layers:
            x = layer(x).tanh() / times
        self.seen += 1
        return self.norm(x)


@pytest.mark.parametrize("tight", [False, True])
def test_micro_batches_of_a_group_begin_with_the_same_buffers(tight: bool) -> None:
    batches = [(torch.randn(6, WIDTH), torch.randn(6, WIDTH)) for _ in range(K)]
    plain = Counting()
    committed = {name: b.clone() for name, b in plain.named_buffers()}
    kept: dict[str, torch.Tensor] = {}
    for x, y in batches:
        for name, buffer in plain.named_buffers():
            buffer.copy_(committed[name])
        nn.functional.mse_loss(plain(x), y).backward()
        kept = kept or {name: b.clone() for name, b in plain.named_buffers()}
    module, sums = Counting(), dict[Any, torch.Tensor]()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    graphs = [
        offload.capture_micro_batch(
            module, nn.functional.mse_loss, optimizer, sums, *batches[0], first=n == 0
        )
        for n in range(2)
    ]
    group = offload.in_turn([graphs[0], *[graphs[1]] * (K - 1)], same_buffers=True)
    plan = offload.plan(group, needed(group) if tight else None)
    with Runner(plan, order="random", seed=1, poison=True) as runner:
        runner(*(t for pair in batches for t in pair))
        for p, other in zip(plain.parameters(), module.parameters(), strict=True):
            assert p.grad is not None
            assert torch.equal(sums[other], p.grad)
        assert_equal([dict(module.named_buffers())], [kept])


# ---- what moves, and what it weighs -------------------------------------------------------------


def test_an_update_on_the_host_moves_only_what_the_norm_needs() -> None:
    for clip, totals_in in ((None, False), (CLIPS["value"], False), (CLIPS["norm"], True)):
        graph = Peer("adamw", clip).graphs["update"]
        plan = offload.plan(graph, needed(graph, optimizer="host"), optimizer="host")
        moved = {
            (node.kind, plan.graph.buffers[node.buffer].role)
            for node in plan.memgraph.nodes
            if node.kind != TASK and node.nbytes > 8
        }
        assert moved <= ({(RELOAD, "sum")} if totals_in else set())
        assert ((RELOAD, "sum") in moved) == totals_in


def test_gradients_do_not_wait_for_the_norm_of_all() -> None:
    graph = Peer("adamw", CLIPS["norm"]).graphs["update"]
    plan = offload.plan(graph, int(needed(graph) * 1.5))
    offloaded = [plan.graph.buffers[n.buffer] for n in plan.memgraph.nodes if n.kind == OFFLOAD]
    assert "state" in {buffer.role for buffer in offloaded}  # the budget is tight
    assert "sum" not in {buffer.role for buffer in offloaded}  # the totals are only read
    made = [buffer for buffer in offloaded if not buffer.persistent]
    assert sum(buffer.nbytes for buffer in made) < WIDTH * WIDTH * 4


def test_sums_totals_and_state_are_counted_by_the_first_plan() -> None:
    peer = Peer("adamw", Clip(0.005))
    main, *others = peer.graphs.values()
    least = max(needed(graph) for graph in (main, *others))
    plan = offload.plan(offload.beside(main, *others), least)
    trained = [p for p in peer.module.parameters() if p in peer.sums]
    weights = sum(p.numel() * p.element_size() for p in trained)
    # Weights, sums, totals, both averages of gradients; of the host's, or parked there.
    assert needs(plan).held >= 5 * weights
    assert needs(plan).passing >= 5 * weights
    assert needs(offload.plan(main, least)).passing < 3 * weights
    text = plan.explain()
    assert "gradient sums" in text
    assert "tensors are placed for other steps of the same runner" in text
    assert "optimizer state" in text


# ---- what is refused ----------------------------------------------------------------------------


def test_totals_that_fit_no_parameter_are_refused_by_name() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    flat = torch.zeros(20)
    good = {p: torch.zeros_like(p) for p in layer.parameters()}
    wrong: list[tuple[dict[Any, torch.Tensor], str]] = [
        ({}, "nothing to update"),
        ({**good, torch.ones(3): torch.zeros(3)}, "1 of 3 totals"),
        ({**good, layer.weight: torch.zeros(4)}, r"total of weight is torch.float32 \(4,\)"),
        ({**good, layer.bias: torch.zeros(4, dtype=torch.float64)}, "total of bias"),
        (
            {layer.weight: flat[:16].view(4, 4), layer.bias: flat[16:]},
            "total of weight shares its storage",
        ),
    ]
    for totals, message in wrong:
        with pytest.raises(offload.CaptureError, match=message):
            offload.capture_update_step(layer, optimizer, totals)


def test_a_count_of_another_shape_or_type_is_refused() -> None:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    totals = {p: torch.zeros_like(p) for p in layer.parameters()}
    graph = offload.capture_update_step(layer, optimizer, totals)
    with Runner(offload.plan(graph)) as runner:
        with pytest.raises(offload.CaptureError, match="give a single number"):
            runner(torch.ones(2, dtype=torch.float64))
        with pytest.raises(offload.StepError, match="expected"):
            runner(torch.tensor(2))


def test_a_group_needs_a_generator_for_each_micro_batch_and_nothing_beside_it_yet() -> None:
    peer = Peer("sgd", None)
    more, update = peer.graphs[1, False], peer.graphs["update"]
    with pytest.raises(offload.GraphError, match="1 generators for 2 micro-batches"):
        offload.in_turn([more, more], [torch.Generator()])
    with pytest.raises(offload.GraphError, match="join the micro-batches first"):
        offload.in_turn([offload.beside(more, update)])
    handmade = offload.GraphBuilder().graph()
    with pytest.raises(offload.GraphError, match="made by hand"):
        offload.beside(more, handmade)
    with pytest.raises(offload.GraphError, match="made by hand"):
        offload.in_turn([handmade], [torch.Generator()])
