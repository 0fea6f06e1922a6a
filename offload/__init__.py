"""A step, planned to a byte budget and run in any legal order. Imports none of our other packages.

    with offload.within("8GiB", model, optimizer):
        for batch in loader: ...

    graph = offload.capture(step, *example_inputs)
    plan = offload.plan(graph, budget="8GiB")
    with offload.Runner(plan) as runner:
        outputs = runner(*inputs)

step -> TaskGraph -> Plan (MemGraph) -> Runner. See docs/offload.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.public_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names when one is first asked for: `offload.sizes` needs no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    return getattr(import_module("offload.public_names"), name)
