"""Draws a plan: what lies where and what each lane does, over one simulated step.

    forward          | backward              | update
    ------------------------------------------ budget     bytes on the device by role, stacked; the
    ###resident####  ###acts###  ##grads##                dashed curve: the bytes without offload
    ------------------------------------------
    address by address, a rectangle a block               (one device only)
    bytes on the host by role
    compute  h2d  d2h  host                               who is busy, and for how much of the step

A role has one colour in all panels. Thousands of rectangles are drawn as one collection. If a curve
has more moments than a screen has columns, the highest of each column is drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offload.errors import GraphError
from offload.graph.memgraph import TASK
from offload.graph.taskgraph import HOST, Role
from offload.planning.wanted import peak_bytes
from offload.plans.account import (
    ROLES,
    Usage,
    count_at_home,
    find_lives,
    format_seconds,
    format_share,
    measure_usage,
    pick_highest,
    trace_unmoved,
)
from offload.plans.palette import COLOURS, FREE, INK, MUTED, PHASES, RULE, colour_of, legend_keys
from offload.sizes import UNITS, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from offload.plans.plan import Plan

SUFFIXES = (".png", ".svg")
WIDTH, LEFT, RIGHT, TOP, BOTTOM, GAP = 11.0, 0.85, 1.15, 0.75, 1.0, 0.22
"""Sizes in inches."""
COLUMNS = 1500
"""The number of moments of a curve that can be told apart."""
MANY = 2000
"""If there are more rectangles than this, an .svg holds them as pixels."""
Box = tuple[float, float, float, float]
"""Start, end, low, high."""


def draw(plan: "Plan", path: str | Path) -> None:
    """Write the picture to `path`, a .png or .svg file."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise GraphError(f"a picture needs a name that ends in .png or .svg, not {str(path)!r}")
    import matplotlib

    figure = _PlanPicture(plan).draw_figure()
    with matplotlib.rc_context({"svg.hashsalt": "offload", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if suffix == ".svg" else {})


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    size: float


class _PlanPicture:
    def __init__(self, plan: "Plan") -> None:
        self._plan = plan
        self._memgraph = plan.memgraph
        self._timeline = plan.simulation.timeline
        self._lives = find_lives(plan.memgraph, self._timeline)
        self._devices = plan.graph.devices
        self._time = _unit_of_time(plan.predicted_seconds)
        self._end = max(plan.predicted_seconds, 1e-12)
        self._roles: set[Role] = set()

    def draw_figure(self) -> "Figure":
        from matplotlib.figure import Figure

        lanes = self._lanes()
        host = measure_usage(self._memgraph, self._lives, HOST)
        with_host = int(host.total.max()) > 0.005 * self._plan.peak_bytes
        is_single = len(self._devices) == 1
        heights = [2.6] * len(self._devices) + [2.3] * is_single + [1.2] * with_host
        heights.append(0.24 * max(len(lanes), 1) + 0.1)
        height = TOP + BOTTOM + sum(heights) + GAP * (len(heights) - 1)
        figure = Figure(figsize=(WIDTH, height), facecolor="white")
        axes: list[Axes] = []
        y = height - TOP
        for tall in heights:
            box = (LEFT / WIDTH, (y - tall) / height, 1 - (LEFT + RIGHT) / WIDTH, tall / height)
            axes.append(figure.add_axes(box))
            y -= tall + GAP
        panels = iter(axes)
        for device in self._devices:
            self._draw_device(next(panels), device)
        if is_single:
            self._draw_addresses(next(panels), self._devices[0])
        if with_host:
            self._draw_host(next(panels), host)
        self._draw_lanes(next(panels), lanes)
        self._draw_frame(axes)
        self._draw_legend(figure, height)
        figure.text(
            LEFT / WIDTH, 1 - 0.24 / height, self._title(), color=INK, fontsize=11,
            fontweight="bold", va="center", parse_math=False,
        )  # fmt: skip
        return figure

    # ---- panels ------------------------------------------------------------------------------

    def _draw_device(self, axes: "Axes", device: int) -> None:
        plan = self._plan
        use = measure_usage(self._memgraph, self._lives, device, plan.reserve)
        peak = peak_bytes(plan.source, device) + plan.reserve
        budget = plan.budget.get(device)
        top = max(peak, int(use.total.max()), 1)
        if budget is not None and budget <= 1.5 * peak:
            top = max(top, budget)
        unit = _unit_of_size(top)
        if budget is not None:
            axes.axhspan(0, budget / unit.size, color=FREE, linewidth=0, zorder=0)
        self._draw_unmoved(axes, device, unit)
        residents = count_at_home(self._memgraph, [device])
        stays = {role: kept.nbytes for role, kept in residents.items()}
        self._draw_stack(axes, use, unit, stays)
        lines = [(peak, "without offload", MUTED, (1.0, 2.0))]
        if budget is not None and budget <= top:
            lines.append((budget, "budget", INK, (1.0, 0.0)))
        if stays:
            lines.append((sum(stays.values()), "resident", "white", (4.0, 1.5)))
        labelled: list[int] = []
        for nbytes, name, colour, dashes in lines:
            alone = all(abs(nbytes - other) > 0.13 * top for other in labelled)
            self._draw_level(axes, nbytes, name if alone else "", colour, dashes, unit)
            labelled.append(nbytes)
        axes.set_ylim(0, 1.06 * top / unit.size)
        axes.set_ylabel(f"device {device}, {unit.name}")

    def _draw_unmoved(self, axes: "Axes", device: int, unit: _Unit) -> None:
        """Draw what would lie there without offload; the difference to what lies there is
        offloaded."""
        times, levels = trace_unmoved(self._plan.source, self._memgraph, self._timeline, device)
        if not times:
            return
        xs = np.array([0.0, *times, self._end])
        ys = np.array([levels[0], *levels, levels[-1]]) + self._plan.reserve
        keep = pick_highest(xs, ys, COLUMNS)
        xs, ys = xs[keep] / self._time.size, ys[keep] / unit.size
        axes.fill_between(
            xs, ys, step="post", facecolor="none", edgecolor=RULE, hatch="////", linewidth=0
        )
        line = axes.step(xs, ys, where="post", color=INK, linewidth=1.1)[0]
        line.set_dashes((3, 2))

    def _draw_stack(
        self, axes: "Axes", use: Usage, unit: _Unit, stays: Mapping[Role, int] | None = None
    ) -> None:
        """Stack the roles: at the bottom what stays for the whole step, above it everything
        else."""
        keep = pick_highest(use.times, use.total, COLUMNS)
        xs = np.append(use.times[keep], self._end) / self._time.size
        stays = stays or {}
        layers = [(role, np.full(len(keep), stays.get(role, 0))) for role in ROLES]
        layers += [(role, use.by_role[role][keep] - stays.get(role, 0)) for role in ROLES]
        below = np.zeros(len(xs))
        for role, sizes in layers:
            if not sizes.any():
                continue
            self._roles.add(role)
            above = below + np.append(sizes, sizes[-1]) / unit.size
            axes.fill_between(xs, below, above, step="post", color=COLOURS[role], linewidth=0)
            below = above

    def _draw_addresses(self, axes: "Axes", device: int) -> None:
        top = max(self._memgraph.arenas.get(device, 0), 1)
        unit = _unit_of_size(top)
        places = [
            (life.start, life.end, life.block.place, life.role)
            for life in self._lives
            if life.block.place.arena == device
        ]
        if scratch := self._memgraph.scratch.get(device):
            places.append((0.0, self._end, scratch, Role.WORKSPACE))
        boxes = [
            (start, end, place.offset / unit.size, (place.offset + place.nbytes) / unit.size)
            for start, end, place, _ in places
        ]
        colours = [COLOURS[role] for *_, role in places]
        self._draw_boxes(axes, boxes, colours, apart=0.01 * top / unit.size)
        axes.set_ylim(0, top / unit.size)
        axes.set_ylabel(f"address, {unit.name}")

    def _draw_host(self, axes: "Axes", use: Usage) -> None:
        top = int(use.total.max())
        unit = _unit_of_size(top)
        self._draw_stack(axes, use, unit)
        limit = self._plan.host_budget
        if limit is not None and limit <= 2 * top:
            top = max(top, limit)
            self._draw_level(axes, limit, "host_budget", INK, (1.0, 0.0), unit)
        axes.set_ylim(0, 1.08 * top / unit.size)
        axes.set_ylabel(f"host, {unit.name}")

    def _draw_lanes(self, axes: "Axes", lanes: Sequence[str]) -> None:
        rows = {lane: len(lanes) - 1 - n for n, lane in enumerate(lanes)}
        boxes: list[Box] = []
        colours: list[str] = []
        last: dict[str, int] = {}
        for node, lane, start, end in self._timeline:
            colour, row, n = colour_of(self._memgraph, node), rows[lane], last.get(lane, -1)
            # Draw neighbours of the same colour as one box.
            if n >= 0 and colours[n] == colour and start - boxes[n][1] < self._end / COLUMNS / 4:
                boxes[n] = (boxes[n][0], max(end, boxes[n][1]), *boxes[n][2:])
                continue
            last[lane] = len(boxes)
            boxes.append((start, end, row + 0.12, row + 0.88))
            colours.append(colour)
        self._draw_boxes(axes, boxes, colours)
        for lane, row in rows.items():
            axes.annotate(
                f"busy {format_share(self._busy_seconds(lane), self._end)}", (1, row + 0.5),
                xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
                va="center", fontsize=8, color=INK,
            )  # fmt: skip
        axes.set_ylim(0, max(len(lanes), 1))
        axes.set_yticks([row + 0.5 for row in rows.values()], list(rows))

    # ---- parts -------------------------------------------------------------------------------

    def _draw_boxes(
        self,
        axes: "Axes",
        boxes: Sequence[Box],
        colours: Sequence[str],
        apart: float = float("inf"),
    ) -> None:
        """Draw boxes. Those higher than `apart` have white edges."""
        from matplotlib.collections import PolyCollection

        if not boxes:
            return
        few = len(boxes) <= MANY
        start, end, low, high = np.array(boxes).T
        start, end = start / self._time.size, end / self._time.size
        corners = np.stack([[start, low], [end, low], [end, high], [start, high]])
        edges = [
            "white" if few and tall > apart else colour
            for tall, colour in zip(high - low, colours, strict=True)
        ]
        polygons = PolyCollection(
            list(corners.transpose(2, 0, 1)), facecolors=list(colours), edgecolors=edges,
            linewidths=0.3, rasterized=not few,
        )  # fmt: skip
        axes.add_collection(polygons, autolim=False)

    def _draw_level(
        self,
        axes: "Axes",
        nbytes: int,
        name: str,
        colour: str,
        dashes: tuple[float, float],
        unit: _Unit,
    ) -> None:
        """Draw a line across the panel, with its meaning beside it."""
        y = nbytes / unit.size
        axes.axhline(y, color=colour, linewidth=1.2, linestyle=(0, dashes))
        if name:
            axes.annotate(
                f"{name}\n{format_size(nbytes)}", (1, y), xycoords=("axes fraction", "data"),
                xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
                color=MUTED if colour == "white" else colour,
            )  # fmt: skip

    def _draw_frame(self, axes: "list[Axes]") -> None:
        """Give all panels the same time axis, with the phases marked."""
        phases = self._phases()
        for panel in axes:
            panel.set_xlim(0, self._end / self._time.size)
            panel.tick_params(length=0, labelsize=8, labelcolor=MUTED, labelbottom=False)
            panel.yaxis.label.set(size=8.5, color=MUTED)
            for side, spine in panel.spines.items():
                spine.set_visible(side in ("left", "bottom"))
                spine.set_color(RULE)
            for _, _, end in phases[:-1]:
                panel.axvline(end / self._time.size, color=INK, linewidth=0.7, alpha=0.6)
        axes[-1].tick_params(labelbottom=True)
        axes[-1].set_xlabel(f"simulated step, {self._time.name}", size=8.5, color=MUTED)
        for name, begin, end in phases:
            axes[0].annotate(
                name, ((begin + end) / 2 / self._end, 1), xycoords="axes fraction",
                xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8.5, color=MUTED,
            )  # fmt: skip

    def _draw_legend(self, figure: "Figure", height: float) -> None:
        """Explain the colours: memory in one row, tasks in another."""
        memory, other = legend_keys(self._plan, self._roles)
        for row, keys in enumerate((other, memory)):
            figure.legend(
                handles=keys, loc="lower left", fontsize=8, frameon=False, ncols=len(keys),
                bbox_to_anchor=((LEFT - 0.1) / WIDTH, (0.05 + 0.22 * row) / height),
                handlelength=1.4, columnspacing=1.4, labelcolor=INK,
            )  # fmt: skip

    def _title(self) -> str:
        plan = self._plan
        limits = {budget for budget in plan.budget.values() if budget is not None}
        limit = f"budget {format_size(max(limits))}" if limits else "no budget"
        share = format_share(plan.device_bytes, plan.peak_bytes + plan.reserve)
        return (
            f"{limit}: {format_size(plan.device_bytes)} taken, {share} of a step without offload"
            f"  ·  {format_seconds(plan.predicted_seconds)} predicted, {plan.bound.lane} binds"
        )

    # ---- facts -------------------------------------------------------------------------------

    def _lanes(self) -> list[str]:
        kinds = ("compute", "h2d", "d2h", "d2d", "host")

        def rank(lane: str) -> tuple[int, str]:
            return next((n for n, kind in enumerate(kinds) if lane.startswith(kind)), 9), lane

        return sorted(self._plan.simulation.busy, key=rank)

    def _busy_seconds(self, lane: str) -> float:
        workers = self._plan.costs.host_workers if lane == "host" else 1
        return self._plan.simulation.busy[lane] / workers

    def _phases(self) -> list[tuple[str, float, float]]:
        """Name, beginning and end of each phase; empty if there is only one. A phase ends with its
        last task."""
        ends: dict[str, float] = {}
        for number, _, _, end in self._timeline:
            node = self._memgraph.nodes[number]
            if node.kind == TASK:
                phase = self._memgraph.graph.tasks[node.task].phase
                ends[phase] = max(end, ends.get(phase, 0.0))
        phases: list[tuple[str, float, float]] = []
        begin = 0.0
        for phase in (phase for phase in PHASES if phase in ends):
            if ends[phase] - begin > 0.04 * self._end:
                phases.append((phase, begin, ends[phase]))
                begin = ends[phase]
        return phases if len(phases) > 1 else []


def _unit_of_size(most: int) -> _Unit:
    power = min(max((int(most).bit_length() - 1) // 10, 0), 4)
    return _Unit(UNITS[power], 1024.0**power)


def _unit_of_time(seconds: float) -> _Unit:
    return next(
        (_Unit(name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size),
        _Unit("us", 1e-6),
    )
