"""A fleet on two nodes of a Ray cluster, both of them on this machine; one of them dies."""

import sys
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from support import ray_nodes
from support.ray_nodes import job, need_ray

from trainers.fleet import Fleet, FleetError, FleetResult
from trainers.fleet.ray_cluster import RayFleet

need_ray()
head, cluster = ray_nodes.head, ray_nodes.cluster
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
RATES = {"a": 0.01, "b": 0.02, "c": 0.03, "d": 0.04}


class DiesThere(L.Callback):
    """Stands still in the middle of a pass on one node, until the node is gone."""

    def __init__(self, node: str, marker: Path) -> None:
        self.node, self.marker = node, marker

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with self.marker.with_name("begins").open("a") as file:
            file.write(f"{trainer.global_step} ")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        import ray

        here = ray.get_runtime_context().get_node_id()
        if trainer.global_step == 6 and here == self.node:
            self.marker.touch()
            threading.Event().wait()


def alone(folder: Path) -> FleetResult:
    fleet = Fleet("64KiB", "cpu", folder=folder, metric="val_loss")
    for name, lr in RATES.items():
        fleet.add(name, seed=0, **job(lr))
    return fleet.fit()


def cloudpickled_by_value() -> None:
    from ray import cloudpickle

    for module in (ray_nodes, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)


def test_what_a_node_cannot_do_is_refused(tmp_path: Path) -> None:
    for name in ("stop", "watch"):
        with pytest.raises(FleetError, match=f"RayFleet\\({name}=...\\) cannot be given"):
            RayFleet(folder=tmp_path, **{name: None})
    with pytest.raises(
        FleetError, match=r"RayFleet\(budgit=...\) is no argument of a Fleet: .*budget"
    ):
        RayFleet(folder=tmp_path, budgit="1GiB")
    fleet = RayFleet(folder=tmp_path)
    with pytest.raises(FleetError, match="no jobs"):
        fleet.fit()
    fleet.add("a", seed=0, **job(0.1))
    with pytest.raises(FleetError, match="two jobs of the name 'a'"):
        fleet.add("a", seed=0, **job(0.1))
    with pytest.raises(FleetError, match=r"ray\.init"):
        fleet.fit()


def test_nodes_share_the_jobs_and_each_has_the_bits_it_has_in_a_fleet_of_one_machine(
    cluster: Any, tmp_path: Path
) -> None:
    cloudpickled_by_value()
    fleet = RayFleet(budget="64KiB", devices="cpu", folder=tmp_path / "ray", metric="val_loss")
    for name, lr in RATES.items():
        fleet.add(name, seed=0, work=lr, **job(lr))
    fleet.add("e", seed=0, work=0.01, **{**job(0.1), "module": lambda: 1 / 0})
    result = fleet.fit()
    expected = alone(tmp_path / "alone")
    assert [*result.jobs] == [*RATES, "e"]
    for name, wanted in expected.jobs.items():
        assert (result.jobs[name].state, result.jobs[name].metric) == ("finished", wanted.metric)
        assert max(result.history[name]) == max(expected.history[name]) == 12
    assert result.best == expected.best
    assert result.jobs["e"].state == "failed"
    assert "ZeroDivisionError" in result.jobs["e"].why
    nodes = {each.folder.parts[-3]: set[str]() for each in result.jobs.values()}
    for name, each in result.jobs.items():
        nodes[each.folder.parts[-3]].add(name)
    assert sorted(map(sorted, nodes.values())) == [["a", "d", "e"], ["b", "c"]]


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "a folder a node"])
def test_the_jobs_of_a_node_that_dies_go_on_elsewhere(
    shared: bool, cluster: Any, tmp_path: Path
) -> None:
    cloudpickled_by_value()
    [doomed] = cluster.worker_nodes
    marker = tmp_path / "stands"
    # A day between two checkpoints: as if the other node could not see the folder of this one.
    minutes = 1e-9 if shared else 1440.0
    fleet = RayFleet(
        budget="64KiB",
        devices="cpu",
        folder=tmp_path / "ray",
        metric="val_loss",
        checkpoint_minutes=minutes,
    )
    for name, lr in RATES.items():
        fleet.add(name, seed=0, **job(lr, callbacks=(DiesThere(doomed.node_id, marker),)))

    def kill() -> None:
        while not marker.exists():
            threading.Event().wait(0.05)
        cluster.remove_node(doomed)

    killer = threading.Thread(target=kill, name="killer", daemon=True)
    killer.start()
    result = fleet.fit()
    killer.join()
    expected = alone(tmp_path / "alone")
    for name, wanted in expected.jobs.items():
        assert (result.jobs[name].state, result.jobs[name].metric) == ("finished", wanted.metric)
    begins = (tmp_path / "begins").read_text().split()
    assert set(begins) == ({"0", "6"} if shared else {"0"})
    why = [each.why for each in result.jobs.values()]
    said = "it went on from the checkpoint of node-" if shared else "it began anew on another node"
    assert sum(said in each for each in why) >= 1
    assert sum(not each for each in why) == 2, "the other node's own"
