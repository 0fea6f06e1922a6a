"""Which cells of the GPU suite a command takes, and what a peer is told of its budget."""

import importlib
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
README = (BENCHMARKS / "gpu" / "README.md").read_text(encoding="utf-8")
FIRST = re.findall(r"^\| \d+ \| (\d+) \| `(run\.sh .*)` \|$", README, re.MULTILINE)
GIB = 1 << 30


@pytest.fixture(autouse=True)
def benchmarks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def module(name: str) -> Any:
    return importlib.import_module(name)


# ---- --only -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cells", "command"), FIRST)
def test_what_is_to_be_run_first_takes_as_many_cells_as_the_readme_says(
    cells: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    frame = module("gpu.__main__")
    asked = frame.arguments()
    steps = frame._asked_for(module("gpu.part").load(asked.part).steps(False), asked.only)
    taken = [cell for step in steps for cell in step.cells]
    assert len(taken) == len(set(taken)) == int(cells)


def test_the_readme_says_what_to_run_first_of_every_part_that_is_not_whole() -> None:
    assert {command.split()[1] for _, command in FIRST} == set("cdefghij")


def test_a_word_that_no_cell_has_is_told_with_the_cells_that_there_are() -> None:
    step = module("gpu.part").Step
    steps = [step("", ("llama; 6GiB", "llama; 8GiB")), step("", ("vit; 8GiB",))]
    asked_for = module("gpu.__main__")._asked_for
    assert [one.cells for one in asked_for(steps, ["8GiB"])] == [("llama; 8GiB",), ("vit; 8GiB",)]
    assert asked_for(steps, []) == steps
    with pytest.raises(SystemExit, match=r"'8 GiB'.*\n.*llama; 6GiB\n.*llama; 8GiB\n.*vit; 8GiB"):
        asked_for(steps, ["vit", "8 GiB"])


# ---- what peers are told of their budget --------------------------------------------------------


def setup(task: str, gib: float) -> Any:
    found = module("gpu.peers.task")
    return found.Setup({**found.tasks(False), **found.ladder(False)}[task], int(gib * GIB), "cpu")


@pytest.mark.parametrize("task", ["7B LoRA 8x1K", "GPT-2 1.5B 8x1K", "LoRA 32B 1x1K"])
@pytest.mark.parametrize("gib", [1, 8, 16])
def test_what_zero_3_may_hold_beside_the_step_is_a_small_part_of_its_budget(
    task: str, gib: float
) -> None:
    zero, asked = module("gpu.peers.zero"), setup(task, gib)
    told = zero.config(asked, zero.streamed(asked))["zero_optimization"]
    live, ahead = told["stage3_max_live_parameters"], told["stage3_prefetch_bucket_size"]
    stays, bucket = told["stage3_model_persistence_threshold"], told["reduce_bucket_size"]
    assert told["stage3_max_reuse_distance"] == 0
    assert 0 < told["stage3_param_persistence_threshold"] <= stays
    assert 0 < ahead < live
    held = 2 * (live + stays + 2 * bucket + told["allgather_bucket_size"])
    assert held <= 0.2 * asked.budget
    assert told["allgather_bucket_size"] % 2 == 0  # asked for by stage 2
    size = asked.kind.size
    if gib >= 8:  # else a block is fetched matrix by matrix
        assert live >= 4 * size.width**2 + 3 * size.width * size.inner


def test_deepspeed_knows_every_word_of_its_configuration() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config", exc_type=ImportError)
    zero, asked = module("gpu.peers.zero"), setup("7B LoRA 8x1K", 8)
    for stage in ({"stage": 2}, zero.streamed(asked)):
        config.DeepSpeedZeroConfig(**zero.config(asked, stage)["zero_optimization"])


def test_accelerate_gets_whole_blocks_and_room_for_what_one_computes() -> None:
    found, asked = module("gpu.peers.dispatched"), setup("13B prefill 8K", 8)
    size = asked.kind.size
    block = 2 * (4 * size.width**2 + 3 * size.width * size.inner)
    widest = 2 * size.length * size.inner
    assert 3 * widest < found.room(asked) < asked.budget - 2 * block
    small = module("gpu.peers.task").tasks(True)
    kinds = [small["prefill"].kind, small["full"].kind]
    made = [module("gpu.models").decoder(kind, "cpu") for kind in kinds]
    blocks = {type(getattr(m.blocks[0], "inner", m.blocks[0])).__name__ for m in made}
    assert blocks == set(found.WHOLE_BLOCKS)


def test_a_second_peer_in_a_process_has_the_world_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsdp2, worlds, ends = module("gpu.peers.fsdp2"), [], []
    world = SimpleNamespace(
        is_initialized=lambda: bool(worlds),
        init_process_group=lambda backend, **how: worlds.append((backend, how["world_size"])),
        destroy_process_group=None,
    )
    monkeypatch.setattr(fsdp2, "distributed", world)
    monkeypatch.setattr(fsdp2.atexit, "register", ends.append)
    for _ in range(2):
        fsdp2.group(setup("7B LoRA 8x1K", 8))
    assert worlds == [("gloo", 1)]
    assert ends == [world.destroy_process_group]
