"""A saved step: its file, its replay, and the fault that a bisection names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import offload.live.planned_tapes
import offload.running.binding
from offload import OffloadError
from offload.graph.taskgraph import TaskGraph
from offload.live.session import LiveSession
from offload.replaying.bisection import bisect, budget_bytes, replay
from offload.replaying.issuing import StepMemory, issue
from offload.replaying.saving import save_part
from offload.replaying.step_file import SavedPart, SavedStep, read_step, write_step
from trainers import OffloadStrategy, SaveStep


def saved_parts(step: int = 3, *, reads_loss: bool = False, device: str = "cpu") -> list[SavedPart]:
    return train_and_save(step, reads_loss=reads_loss, device=device)[0]


def train_and_save(
    step: int, *, reads_loss: bool = False, device: str = "cpu"
) -> tuple[list[SavedPart], torch.nn.Module, Any]:
    """The parts of a step of a small net with dropout, BatchNorm, clipping and AdamW, the net after
    it, and the plan."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    parts: list[SavedPart] = []
    with LiveSession(net, optimizer, budget="100%", device=device) as session:
        for number in range(step):
            if number == step - 1:
                session.hooks.on_part = lambda *given: parts.append(save_part(*given))
            x, y = torch.randn(4, 3, 8, 8).to(device), torch.randint(10, (4,)).to(device)
            with session.step("training_step"):
                loss = torch.nn.functional.cross_entropy(net(x), y)
                if reads_loss:
                    loss.item()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        plan = session.plan
    return parts, net, plan


@pytest.mark.parametrize("reads_loss", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("step", [1, 3])
def test_every_part_has_the_bits_of_eager_in_any_budget(step: int, reads_loss: bool) -> None:
    parts = saved_parts(step, reads_loss=reads_loss)
    assert len(parts) == 1 + reads_loss
    budget = budget_bytes(parts, "100%" if step == 1 else "90%")
    for part in parts:
        for engine in ("serial", "threads"):
            replayed = replay(part, budget, engine)
            assert replayed.differing == {}
            assert replayed.results >= 10
        assert bisect(part, budget, "threads") is None


@pytest.mark.parametrize("step", [1, 2, 4])
def test_the_operations_make_the_weights_that_the_run_had_after_the_step(step: int) -> None:
    parts, net, _ = train_and_save(step)
    memory = StepMemory(parts[0])
    issue(parts[0], memory)
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    saved = [each for each in parts[0].named if each.name in after]
    assert len(saved) >= 8
    for each in saved:
        assert torch.equal(memory.view(each.value), after[each.name]), each.name


def test_a_replay_plans_the_tasks_of_the_run() -> None:
    [part], _, plan = train_and_save(3)
    replayed = replay(part, "100%").plan
    assert replayed is not None
    mine, theirs = ([(t.name, t.phase) for t in p.graph.tasks] for p in (replayed, plan))
    assert mine == theirs
    assert {phase for _, phase in mine} == {"forward", "backward", "update"}


def test_a_file_holds_the_step_and_another_one_is_refused(tmp_path: Path) -> None:
    step = SavedStep("a step", 1 << 20, saved_parts(), threads=1)
    write_step(tmp_path / "step.pt", step)
    again = read_step(tmp_path / "step.pt")
    assert again.parts[0].ops == step.parts[0].ops
    assert (again.title, again.budget, again.threads) == ("a step", 1 << 20, 1)
    assert replay(again.parts[0]).differing == {}
    torch.save({"weights": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(OffloadError, match=r"weights.pt is no file of a step"):
        read_step(tmp_path / "weights.pt")
    torch.save({"format": 99, "step": ()}, tmp_path / "later.pt")
    with pytest.raises(OffloadError, match="has format 99, and this version reads format 1"):
        read_step(tmp_path / "later.pt")


def test_a_file_without_data_is_replayed_with_made_up_numbers() -> None:
    [part] = saved_parts()
    bare = part.without_data()
    assert not bare.data
    replayed = replay(bare)
    assert replayed.differing == {}
    assert replayed.results == replay(part).results


def test_a_part_that_makes_nothing_has_no_plan_and_no_fault() -> None:
    [part] = saved_parts()
    named = sorted({each.value.buffer for each in part.named})
    empty = replace(part, ops=[], held=[], given=named)
    assert replay(empty).plan is None
    assert bisect(empty) is None


def test_an_operation_that_is_not_registered_or_reads_files_is_refused() -> None:
    [part] = saved_parts()
    for name, says in (("theirs::op.default", "--import MODULE"), ("aten::from_file", "files")):
        full = name if name.count(".") else f"{name}.default"
        ops = [replace(part.ops[0], op=full), *part.ops[1:]]
        changed = replace(part, ops=ops)
        with pytest.raises(OffloadError, match=says):
            issue(changed, StepMemory(changed))


def test_a_pass_that_changes_a_value_is_named_with_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [part] = saved_parts()
    right = offload.live.planned_tapes.merge_whole_updates

    def merge_whole_updates(graph: TaskGraph) -> TaskGraph:
        """Forget one call of the update of 5.weight."""
        graph = right(graph)
        tasks = []
        for task in graph.tasks:
            if task.name == "5.weight.update":
                calls = [c for c in task.kernel.calls if "addcdiv" not in str(c.of_torch)]
                assert len(calls) < len(task.kernel.calls)
                task = replace(task, kernel=replace(task.kernel, calls=tuple(calls)))
            tasks.append(task)
        return graph.with_tasks(tasks, None)

    monkeypatch.setattr(offload.live.planned_tapes, "merge_whole_updates", merge_whole_updates)
    assert [*replay(part).differing] == ["5.weight"]
    found = bisect(part)
    assert found is not None
    assert found.stage == "pass merge_whole_updates"
    assert "5.weight.update (test_step_files.py:" in found.task
    assert found.value == "5.weight"


def test_a_returned_value_that_was_captured_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = saved_parts()
    right = offload.live.planned_tapes.graph_of

    def graph_of(*given: Any) -> tuple[TaskGraph, Any]:
        """Sum the losses of the samples. Gradients stay what they are."""
        graph, ends = right(*given)
        tasks = list(graph.tasks)
        [number] = [n for n, task in enumerate(tasks) if "nll_loss_forward" in task.name]
        [call] = tasks[number].kernel.calls
        summed = replace(call, args=(*call.args[:3], 2, *call.args[4:]))
        tasks[number] = replace(tasks[number], kernel=summed)
        return graph.with_tasks(tasks), ends

    monkeypatch.setattr(offload.live.planned_tapes, "graph_of", graph_of)
    found = bisect(part)
    assert found is not None
    assert found.stage == "capture, before any pass"
    assert "nll_loss_forward.default (test_step_files.py:" in found.task
    assert found.value == "output 0 is not what the operations make"


def test_a_copy_that_is_lost_is_named_with_the_task_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = saved_parts()
    budget = budget_bytes(parts, "90%")

    def lose(target: Any, source: Any, count: Any) -> None:
        del target, source, count

    monkeypatch.setattr(offload.running.binding, "memmove", lose)
    found = bisect(parts[0], budget, "serial")
    assert found is not None
    assert found.stage in ("the plan without a budget", f"the plan for {budget}")
    assert "test_step_files.py:" in found.task
    assert "differs before the task reads it" in found.value


def test_a_step_that_differs_from_itself_is_no_fault_of_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [part] = saved_parts()
    monkeypatch.setattr("offload.replaying.issuing.set_generators", lambda _: None)
    found = bisect(part)
    assert found is not None
    assert found.stage == "eager, which differs in a second run"


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def fit(strategy: Any, path: Path, accumulate: int = 1) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(24, 8))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[SaveStep(path, step=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_callback_saves_a_step_of_any_module(tmp_path: Path, accumulate: int) -> None:
    fit(OffloadStrategy(), tmp_path / "step.pt", accumulate)
    step = read_step(tmp_path / "step.pt")
    assert step.title == "step 2 of Net"
    assert len(step.parts) == accumulate
    assert all(bisect(part) is None for part in step.parts)


def test_a_callback_refuses_another_strategy(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"give Trainer\(strategy=OffloadStrategy\(\)\)"):
        fit("auto", tmp_path / "step.pt")


@pytest.mark.gpu
def test_a_step_on_a_gpu_has_the_bits_of_eager() -> None:
    [part] = saved_parts(device="cuda")
    assert part.device.startswith("cuda")
    budget = budget_bytes([part], "90%")
    assert replay(part, budget).differing == {}
    assert bisect(part, budget) is None
