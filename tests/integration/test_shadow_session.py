"""What a shadow session promises: the graph of a step for any device, and nothing else changes."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import offload_models as models
from support.shadow_graphs import (
    CASES,
    CheckpointedGpt,
    CountingNet,
    LstmOfWords,
    describe,
    gpt,
    half_on_a_card,
    live_graph,
    shadow_graph,
    shadow_step,
)
from torch.nn import functional as F

from offload.errors import CaptureError
from offload.estimating.shadow_session import ShadowSession
from offload.graph.taskgraph import BACKWARD, Role

pytestmark = pytest.mark.usefixtures("core")
absent = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@pytest.mark.parametrize("name", CASES)
def test_its_graph_is_that_of_the_step_that_runs(name: str) -> None:
    assert describe(shadow_graph(CASES[name](), "cpu")) == describe(
        live_graph(CASES[name](), "cpu")
    )


def test_so_it_is_for_an_lstm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its LSTM keeps who knows what
    case = gpt(model=LstmOfWords)
    assert describe(shadow_graph(case, "cpu")) == describe(live_graph(case, "cpu"))


def test_gradients_of_two_passes_add_up_as_in_the_step_that_runs() -> None:
    assert describe(shadow_graph(gpt(), "cpu", 2)) == describe(live_graph(gpt(), "cpu", 2))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in CASES if n not in ("t5", "moe")])
def test_so_it_is_for_a_gpu(name: str) -> None:
    """The fake GPU makes no gradient of an attention's bias, and no histogram of integers."""
    case = CASES[name]
    assert describe(shadow_graph(case(), "cuda:0")) == describe(live_graph(case(), "cuda:0"))


@absent
def test_a_step_for_a_card_that_is_absent_is_recorded() -> None:
    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert torch.cuda.is_available()
        logits.register_hook(lambda _: threads.append(threading.get_ident()))
        return models.word_loss(logits, target)

    threads: list[int] = []
    case = models.Case(CheckpointedGpt, models.adamw, models.words, loss, half_on_a_card)
    for capability, kernel in (((9, 0), "cudnn"), ((8, 0), "flash")):
        graph = shadow_graph(case, "cuda:0", capability=capability)
        names = [task.name for task in graph.tasks if task.phase == BACKWARD]
        assert names.count(f"_scaled_dot_product_{kernel}_attention_backward.default") == 2
        assert graph.program.device == torch.device("cuda", 0)
    assert threads and threading.get_ident() not in threads, "the engine goes backward in its own"
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="NVIDIA"):
        torch.empty(1, device="cuda")


def test_a_recurrent_layer_of_a_card_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"shadow_graphs.py:\d+ in forward: cuDNN"):
        shadow_graph(gpt(model=LstmOfWords), "cuda:0")


def test_training_before_and_after_it_has_the_same_bits() -> None:
    def trained(*devices: str) -> list[torch.Tensor]:
        case = models.cases()["resnet18"]
        model, optimizer = case.made()
        losses = []
        for batch in case.batches(2):
            losses.append(models.eager_step(case, model, optimizer, batch))
            for device in devices:
                with ShadowSession(model, optimizer, device=device) as session:
                    shadow_step(session, model, optimizer, batch)
        return [*losses, *models.state_of(model, optimizer).values()]

    assert all(map(torch.equal, trained(), trained("cpu", "cuda:0", "cuda:0")))


X, Y = torch.arange(48.0).view(6, 8), torch.arange(6)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=str)
def test_the_module_is_left_as_it_was(device: str, options: dict[str, Any]) -> None:
    net = CountingNet()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, **options)
    F.cross_entropy(net(X), Y).backward()
    optimizer.step()
    pending, counted = F.cross_entropy(net(X), Y), []
    weight = net.enter.weight
    accumulator: Any = weight.view_as(weight).grad_fn.next_functions[0][0]  # pyright: ignore
    accumulator.register_hook(lambda *_: counted.append(1))
    states = [t for state in optimizer.state.values() for t in state.values()]
    tensors = [*net.parameters(), *net.buffers(), *states]
    tensors += [t.grad for t in tensors if t.grad is not None]

    def described() -> list[Any]:
        return [(t.data_ptr(), t._version, t.requires_grad, t.tolist()) for t in tensors]

    before = described()
    with ShadowSession(net, optimizer, device=device) as session:
        shadow_step(session, net, optimizer, (X, Y))
        shadow_step(session, net, optimizer, (X, Y))
    after = [*net.parameters(), *net.buffers()]
    after += [t for state in optimizer.state.values() for t in state.values()]
    after += [t.grad for t in after if t.grad is not None]
    assert [*map(id, after)] == [*map(id, tensors)] and described() == before
    pending.backward()  # its graph is from before
    assert counted == [1]


@pytest.mark.parametrize("device, states", [("cpu", 10), ("cuda:0", 12)])
def test_a_module_on_meta_is_usable_afterwards(device: str, states: int) -> None:
    """A single number of the CPU is the host's own, in every session."""
    real = CountingNet()
    for assigns in (False, True):
        with torch.device("meta"):
            net = CountingNet()
        optimizer = torch.optim.AdamW(net.parameters())
        with ShadowSession(net, optimizer, device=device) as session:
            shadow_step(session, net, optimizer, (X, Y))
            assert len(optimizer.state) == 6
            shadow_step(session, net, optimizer, (X, Y))
        graph = session.take_graphs()[1]
        assert sum(b.role is Role.STATE for b in graph.buffers) == states
        assert not optimizer.state, "they are dropped at the end"
        assert {t.device.type for t in net.state_dict().values()} == {"meta"}
        net = net if assigns else net.to_empty(device="cpu")
        net.load_state_dict(real.state_dict(), assign=assigns)
        net.table, net.head.weight = real.table, net.enter.weight
        assert torch.equal(net(X), real(X))


MEMORY = """
import resource, torch
from offload.estimating.shadow_session import ShadowSession
def step():
    with session.step():
        net(session.without_bytes(torch.ones(4, 8192))).sum().backward()
        optimizer.step()
with torch.device("meta"):
    net = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(27)))
optimizer = torch.optim.AdamW(net.parameters())
ShadowSession(torch.nn.Linear(2, 2))  # what is loaded once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with ShadowSession(net, optimizer, device="cuda:0") as session:
    step(), step()
print(sum(p.nbytes for p in net.parameters()))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_nothing_real_is_made() -> None:
    said = subprocess.run([sys.executable, "-c", MEMORY], check=True, capture_output=True).stdout
    weights, grown = map(int, said.split())
    assert weights > 7e9 and grown < 100e6


@absent
def test_a_fork_after_a_step_for_a_card_is_told_that_it_cannot_go_backward() -> None:
    with ShadowSession(CountingNet(), device="cuda:0"):
        pass
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"fork" in os.read(read, 99)


def run_shadowed(
    body: Callable[[CountingNet, torch.Tensor], object], device: str, net: CountingNet
) -> None:
    with ShadowSession(net, device=device) as session, session.step():
        body(net, session.without_bytes(X))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_only_the_batch_decides_has_its_true_value(device: str) -> None:
    net, before, state = CountingNet(), X.clone(), torch.get_rng_state()
    seen: list[Any] = []

    def body(net: CountingNet, x: torch.Tensor) -> None:
        seen.extend([bool((x > -1).all()), x.long().max().item(), "zero" if x[0, 0] == 0 else ""])
        seen.append(torch.equal(x, x.clone()))
        x[1].add_(1)
        seen.append(x.sum().item())
        x.mul_(2)
        seen.append(x.sum().item())
        drawn = torch.rand(9999, device=x.device)
        assert drawn.sum().item() == drawn.sum().item() > 0
        net(x).sum().backward()

    run_shadowed(body, device, net)
    assert seen == [True, 47, "zero", True, 1136.0, 2272.0]
    assert torch.equal(X, before), "the batch itself is not written"
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn"


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_is_written_between_steps_or_in_a_broken_one_is_not_known(device: str) -> None:
    with ShadowSession(CountingNet(), device=device) as session:
        zeroed, broken = session.without_bytes((X, X))
        zeroed.zero_()
        with pytest.raises(KeyError), session.step():
            broken.zero_()
            raise KeyError
        for batch in (zeroed, broken):
            with pytest.raises(CaptureError, match="asks for a value"), session.step():
                batch.sum().item()


@torch.library.custom_op("shadow_session::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


NEED_VALUES: dict[str, Callable[[CountingNet, torch.Tensor], object]] = {
    "item": lambda net, x: net(x).sum().item(),
    "branch": lambda net, x: bool(torch.isfinite(net(x)).all()),
    "mask": lambda net, x: net(x)[net(x) > 0],
    "nonzero": lambda net, x: net(x).nonzero(),
    "tolist": lambda net, x: net(x).tolist(),
    "numpy": lambda net, x: net(x).detach().cpu().numpy(),
    "weight": lambda net, x: net.enter.weight.sum().item(),
}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", [*NEED_VALUES, "no fake"])
def test_a_step_that_needs_other_values_is_refused_with_its_line(name: str, device: str) -> None:
    net = CountingNet()
    before = [*map(torch.clone, net.state_dict().values())]
    body = NEED_VALUES.get(name, lambda net, x: twice(net(x)))
    why = "twice.*register_fake" if name == "no fake" else "the step asks for a value"
    with pytest.raises(CaptureError, match=rf"(?s)test_shadow_session.py:\d+ in <lambda>: .*{why}"):
        run_shadowed(body, device, net)
    assert all(map(torch.equal, net.state_dict().values(), before))
    assert net(X).isfinite().all() and net.enter.weight.grad is None
    run_shadowed(lambda net, x: net(x).sum().backward(), device, net)


def test_a_sparse_tensor_is_refused() -> None:
    net, words = CountingNet(), torch.nn.Embedding(9, 4, sparse=True)
    net.register_buffer("sparse", torch.eye(2).to_sparse())
    with pytest.raises(CaptureError, match=r"a Tensor of shape \(2, 2\) has layout torch.sparse"):
        run_shadowed(lambda net, x: net(x), "cpu", net)
    with pytest.raises(CaptureError, match="sparse"), ShadowSession(CountingNet()) as session:
        session.without_bytes(torch.eye(2).to_sparse())
    shadowed = ShadowSession(words, device="cuda:0")
    with pytest.raises(CaptureError, match=r"^in the backward pass: "), shadowed, shadowed.step():
        words(shadowed.without_bytes(Y)).sum().backward()


def test_a_card_other_than_the_first_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"device cuda:1: .* say cuda:0"):
        ShadowSession(CountingNet(), device="cuda:1")


def test_threads_take_turns_with_an_absent_card() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                run_shadowed(lambda net, x: net(x).sum().backward(), "cuda:0", CountingNet())
        except BaseException as error:
            failed.append(error)

    before = torch.cuda.is_available()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and torch.cuda.is_available() == before
