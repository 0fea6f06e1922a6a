"""The seeds of a swarm's random numbers: functions of the run's seed, the step and the lane.

A lane draws the same numbers whichever peer computes it, and again if it is computed again. After a
step every peer is at the same seed, so what callbacks draw is equal everywhere.
"""

import hashlib


def seed_of_lane(seed: int, step: int, lane: int) -> int:
    """The seed with which a lane's micro-batch is computed."""
    return _seed("lane", seed, step, lane)


def seed_after(seed: int, step: int) -> int:
    """The seed of whatever draws between this step and the next one."""
    return _seed("after", seed, step, 0)


def _seed(*parts: str | int) -> int:
    told = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=4).digest())
