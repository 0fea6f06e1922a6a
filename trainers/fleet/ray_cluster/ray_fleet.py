"""A fleet on every node of a Ray cluster.

add ... add         jobs, each with its work
deal                longest first, to whoever is done first
NodeFleet.run  NodeFleet.run       an actor a node; each tells the gatherer of ends
a node dies         its jobs that have not ended are dealt again to the others
FleetResult         one table of all nodes
"""

import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from offload.sizes import format_count
from trainers.fleet.deciding.events import FleetError
from trainers.fleet.fleet import Fleet
from trainers.fleet.jobs.seat import JobProgram
from trainers.fleet.keeping.fleet_result import FleetResult, JobResult
from trainers.fleet.ray_cluster.node_fleet import (
    Actor,
    DealtJob,
    Gatherer,
    NodeFleet,
    Ray,
    import_ray,
)

log = logging.getLogger(__name__)

NOTHING: Mapping[str, float] = MappingProxyType({})


def deal(
    work: Mapping[str, float], speeds: Mapping[str, float], loads: Mapping[str, float] = NOTHING
) -> Mapping[str, tuple[str, ...]]:
    """Return the jobs of each node, its longest first. `work`: of each job, in any unit. `speeds`:
    the work that each node does in a unit of time. `loads`: the work that nodes have already."""
    if not speeds:
        raise FleetError(f"there is no node for {format_count(len(work), 'job')}: start one")
    for job, amount in work.items():
        if not 0 <= amount < math.inf:
            raise FleetError(f"job {job} was given work={amount!r}: give a number of 0 or more")
    for node, speed in speeds.items():
        if not 0 < speed < math.inf:
            raise FleetError(f"node {node} has the speed {speed!r}: give a number above 0")
    load = {node: loads.get(node, 0.0) for node in speeds}
    dealt: dict[str, list[str]] = {node: [] for node in speeds}
    for job in sorted(work, key=lambda name: -work[name]):  # equal ones in the order of adding
        node = min(speeds, key=lambda name: (load[name] + work[job]) / speeds[name])
        dealt[node].append(job)
        load[node] += work[job]
    return {node: tuple(jobs) for node, jobs in dealt.items()}


NOT_HERE = MappingProxyType(
    {
        "stop": "a stop rule compares jobs, and the fleet of a node knows only its own",
        "watch": "it is called in the processes of the nodes",
        "folder": "it is an argument of RayFleet",
    }
)
READY_SECONDS = 120.0


@dataclass(slots=True)
class ClusterNode:
    """A node of the cluster, and what it has been given."""

    name: str
    ray_id: str
    cpus: float
    gpus: float
    actor: Actor = None
    batches: int = 0
    jobs: list[str] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.gpus or self.cpus


class RayFleet:
    """Add jobs, then call `fit`. `ray.init` must have connected to the cluster."""

    def __init__(
        self,
        *,
        folder: str | Path,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
        ready_seconds: float = READY_SECONDS,
        **fleet: Any,
    ) -> None:
        """`folder`: on a disk that all nodes share, the jobs of a node that dies go on from their
        checkpoints. `fleet`: other arguments of the `Fleet` of each node, such as budget=.
        `ready_seconds`: how long a node may take to give all its devices to the fleet."""
        for name, why in NOT_HERE.items():
            if name in fleet:
                raise FleetError(f"RayFleet({name}=...) cannot be given: {why}")
        known = signature(Fleet).parameters.keys() - NOT_HERE.keys()
        if unknown := sorted(fleet.keys() - known):
            raise FleetError(
                f"RayFleet({unknown[0]}=...) is no argument of a Fleet: known are"
                f" {', '.join(sorted(known))}"
            )
        self.folder = Path(folder).absolute()
        self.metric = metric
        self.mode = mode
        self._ready_seconds = ready_seconds
        self._arguments = {**fleet, "metric": metric, "mode": mode}
        self._jobs: dict[str, DealtJob] = {}
        self._ended: set[str] = set()
        self._run_name = f"run-{uuid.uuid4().hex[:6]}"

    def add(self, name: str, *, seed: int, work: float = 1.0, **job: Any) -> None:
        """Add a job with the arguments of `Fleet.add`. `work`: what it takes, such as predicted
        seconds, in the same unit for all jobs. A job needs a seed, because it may run anywhere."""

        def add(fleet: Fleet) -> None:
            fleet.add(name, seed=seed, **job)

        self._add(name, DealtJob(name, add, work))

    def add_program(self, name: str, program: JobProgram, *, work: float = 1.0) -> None:
        """Add a job that makes its Trainer itself."""
        self._add(name, DealtJob(name, lambda fleet: fleet.add_program(name, program), work))

    def _add(self, name: str, job: DealtJob) -> None:
        if name in self._jobs:
            raise FleetError(f"there are two jobs of the name {name!r}: give each its own")
        self._jobs[name] = job

    def fit(self) -> FleetResult:
        """Train all jobs on all nodes that are there now."""
        ray = import_ray()
        if not self._jobs:
            raise FleetError("the fleet has no jobs: call add() first")
        if not ray.is_initialized():
            raise FleetError("Ray is not connected: call ray.init(address=...) first")
        here = _only_on(ray.get_runtime_context().get_node_id())
        gatherer = ray.remote(Gatherer).options(num_cpus=0, scheduling_strategy=here).remote()
        nodes = self._nodes(ray)
        try:
            self._start(ray, nodes, gatherer)
            self._run(ray, nodes, gatherer)
            return self._result(*ray.get(gatherer.gathered.remote()))
        finally:
            for actor in (*(node.actor for node in nodes if node.actor is not None), gatherer):
                ray.kill(actor)

    def _nodes(self, ray: Ray) -> list[ClusterNode]:
        """Return the nodes with GPUs; where no node has one, all nodes with CPUs."""
        alive = [
            (node["NodeID"], node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
            for node in ray.nodes()
            if node["Alive"]
        ]
        has_gpus = any(gpus for _, _, gpus in alive)
        chosen = sorted(each for each in alive if (each[2] if has_gpus else each[1]))
        return [
            ClusterNode(f"node-{number}", ray_id, cpus, gpus)
            for number, (ray_id, cpus, gpus) in enumerate(chosen)
        ]

    def _start(self, ray: Ray, nodes: list[ClusterNode], gatherer: Actor) -> None:
        for node in nodes:
            actor = ray.remote(NodeFleet).options(
                num_cpus=node.cpus, num_gpus=node.gpus, scheduling_strategy=_only_on(node.ray_id)
            )
            node.actor = actor.remote(self.folder, self._arguments, gatherer)
        refs = {node.actor.ready.remote(): node for node in nodes}
        _, late = ray.wait([*refs], num_returns=len(refs), timeout=self._ready_seconds)
        if late:
            names = ", ".join(f"{refs[ref].name} ({refs[ref].ray_id})" for ref in late)
            raise FleetError(
                f"{names} did not give all CPUs and GPUs to the fleet within"
                f" {self._ready_seconds:.0f} s: end what else runs there, or give ready_seconds="
            )

    def _run(self, ray: Ray, nodes: list[ClusterNode], gatherer: Actor) -> None:
        alive = list(nodes)
        running = self._deal(alive, [*self._jobs], again=False)
        while running:
            [done], _ = ray.wait([*running], num_returns=1)
            node = running.pop(done)
            try:
                ray.get(done)
            except ray.exceptions.RayActorError as error:
                if node in alive:
                    alive.remove(node)
                    ray.kill(node.actor)  # if it was only out of reach, it must not go on
                    self._note_ends(ray, gatherer)
                    running |= self._deal_again(alive, node, error)
            else:
                self._note_ends(ray, gatherer)

    def _note_ends(self, ray: Ray, gatherer: Actor) -> None:
        ends, _ = ray.get(gatherer.gathered.remote())
        self._ended = {result.name for result, _ in ends}

    def _deal_again(
        self, alive: list[ClusterNode], dead: ClusterNode, error: Exception
    ) -> dict[Any, ClusterNode]:
        left = [job for job in dead.jobs if job not in self._ended]
        said = str(error).strip().splitlines()[-1].strip()
        if left and not alive:
            raise FleetError(
                f"no node is left, and {len(left)} jobs have not ended: {', '.join(left)}"
                f" ({said}). Their checkpoints are in {self.folder} on the nodes that had them"
            )
        log.warning(
            "%s (%s) has died: %d jobs are dealt again to %d nodes. %s",
            dead.name, dead.ray_id, len(left), len(alive), said,
        )  # fmt: skip
        return self._deal(alive, left, again=True) if left else {}

    def _deal(
        self, nodes: list[ClusterNode], jobs: list[str], again: bool
    ) -> dict[Any, ClusterNode]:
        """Send jobs to nodes. A node that still trains others begins them afterwards."""
        dealt = deal(
            {job: self._jobs[job].work for job in jobs},
            {node.name: node.speed for node in nodes},
            {node.name: self._load(node) for node in nodes},
        )
        running: dict[Any, ClusterNode] = {}
        for node in nodes:
            if mine := dealt[node.name]:
                node.batches += 1
                node.jobs += mine
                name = f"{self._run_name}/{node.name}-{node.batches}"
                sent = [self._jobs[job] for job in mine]
                running[node.actor.run.remote(name, sent, again)] = node
        return running

    def _load(self, node: ClusterNode) -> float:
        return sum(self._jobs[job].work for job in node.jobs if job not in self._ended)

    def _result(self, ends: list[Any], notes: Mapping[str, str]) -> FleetResult:
        results: dict[str, JobResult] = {result.name: result for result, _ in ends}
        history = {result.name: history for result, history in ends}
        jobs: dict[str, JobResult] = {}
        for name in self._jobs:
            if result := results.get(name):
                why = "; ".join(filter(None, (result.why, notes.get(name, ""))))
                jobs[name] = replace(result, why=why)
        return FleetResult(
            MappingProxyType(jobs), MappingProxyType(history), self.metric, self.mode
        )


def _only_on(ray_id: str) -> Any:
    """Return what tells Ray to start an actor on this node or nowhere."""
    from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
        NodeAffinitySchedulingStrategy,
    )

    return NodeAffinitySchedulingStrategy(node_id=ray_id, soft=False)
