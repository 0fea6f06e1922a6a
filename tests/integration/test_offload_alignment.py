"""How far apart buffers lie: by 64 bytes on the CPU, by 256 on a device, whose kernels look."""

from dataclasses import replace

import pytest
import torch

from offload import GraphBuilder, Plan, RaceFound, plan
from offload.graph.memgraph import Place
from offload.planning.verify import verify
from offload.program.kernels import CPU, Program, Source

ODD = (100, 1, 4000, 257, 64, 70000)


def made(device: torch.device, budget: int | None = None) -> Plan:
    """A chain over buffers of odd sizes, each beside a parameter of odd size, with workspaces."""
    builder = GraphBuilder()
    before = builder.buffer("x", 10, "input")
    for number, nbytes in enumerate(ODD):
        w = builder.buffer(f"w{number}", nbytes + 7, "parameter")
        y = builder.buffer(f"y{number}", nbytes)
        builder.task(
            f"f{number}", [before, w], [y], workspace=66000 + number, kernel=lambda r, w: None
        )
        before = y
    builder.output(before)
    tensors: dict[str, Source] = {
        f"w{n}": torch.zeros(nbytes + 7, dtype=torch.uint8) for n, nbytes in enumerate(ODD)
    }
    graph = builder.graph(Program((), (), tensors, device=device))
    return plan(graph, budget)


def offsets(made: Plan) -> set[int]:
    graph = made.memgraph
    places = [access.place for node in graph.nodes for access in node.accesses]
    return {p.offset for p in (*places, *graph.starts.values(), *graph.scratch.values())}


@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize(("device", "alignment"), [(CPU, 64), (torch.device("cuda", 0), 256)])
def test_every_offset_is_a_multiple_of_what_kernels_look_at(
    device: torch.device, alignment: int, least: bool
) -> None:
    found = made(device)
    if least:
        found = made(device, found.smallest_bytes)
    assert found.graph.alignment == alignment
    assert all(offset % alignment == 0 for offset in offsets(found))
    if alignment == 64:
        assert any(offset % 256 for offset in offsets(found))  # so the other half says something


def test_an_offset_that_a_device_would_see_is_found_by_the_proof() -> None:
    found = made(torch.device("cuda", 0)).memgraph
    first, *rest = found.nodes
    access, *others = first.accesses
    moved = replace(access, place=Place(0, access.place.offset + 64, access.place.nbytes))
    broken = replace(found, nodes=(replace(first, accesses=(moved, *others)), *rest))
    with pytest.raises(RaceFound, match="not a multiple of 256"):
        verify(broken)
