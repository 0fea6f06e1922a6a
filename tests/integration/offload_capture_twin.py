"""A process that captures steps from stand-ins on the CPU, which nobody can read: a touch ends it.

python offload_capture_twin.py resnet18 ..    "equal", or what differs
python offload_capture_twin.py --read        reads one: a segmentation fault
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import offload_models

from offload.graph.taskgraph import TaskGraph
from offload.memory.placement import name
from offload.tracing import stand_ins
from offload.tracing.capture import traced_training_step


def described(graph: TaskGraph) -> list[str]:
    lines = [repr(buffer) for buffer in graph.buffers]
    for task in graph.tasks:
        lines.append(f"{task.name} {task.reads} {task.writes} {task.after} {task.phase}")
        lines += [f"{name(c.op)} {c.args} {dict(c.kwargs)} {c.outputs}" for c in task.kernel.calls]
    return [*lines, repr((graph.outputs, graph.program.inputs, graph.program.outputs))]


def captured(case: Any) -> list[str]:
    model, optimizer = case.made()
    [batch] = case.batches(1)
    before = offload_models.state_of(model, optimizer)
    places = [(t.data_ptr(), t._version) for t in model.parameters()]
    with case.around():
        graph = traced_training_step(model, case.loss, optimizer, *batch)
    assert places == [(t.data_ptr(), t._version) for t in model.parameters()]
    after = offload_models.state_of(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    return described(graph)


def main(case: str) -> None:
    if case == "--read":
        stand_ins.claim(torch.device("cpu"), torch.float32, (8,)).sum()
        return
    model = offload_models.cases()[case]
    plain = captured(model)
    real = stand_ins.is_away

    def everywhere(tensor: torch.Tensor, device: torch.device) -> bool:
        object.__setattr__(everywhere, "asked", True)  # not as a step would change a value
        return True

    stand_ins.is_away = everywhere
    try:
        blind = captured(model)
    finally:
        stand_ins.is_away = real
    assert getattr(everywhere, "asked", False), "there were no stand-ins"
    for one, other in zip(plain, blind, strict=True):
        if one != other:
            sys.exit(f"{one}\n{other}")
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(argument)
