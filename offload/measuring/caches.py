"""How much this machine's last-level caches hold, as Linux tells it.

    cpu0/cache/index3   level 3, 32768K, of 0-7      cpu8/cache/index3   level 3, 32768K, of 8-15

What is measured in less memory than some of them is the rate of a cache.
"""

from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


def last_level_bytes(cpus: Path = CPUS) -> int:
    """Bytes of all caches of the highest level together; 0 if the system does not say."""
    found: dict[tuple[int, str], int] = {}
    for size in cpus.glob("cpu[0-9]*/cache/index[0-9]*/size"):
        level, shared, text = (
            (size.parent / name).read_text(encoding="ascii").strip()
            for name in ("level", "shared_cpu_list", "size")
        )
        found[int(level), shared] = int(text.removesuffix("K")) * 1024
    highest = max((level for level, _ in found), default=0)
    return sum(nbytes for (level, _), nbytes in found.items() if level == highest)
