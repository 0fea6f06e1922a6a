"""How many lanes a second a member computes, as it tells the others in its headers.

first step   what happens once (a capture, an allocator that is built) is in its time: not told
later steps  smoothed
no lane      the rate stays, and `idle` says for how many steps: `deal.py` believes it less

rate = LaneRate()
rate.computed(4, seconds=0.2)
rate.computed(4, seconds=0.1)
rate.told                            # 40.0
"""

SMOOTHING = 0.3
"""The weight of the last step in a rate."""


class LaneRate:
    """One member's."""

    def __init__(self) -> None:
        self.told = 0.0
        """0.0 until it is known."""
        self.idle = 0
        """The steps that have ended since this member computed a lane."""
        self._is_warm = False

    def computed(self, lanes: int, seconds: float) -> None:
        """Take a time that lanes of one step took."""
        rate = lanes / seconds
        if not self._is_warm:
            self._is_warm = True
        elif not self.told or self.idle:
            self.told = rate
        else:
            self.told = (1 - SMOOTHING) * self.told + SMOOTHING * rate

    def ended(self, *, computed: bool) -> None:
        """Count a step that has ended; `computed` says whether this member had lanes of it."""
        self.idle = 0 if computed else self.idle + 1
