"""A step without a budget that does not fit is refused with a budget that does, in one line."""

import gc
import re
from typing import Any

import lightning as L
import pytest
import torch
from support import offload_lightning as ol
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offload
from offload import MemoryTooSmall
from offload.live import issued_needs
from offload.memory.device_memory import DeviceLeft
from offload.memory.host_memory import HostMemoryLeft
from trainers import OffloadStrategy

pytestmark = [pytest.mark.filterwarnings(line) for line in ol.QUIET]
WIDTH, ROWS, MIB = 256, 16384, 1 << 20
NEEDED = r"this step needs ([\d.]+) MiB"


class Wide(L.LightningModule):
    """Its activations are large. `cuts`: it looks at one of them."""

    def __init__(self, cuts: bool = False) -> None:
        super().__init__()
        self.cuts = cuts
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for number, layer in enumerate(self.layers):
            x = layer(x).relu()
            if self.cuts and number == 1:
                float(x.detach().sum())
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def rows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2 * ROWS, WIDTH)), ROWS)


def fit(module: L.LightningModule, budget: str | None = None, accelerator: str = "cpu") -> Any:
    strategy = OffloadStrategy(budget)
    how = ol.ONE_QUIET_EPOCH | {"accelerator": accelerator, "devices": 1}
    L.Trainer(strategy=strategy, **how).fit(module, rows())
    return strategy


def test_a_machine_without_the_memory_is_told_before_a_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = HostMemoryLeft(64 * MIB, "the test left so much")
    monkeypatch.setattr(issued_needs, "memory_left", lambda: left)
    module = Wide()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(MemoryTooSmall) as refused:
        fit(module)
    said = str(refused.value)
    assert "\n" not in said and "the test left so much" in said and "host_dir=" in said
    assert re.search(NEEDED, said) and "budget='0.03GiB'" in said
    # 12 activations before and 12 after their relu, of which torch keeps one each
    assert 12 * 16 * MIB <= refused.value.needed <= 27 * 16 * MIB
    assert all(map(torch.equal, before, module.parameters()))
    monkeypatch.setattr(issued_needs, "memory_left", lambda: HostMemoryLeft(1 << 40, ""))
    assert fit(Wide()) is not None


def refusal(module: L.LightningModule) -> str:
    """What it says. The error itself holds the step's batch on the device."""
    try:
        fit(module, None, "gpu")
    except MemoryTooSmall as error:
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        return str(error)
    return ""


def capped(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    left = DeviceLeft(torch.device("cuda", 0), nbytes, nbytes)
    monkeypatch.setattr(issued_needs, "device_left", lambda device: left)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("cuts", [False, True])
def test_a_gpu_without_the_memory_is_told_with_a_budget_that_works(
    cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(Wide(), "60%", "gpu")  # the rates of the device are measured outside of the cap
    capped(monkeypatch, 256 * MIB)
    try:
        said = refusal(Wide(cuts))
        budget = re.search(r"needs .* of cuda:0 without a budget.* give budget='([\d.]+GiB)'", said)
        assert budget is not None and "\n" not in said, said
        gc.collect()  # the failed step holds its batch
        torch.cuda.empty_cache()
        assert fit(Wide(cuts), budget[1], "gpu").planned_steps == 2
        model = nn.Sequential(*Wide().layers).to("cuda")
        with (
            pytest.raises(MemoryTooSmall, match="give budget="),
            offload.within(None, model, torch.optim.AdamW(model.parameters(), 0.1)) as loop,
        ):
            model(torch.ones(2 * ROWS, WIDTH, device="cuda")).square().mean().backward()
            assert loop.planned_steps == 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
