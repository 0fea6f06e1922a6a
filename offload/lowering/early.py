"""Every update as soon as it may run: the gradient is freed, and need not wait for the others.

    b3  b2  b1  u3  u2  u1      ->      b3  u3  b2  u2  b1  u1

An update may run after the last task that it depends on: the one that completes the gradient, or
the last one that reads the parameter. All other tasks keep their order. Behind a norm over all
gradients every update depends on the norm, and nothing moves before it.

Peak live bytes do not rise: what an update touches was there after that last task already.
"""

from offload.taskgraph import TaskGraph


def early_updates(graph: TaskGraph) -> TaskGraph:
    """The graph with every update right after the last task before which it may not run."""
    needed = graph.dependencies()
    # A task's place is a path: (7,) is the seventh task, (7, 20) the update 20 that follows it,
    # (7, 20, 21) what follows that. Paths sort as the tasks are to run.
    places: list[tuple[int, ...]] = []
    for number, task in enumerate(graph.tasks):
        if task.phase == "update":
            last = max((places[before] for before in needed[number]), default=(-1,))
            places.append((*last, number))
        else:
            places.append((number,))
    order = sorted(range(len(places)), key=places.__getitem__)
    return graph.reordered(order)
