"""OffloadStrategy with a GPU's engines, over the CPU's twin of a device's streams."""

from collections.abc import Callable
from typing import Any

from benchmarks.twins.twin_graph import GraphTwin
from benchmarks.twins.twin_streams import Twin
from trainers import OffloadStrategy

TWINS = {"cuda": Twin, "cudagraph": GraphTwin}


class OnTwin(OffloadStrategy):
    """Its steps are driven as a GPU's are."""

    def __init__(self, make: Callable[[], Twin] = Twin, **more: Any) -> None:
        self.twins: list[Twin] = []
        self._make = make
        super().__init__(**{"engine": "cuda", "check_first_steps": 0, **more})

    @property
    def _driver(self) -> Any:
        def made() -> Twin:
            self.twins.append(self._make())
            return self.twins[-1]

        return made
