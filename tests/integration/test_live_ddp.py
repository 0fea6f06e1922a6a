"""Two gloo processes whose steps are live ones have the bits of torch's DDP.

python test_live_ddp.py FOLDER      every rank writes what differs, by run, to FOLDER/rankN.json
python test_live_ddp.py FAULT       something goes wrong on rank 1 (offload_ranks_faults.py)
"""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import offload_ranks as plain_ranks
import offload_ranks_faults as faults
import test_offload_ddp_faults as launching
from live_ranks import Summed
from support import offload_lightning as ol

from offload import CaptureError, StepError
from offload.graph.taskgraph import RANKS
from offload.live.core import why_no_core
from trainers.offloading.ddp_strategy import OffloadDDPStrategy


class TensorParallel(plain_ranks.Module):
    """Each rank has a part of the first layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(Summed.apply(self.enter(x))))


class InTurns(plain_ranks.Module):
    """Rank 1 diverges from its tape in every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * 1 if self.global_rank == 1 and batch_idx % 2 else loss


class Unused(plain_ranks.Module):
    """Nobody uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(2, 2)


SEARCHED = {"find_unused_parameters": True}
BOTH = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "val_check_interval": 1}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated and clipped": (BOTH, {}),
    "gathered": ({"make": plain_ranks.Gathering}, {}),
    "tensor parallel": ({"make": TensorParallel}, {}),
    "in turns": ({"make": InTurns, "accumulate_grad_batches": 2}, {}),
    "reads a value": ({"make": plain_ranks.Odd}, {}),
    "unused": ({"make": Unused}, SEARCHED),
    "other heads": ({"make": plain_ranks.Two}, SEARCHED),
}
"""Options of the trainer, and of DDP."""
BUDGETS = (None, "70%")


def refused(budget: str | None, make: Any = plain_ranks.Module, **given: Any) -> str:
    try:
        plain_ranks.train(OffloadDDPStrategy(budget, **given), make=make)
    except (CaptureError, StepError) as error:
        return str(error)
    return "it trains"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    rank = 0
    for name, (options, given) in RUNS.items():
        plain = plain_ranks.train(DDPStrategy(**given), **options)
        rank = plain.trainer.global_rank
        for budget in BUDGETS:
            more = {} if name == "unused" else given
            found = plain_ranks.train(OffloadDDPStrategy(budget, **more), **options)
            told[f"{name}, {budget}"] = ol.differences(plain, found)
    small = plain_ranks.train(OffloadDDPStrategy("70%", bucket_cap_mb=0.005))
    told["small buckets"] = ol.differences(plain_ranks.train(DDPStrategy()), small)
    told["small, shared"] = sum(t.lane == RANKS for t in small.strategy.plan.graph.tasks)
    told["without search"] = [refused(budget, plain_ranks.Two) for budget in BUDGETS]
    told["unknown"] = [refused(budget, init_sync=True) for budget in BUDGETS]
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by run."""
    if why := why_no_core():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{n}.json").read_text()) for n in range(2)]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_plain_ddps_to_the_last_bit(
    name: str, budget: str | None, ranks: list[dict[str, Any]]
) -> None:
    assert [rank[f"{name}, {budget}"] for rank in ranks] == [[], []]


def test_what_ranks_do_together_are_tasks_of_the_plan(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["small buckets"] == []
        assert rank["small, shared"] > 4  # they compare, and sum


def test_other_gradients_are_the_same_error_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["without search"] == ranks[1]["without search"]
    for said in ranks[0]["without search"]:
        assert said.startswith("rank 1 has other gradients in this step than rank 0")


def test_what_only_torchs_ddp_knows_is_left_to_it_or_refused(ranks: list[dict[str, Any]]) -> None:
    for without, within in (rank["unknown"] for rank in ranks):
        assert without == "it trains"
        assert "rank 0: OffloadDDPStrategy does not know the argument init_sync" in within


@pytest.mark.parametrize("fault", ["raises", "raises at once", "freezes", "dies"])
def test_an_error_on_one_rank_ends_both(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "SCRIPT", Path(__file__))
    zero, one = launching.ended(launching.start(fault))
    if fault == "freezes":
        assert zero == one
        assert zero.startswith("ended by StepError: rank 1 has other gradients in this step")
        assert "head.bias" in zero
        return
    mistake = 'KeyError: "rank 1\'s own mistake"'
    assert one == ("exit 3" if fault == "dies" else f"ended by {mistake}")
    assert zero.startswith("ended by StepError: rank 0 waited for the others")
    assert fault == "dies" or zero.endswith(f" rank 1: {mistake}")


def live(check_first_steps: int, **given: Any) -> OffloadDDPStrategy:
    return OffloadDDPStrategy(**given)


def fail(fault: str) -> None:
    setattr(faults, "OffloadDDPStrategy", live)  # noqa: B010
    if fault.endswith(" at once"):
        setattr(faults, "AT", 0)  # noqa: B010
    try:
        faults.main(fault.removesuffix(" at once"))
    except BaseException as error:
        said = " ".join([f"{error}", *getattr(error, "__notes__", [])])
        print(f"ended by {type(error).__name__}: {said}", flush=True)
        raise


if __name__ == "__main__":
    if Path(sys.argv[1]).is_dir():
        main(Path(sys.argv[1]))
    else:
        fail(sys.argv[1])
