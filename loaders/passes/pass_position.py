"""Where a loader is in its passes: which pass, how much of it is served, and how.

    begin        a new pass, or the rest of one that a saved state is in the middle of
    served += 1  one more batch was served
    end          the last batch was served: the position is the beginning of the next pass

A pass that its consumer left in the middle stays where it is until the next one begins.
"""

from dataclasses import asdict, dataclass
from typing import Any

from loaders.arguments import Serving


@dataclass(slots=True)
class PassPosition:
    """The position of one loader. It is all that resuming needs to know of the order."""

    running: Serving
    """How the pass is served that runs or ran last."""
    next: Serving
    """How the passes after it are served."""
    pass_index: int = 0
    served: int = 0
    """So many batches of the pass were served."""
    resuming: bool = False
    """Whether the next iteration goes on in the middle of the pass."""

    @property
    def serving(self) -> Serving:
        """How the pass is served that the next iteration begins or goes on with."""
        return self.running if self.resuming else self.next

    def begin(self) -> None:
        """Begin the next pass, or go on with the one that is resumed."""
        if self.resuming:
            self.resuming = False
            return
        if self.served:
            # The consumer left the pass before its end. Its samples are gone; the next begins.
            self.end()
        self.running = self.next

    def end(self) -> None:
        """Go to the beginning of the next pass."""
        self.pass_index, self.served = self.pass_index + 1, 0

    def state(self) -> dict[str, Any]:
        """Return the position as plain values, as a loader's saved state has them."""
        return {
            "pass": self.pass_index,
            "served_batches": self.served,
            "running": asdict(self.running),
            "next": asdict(self.next),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "PassPosition":
        """Return the position of a saved state."""
        served = state["served_batches"]
        running, following = Serving(**state["running"]), Serving(**state["next"])
        return cls(running, following, state["pass"], served, resuming=served > 0)
