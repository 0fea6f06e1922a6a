"""RoundPipe's order, as its code has it: stages go round the cards, and weights are one step old.

    card 0   F0 of all micro-batches | F3 ...        a stage runs all micro-batches on one card
    card 1      F1 of all ...        | F4 ...        its weights come in, its gradients go out
    card 2         F2 of all ...     | B5 ...        a layer is computed again for its gradients

It is one graph of several steps, because the stages of the next step follow at once; without their
beginning and their end. Layers a stage are those of its published runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.offloading.language_steps import (
    ADAM,
    GRADIENT,
    STATE,
    WEIGHT,
    Machine,
    Part,
    Workload,
)
from offload import GraphBuilder, Role, simulate
from offload.graph.taskgraph import UPDATE
from offload.lowering.device_order import list_device_orders
from offload.planning.planner import build_memgraph
from offload.planning.policies import Policy

FORWARD_LAYERS, BACKWARD_LAYERS = 8, 2
SETS = 2
"""Sets of weights: a step has those of the last but one, as is RoundPipe's default."""
STEPS, SKIPPED = 10, 2
"""Steps of the graph, and how many come before those that count: 8, after which stages are on the
same cards again."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that run together: forward, backward, or both at the head."""

    kind: str
    layers: range
    seconds: float
    """Of a micro-batch."""


class RoundRobin:
    """The steps of one workload. Layer 0 has the embedding, and the head is the last layer."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self._work, self._machine = work, machine
        self._builder = GraphBuilder()
        self._passed = 2 * work.tokens * work.model.wide
        parts = list(work.model.list_parts(work.tokens))
        count = (len(parts) - 2) // work.model.layers
        self._layers = [parts[at : at + count] for at in range(1, len(parts) - 1, count)]
        self._layers[0] = [parts[0], *self._layers[0]]
        self._layers.append(parts[-1:])
        self._sizes = [sum(part.parameters for part in layer) for layer in self._layers]
        self._weights = [self._add_buffers(f"w{n}.", WEIGHT, Role.PARAMETER) for n in range(SETS)]
        self._states = self._add_buffers("s", STATE, Role.STATE)

    def tokens_per_second(self) -> float:
        """In the steady state."""
        stages, costs = list(self._list_stages()), self._machine.costs
        for step in range(STEPS):
            self._add_step(step, stages)
        [(_, graph)] = list_device_orders(self._builder.graph(), costs, {})
        capacities = dict.fromkeys(graph.devices, self._machine.memory // 64 * 64)
        memgraph = build_memgraph(graph, capacities, Policy(drop_ahead=64))
        ends = [0.0] * STEPS
        for number, _, _, end in simulate(memgraph, costs).timeline:
            task = graph.tasks[memgraph.nodes[number].task]
            if task.phase != UPDATE:
                step = int(task.name.split()[0])
                ends[step] = max(ends[step], end)
        seconds = (ends[-1] - ends[SKIPPED - 1]) / (STEPS - SKIPPED)
        return self._work.all_tokens / seconds

    def _add_buffers(self, name: str, size: int, role: Role) -> list[int]:
        add = self._builder.buffer
        return [add(f"{name}{n}", size * count, role) for n, count in enumerate(self._sizes)]

    def _list_stages(self) -> Iterator[Stage]:
        head = len(self._layers) - 1
        speed = self._work.tokens / self._machine.flops
        forward = [sum(part.forward for part in layer) * speed for layer in self._layers]
        both = [sum(map(self._flops_of_both, layer)) * speed for layer in self._layers]
        groups = [
            range(at, min(at + FORWARD_LAYERS, head)) for at in range(0, head, FORWARD_LAYERS)
        ]
        yield from (Stage("F", layers, sum(forward[n] for n in layers)) for layers in groups)
        yield Stage("X", range(head, head + 1), both[head])
        groups = [
            range(at, min(at + BACKWARD_LAYERS, head)) for at in range(0, head, BACKWARD_LAYERS)
        ]
        yield from (Stage("B", g, sum(both[n] for n in g)) for g in reversed(groups))

    def _flops_of_both(self, part: Part) -> float:
        """Forward, once more or at the head, and backward."""
        trained = part.forward and not self._work.frozen
        return part.forward + part.backward + (2 * part.parameters if trained else 0)

    def _add_step(self, step: int, stages: Sequence[Stage]) -> None:
        builder, weights = self._builder, self._weights[step % SETS]
        count = self._work.micro_batches
        sums = [] if self._work.frozen else self._add_buffers(f"g{step}.", GRADIENT, Role.GRADIENT)
        passed: dict[tuple[int, int], int] = {}
        """By layer and micro-batch: what goes into the layer."""
        back: dict[int, int] = {}
        for turn in range(count):
            passed[0, turn] = builder.buffer(f"ids{step}.{turn}", 8 * self._work.tokens, Role.INPUT)
        for number, stage in enumerate(stages):
            device = (step * len(stages) + number) % self._machine.cards
            first, used = stage.layers[0], [weights[n] for n in stage.layers]
            for turn in range(count):
                reads, writes = [passed[first, turn], *used], list[int]()
                if stage.kind == "F":
                    for layer in stage.layers:
                        passed[layer + 1, turn] = builder.buffer(
                            f"x{step}.{layer + 1}.{turn}", self._passed, Role.ACTIVATION
                        )
                        writes.append(passed[layer + 1, turn])
                else:
                    added = [sums[n] for n in stage.layers] if sums else []
                    reads += [*(added if turn else ()), *([back[turn]] if turn in back else ())]
                    back[turn] = builder.buffer(f"d{step}.{first}.{turn}", self._passed)
                    writes += [*added, back[turn]]
                builder.task(
                    f"{step} {stage.kind}{first}.{turn}", reads, writes,
                    device=device, seconds=stage.seconds,
                )  # fmt: skip
        for n in reversed(range(len(sums))):
            builder.task(
                f"{step} U{n}", (sums[n], self._states[n]), (weights[n], self._states[n]),
                lane="host", phase=UPDATE, traffic=ADAM * self._sizes[n],
            )  # fmt: skip
