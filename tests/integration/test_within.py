"""`offload.within` around loops of others: their bits, and their steps run by plans."""

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.live_loops import Net
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload.live.within import BudgetedLoop

pytestmark = pytest.mark.usefixtures("core")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS = 8
Run = Callable[[str, Callable[..., Any]], list[Any]]
"""A loop on a device, within what the second argument makes of a model and its optimizers. Returns
what is compared."""


def batches(device: str, count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    pairs = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(count)]
    return [(x.to(device), y.to(device)) for x, y in pairs]


def made(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    net = Net().to(device)
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


def values(*things: Any) -> list[Any]:
    """Of tensors, modules and optimizers, as lists."""
    found: list[Any] = []
    for thing in things:
        if isinstance(thing, torch.Tensor):
            found.append(thing.tolist())
        elif isinstance(thing, nn.Module):
            found += [t.tolist() for t in thing.state_dict().values()]
        else:
            states = [v for state in thing.state.values() for v in state.values()]
            found += [v.tolist() if isinstance(v, torch.Tensor) else v for v in states]
    return found


def accumulates(device: str, within: Callable[..., Any]) -> list[Any]:
    """Micro-batches under autocast, clipping, a schedule, and evaluation in between."""
    net, optimizer = made(device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    seen: list[torch.Tensor] = []
    with within(net, optimizer):
        for x, y in batches(device):
            for part in (slice(0, 3), slice(3, 6), slice(6, 8)):
                with torch.autocast(device, torch.bfloat16):
                    loss = F.cross_entropy(net(x[part]), y[part])
                (loss / 3).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            net.eval()
            with torch.no_grad():
                seen.append(net(x).sum())
            net.train()
    return values(net, optimizer, *seen)


def takes_turns(device: str, within: Callable[..., Any]) -> list[Any]:
    """Two modules, each with an optimizer of its own."""
    torch.manual_seed(5)
    maker, judge = nn.Linear(16, 16).to(device), nn.Linear(16, 1).to(device)
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    one = torch.optim.SGD(maker.parameters(), 0.1, momentum=0.9)
    other = torch.optim.AdamW(judge.parameters(), 1e-2)
    with within(both, one, other):
        for x, _ in batches(device):
            (judge(x).mean() - judge(maker(x).detach()).mean()).backward()
            other.step()
            other.zero_grad()
            judge(maker(x)).mean().backward()
            one.step()
            one.zero_grad()
            other.zero_grad()
    return values(both, one, other)


def keeps_its_gradients(device: str, within: Callable[..., Any]) -> list[Any]:
    net, optimizer = made(device)
    seen: list[torch.Tensor] = []
    with within(net, optimizer, keep_gradients=True):
        for x, y in batches(device):
            optimizer.zero_grad(set_to_none=False)
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            gradient = next(net.parameters()).grad
            assert gradient is not None
            seen.append(gradient.sum())
    return values(net, optimizer, *seen)


def steps_by_a_closure(device: str, within: Callable[..., Any]) -> list[Any]:
    net, optimizer = made(device)
    seen: list[Any] = []
    with within(net, optimizer):
        for x, y in batches(device):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                return loss

            seen.append(optimizer.step(closure))
    return values(net, optimizer, *(loss.detach() for loss in seen))


def calls_twice_and_writes_its_batch(device: str, within: Callable[..., Any]) -> list[Any]:
    """Two views of a batch in one step, the model itself checkpointed, and validation with
    gradients that nobody needs."""
    net, optimizer = made(device)
    seen: list[torch.Tensor] = []
    with within(net, optimizer):
        for x, _ in batches(device):
            one = net(x)
            two = checkpoint(net, x + 0.5, use_reentrant=False)
            assert isinstance(two, torch.Tensor)
            F.mse_loss(one, two).backward()
            x.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            seen += [net(x).sum().detach(), net(x + 1).sum().detach()]
            net.train()
    return values(net, optimizer, *seen)


LOOPS: dict[Run, int] = {
    accumulates: 4 * STEPS - 8,
    takes_turns: STEPS,
    keeps_its_gradients: STEPS - 3,
    steps_by_a_closure: STEPS - 3,
    calls_twice_and_writes_its_batch: STEPS,
}
"""How many steps are planned at least."""


def compared(loop: Run, device: str, budget: str = "100%", devices: int = 1) -> BudgetedLoop:
    opened: list[BudgetedLoop] = []

    def within(model: nn.Module, *optimizers: Any, **more: Any) -> BudgetedLoop:
        opened.append(offload.within(budget, model, *optimizers, **more, devices=devices))
        return opened[0]

    plain = loop(device, lambda *_, **__: nullcontext())
    assert loop(device, within) == plain
    return opened[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_has_its_own_bits_and_runs_by_plans(loop: Run, device: str) -> None:
    assert compared(loop, device).planned_steps >= LOOPS[loop]


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_on_several_devices_has_its_own_bits(loop: Run, devices: int) -> None:
    within = compared(loop, "cpu", devices=devices)
    assert within.planned_steps >= LOOPS[loop]
    assert within.plan is not None
    is_cut = loop is not takes_turns  # its forward pass begins with a judge of one layer
    assert len({task.device for task in within.plan.graph.tasks}) > is_cut


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_micro_batches_are_within_the_budget(device: str) -> None:
    within = compared(accumulates, device, "80%")
    assert within.plan is not None
    assert within.plan.host_bytes > 0


@pytest.mark.gpu
def test_a_model_without_room_on_the_device_never_takes_more_than_the_budget() -> None:
    MiB = 1 << 20
    budget, beside = 20 * MiB, 6 * MiB  # a kernel's stand-ins, and a batch

    peaks: list[int] = []

    def trained(device: str, within: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(5)
        gc.collect()
        already = torch.cuda.memory_allocated()  # by other tests
        layers = [module for _ in range(12) for module in (nn.Linear(512, 512), nn.GELU())]
        net = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        torch.cuda.reset_peak_memory_stats()
        with within(net, optimizer):
            for _ in range(4):
                net(torch.randn(64, 512).cuda()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated() - already)
        assert next(net.parameters()).device.type == device
        return values(net, optimizer)

    def within(net: nn.Module, optimizer: Any) -> BudgetedLoop:
        return offload.within(budget, net, optimizer, device="cuda:0")

    plain = trained("cuda", lambda *_: nullcontext())
    assert trained("cpu", within) == plain
    assert peaks[0] > 2 * budget
    assert peaks[1] <= budget + beside


@pytest.mark.gpu
def test_aliases_of_a_module_that_is_elsewhere_stay_aliases() -> None:
    net, optimizer = made("cpu")
    assert isinstance(net, Net)
    net.register_buffer("first_rows", net.last.weight.data[:2])
    with offload.within(None, net, optimizer, device="cuda"):
        assert net.first_rows.is_cuda
        for x, y in batches("cuda"):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(net.first_rows, net.last.weight[:2])
    assert not net.first_rows.is_cuda
    assert net.first_rows.data_ptr() == net.last.weight.data_ptr()
    assert torch.equal(net.first_rows, net.last.weight[:2])


def test_an_error_within_a_step_leaves_what_eager_leaves() -> None:
    def interrupted(device: str, within: Callable[..., Any]) -> list[Any]:
        net, optimizer = made(device)
        with pytest.raises(ZeroDivisionError), within(net, optimizer):
            for n, (x, y) in enumerate(batches(device)):
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                net(x)
                1 / (6 - n)
        return values(net, optimizer)

    assert compared(interrupted, "cpu").planned_steps > 0


def test_a_step_that_the_loop_does_not_end_has_happened_all_the_same() -> None:
    def half(device: str, within: Callable[..., Any]) -> list[Any]:
        net, optimizer = made(device)
        with within(net, optimizer):
            for x, y in batches(device):
                F.cross_entropy(net(x), y).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        return values(net, *gradients)

    compared(half, "cpu")


@pytest.mark.parametrize("name", ["plain_loop", "accelerate", "transformers"])
def test_the_examples_run_by_plans(name: str, tmp_path: Path) -> None:
    if name != "plain_loop":
        pytest.importorskip("accelerate")
        pytest.importorskip("transformers")
    script = Path(__file__).parents[2] / "examples" / f"within_{name}.py"
    assert len(script.read_text().splitlines()) <= 40
    shown = subprocess.run(
        [sys.executable, script, tmp_path], check=True, capture_output=True, text=True
    ).stdout
    found = re.search(r"(\d+) steps ran by a plan: <Plan", shown)
    assert found is not None
    assert int(found[1]) >= 20


@pytest.mark.filterwarnings("ignore")
def test_a_loop_of_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def loop(device: str, within: Callable[..., Any]) -> list[Any]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net, inner = made(device)
        model, optimizer = accelerator.prepare(net, inner)
        with within(model, optimizer):
            for x, y in batches(device):
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
        return values(net, inner)

    assert compared(loop, "cpu").planned_steps >= STEPS - 4


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_accumulates_evaluates_and_resumes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": row, "labels": row} for row in torch.arange(16).repeat(16, 1)]

    class WithinBudget(transformers.TrainerCallback):
        within: Any = None

        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            self.within = offload.within("100%", model, optimizer).__enter__()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.within.__exit__(None, None, None)

    def trained(out: Path, epochs: int, *callbacks: Any, resume: bool = False) -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        how = transformers.TrainingArguments(
            str(out), per_device_train_batch_size=2, gradient_accumulation_steps=2,
            num_train_epochs=epochs, eval_strategy="epoch", save_strategy="epoch", use_cpu=True,
            report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(
            transformers.GPT2LMHeadModel(config), how, train_dataset=data, eval_dataset=data[:4],
            callbacks=list(callbacks),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        logged = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        return [*values(trainer.model), logged]

    plain = trained(tmp_path / "plain", 3)
    ours = WithinBudget()
    assert trained(tmp_path / "ours", 3, ours) == plain
    assert ours.within.planned_steps > 12  # of 24 micro-batches and three evaluations
    trained(tmp_path / "resumed", 2, WithinBudget())
    assert trained(tmp_path / "resumed", 3, WithinBudget(), resume=True) == plain
