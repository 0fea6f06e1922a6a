"""Moves every update to the first place where it may run, so that its gradient is freed early.

    b3  b2  b1  u3  u2  u1      ->      b3  u3  b2  u2  b1  u1

An update may run after the last task that it depends on: the task that completes the gradient, or
the last one that reads the parameter. All other tasks keep their order. If gradients are clipped by
a norm, every update depends on the norm, and none moves before it.

Peak live bytes do not rise: whatever an update touches is live after that last task anyway.
"""

from offload.graph.taskgraph import TaskGraph


def move_updates_early(graph: TaskGraph) -> TaskGraph:
    """Put every update right after the last task that it depends on."""
    needed = graph.dependencies()
    # A task's place is a path: (7,) is the seventh task, (7, 20) is update 20, which follows it,
    # and (7, 20, 21) follows that one. Sorting the paths gives the new order.
    places: list[tuple[int, ...]] = []
    for number, task in enumerate(graph.tasks):
        if task.phase == "update":
            last = max((places[before] for before in needed[number]), default=(-1,))
            places.append((*last, number))
        else:
            places.append((number,))
    order = sorted(range(len(places)), key=places.__getitem__)
    return graph.reorder(order)
