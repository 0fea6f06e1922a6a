"""How a worker ended, and what it was at, in words."""

import signal

from loaders.errors import SampleTimeout


def describe_exit(code: int | None) -> str:
    """What the exit code of a process says."""
    if code is None or code >= 0:
        return f"with exit code {code}"
    why = {
        signal.SIGKILL: ", often the kernel's doing when memory runs out",
        signal.SIGSEGV: ", a crash in native code",
        signal.SIGBUS: ", memory or disk that ran out under a mapped file",
    }
    return f"by signal {signal.Signals(-code).name}{why.get(signal.Signals(-code), '')}"


def sample_timeout(doing: str, sample_id: int, timeout: float) -> SampleTimeout:
    """The error for a sample at which a worker hangs. `doing`: what it tries, "read" say."""
    return SampleTimeout(
        f"it took longer than timeout={timeout:g} seconds to {doing} sample {sample_id}:"
        f" {doing} that sample by itself to see where it hangs, or raise timeout"
    )
