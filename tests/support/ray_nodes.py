"""A Ray cluster of two nodes on this machine, each with one CPU, and small jobs for it."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainers.fleet import FleetError

STORE_BYTES = 100 * 2**20


def need_ray() -> None:
    """Skip the tests of a file where Ray is missing, and say how to get it."""
    from trainers.fleet.ray_cluster.node_fleet import import_tune

    try:
        import_tune()
    except FleetError as error:
        pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def head() -> Iterator[Any]:
    """A cluster of one node with one CPU, which this process belongs to."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Cluster(initialize_head=True, head_node_args=options)
        try:
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture
def cluster(head: Any) -> Iterator[Any]:
    """Two nodes. `cluster.worker_nodes` has the one that may be removed."""
    second = head.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    head.wait_for_nodes()
    yield head
    if second in head.worker_nodes:
        head.remove_node(second)


class Slope(L.LightningModule):
    """Learns a line, with dropout, so that its random numbers count."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def data() -> TensorDataset:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def loader() -> DataLoader[Any]:
    return DataLoader(data(), 8, shuffle=True)


def job(lr: float, passes: int = 3, callbacks: tuple[L.Callback, ...] = ()) -> dict[str, Any]:
    """The arguments of `Fleet.add`. The functions are made here, so they travel by value."""
    trainer = {"max_epochs": passes, "enable_checkpointing": False, "logger": False}
    return {
        "module": lambda: Slope(lr),
        "train": loader,
        "val": DataLoader(data(), 8),
        "trainer": {**trainer, "callbacks": [*callbacks]},
    }
