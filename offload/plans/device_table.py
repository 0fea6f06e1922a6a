"""What each of several devices does in a plan, as a table: a row a device.

            busy      peak       bytes in     bytes out
device 0    87 %    20.5 GiB      4.1 GiB      66.0 GiB
idle        13 % of the time of all devices
"""

from typing import TYPE_CHECKING

from offload.graph.memgraph import TASK, ends_of_lane, lane_name
from offload.graph.taskgraph import HOST
from offload.graph.topology import DRAM
from offload.plans.account import find_lives, format_share, measure_usage
from offload.sizes import format_size

if TYPE_CHECKING:
    from offload.plans.plan import Plan

HEAD = f"{'':<12}{'busy':>8}{'peak':>13}{'bytes in':>13}{'bytes out':>13}"


def device_table(plan: "Plan") -> list[str]:
    """A line for the head and one for each device; nothing for a plan of one device."""
    devices, memgraph = plan.graph.devices, plan.memgraph
    if len(devices) == 1:
        return []
    moved = dict.fromkeys(devices, 0)
    into, out = dict(moved), dict(moved)
    for node in memgraph.nodes:
        if node.kind != TASK:
            source, target = ends_of_lane(node.lane)
            if source != HOST:
                out[source] += node.nbytes
            if target != HOST:
                into[target] += node.nbytes
    lived = find_lives(memgraph, plan.simulation.timeline)
    lines, makespan, computed = [HEAD.rstrip()], plan.simulation.makespan, 0.0
    for device in devices:
        busy = plan.simulation.busy.get(lane_name("compute", device), 0.0)
        computed += busy
        peak = int(measure_usage(memgraph, lived, device, plan.reserve).total.max())
        cells = format_share(busy, makespan), format_size(peak)
        sizes = format_size(into[device]), format_size(out[device])
        lines.append(
            f"{f'device {device}':<12}{cells[0]:>8}"
            + "".join(f"{c:>13}" for c in (cells[1], *sizes))
        )
    whole = makespan * len(devices)
    idle = format_share(whole - computed, whole)
    return [*lines, f"{'idle':<12}{idle:>8} of the time of all devices"]


def describe_part(part: str) -> str:
    """What sets a bound, in words: `compute3` is the kernels of device 3."""
    if part == DRAM:
        return "the host's memory"
    if part == "host":
        return "the tasks of the host"
    if part.startswith("uplink"):
        _, number, way = part.split()
        return f"uplink {number}, {'to' if way == 'h2d' else 'from'} its devices"
    for lane, words in (
        ("compute", "the kernels of device"), ("h2d", "the link to device"),
        ("d2h", "the link from device"),
    ):  # fmt: skip
        if part.startswith(lane):
            return f"{words} {part[len(lane) :] or 0}"
    return part
