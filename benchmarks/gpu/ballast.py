"""Memory of the device that nobody else gets: so every peer has the same budget, asked or not.

    device  |############ ballast ############| spare | budget |      a process of its own
    peer    |                                 |=== whatever it takes, by whichever allocator ===|

The helper allocates by the driver alone (no torch) all but `leave` bytes, says so, and holds them
until its standard input ends, which it does however the one who started it ended. `SPARE` is for
what no plan counts: the peer's context, kernels that are loaded when first called, libraries.
"""

import ctypes
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Protocol

MIB = 1 << 20
SPARE = 1024 * MIB
"""Beside the budget, for everyone alike."""
GRANULE = 2 * MIB
CHUNK = 1024 * MIB
DRIFT = 256 * MIB
"""What is free may differ by so much from what was left: the rest is another process's."""
PATIENCE = 60.0
OUT_OF_MEMORY = 2
"""Of the driver's results."""


class BallastError(RuntimeError):
    """The budget cannot be enforced: said, and the row is not measured."""


class Memory(Protocol):
    """Of a device: the driver's, or a test's."""

    def free(self) -> int: ...

    def take(self, nbytes: int) -> bool:
        """Whether it was to be had. Given back when the process ends."""
        ...


class DriverMemory:
    """The first device's, by the CUDA driver."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", self._cuda.cuInit(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", self._cuda.cuDeviceGet(ctypes.byref(device), 0))
        retain = self._cuda.cuDevicePrimaryCtxRetain
        self._check("cuDevicePrimaryCtxRetain", retain(ctypes.byref(context), device))
        self._check("cuCtxSetCurrent", self._cuda.cuCtxSetCurrent(context))

    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        result = self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self._check("cuMemGetInfo", result)
        return free.value

    def take(self, nbytes: int) -> bool:
        address = ctypes.c_uint64()
        result = self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if result == OUT_OF_MEMORY:
            return False
        self._check("cuMemAlloc", result)
        return True

    def _check(self, what: str, result: int) -> None:
        if result:
            raise BallastError(f"{what} answers {result}")


def fill(memory: Memory, leave: int) -> int:
    """Takes all but `leave` bytes; how many that were."""
    free = memory.free()
    if free < leave:
        raise BallastError(
            f"only {free / MIB:,.0f} MiB of the device are free, {leave / MIB:,.0f} MiB are needed:"
            " another process holds its memory; end it, or take a smaller budget"
        )
    held, chunk = 0, CHUNK
    while (much := memory.free() - leave) >= GRANULE:
        size = min(chunk, much // GRANULE * GRANULE)
        if memory.take(size):
            held += size
        elif size > GRANULE:
            chunk = max(GRANULE, size // 2 // GRANULE * GRANULE)  # free memory in pieces
        else:
            break
    return held


def serve(memory: Memory, leave: int, asked: IO[str], answers: IO[str]) -> None:
    """The helper: fills, then says what is free at every line, until there are no more lines."""

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    try:
        answer(held=fill(memory, leave), free=memory.free())
    except BallastError as problem:
        return answer(problem=str(problem))
    for _ in asked:
        answer(free=memory.free())


class Ballast:
    """A context manager: within it `budget` bytes of the device, and `SPARE`, may be taken."""

    def __init__(
        self, budget: int, spare: int = SPARE, command: Sequence[str] | None = None
    ) -> None:
        """`command`: another helper, to be given the bytes to leave as its last word."""
        self.leave = budget + spare
        self.held = 0
        self._command = [
            *(command or (sys.executable, "-m", "benchmarks.gpu.ballast")),
            str(self.leave),
        ]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Ballast":
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.held = self._read()["held"]
            self.check()
        except BaseException:
            self.close()
            raise
        return self

    def check(self) -> int:
        """What is free now. To be asked before anything else is taken: raises if it is not what
        was left."""
        process = self._process
        if process is None or process.stdin is None:
            raise BallastError("the ballast is gone")
        with suppress(BrokenPipeError):
            process.stdin.write("free\n")
            process.stdin.flush()
        free = int(self._read()["free"])
        if abs(free - self.leave) > DRIFT:
            raise BallastError(
                f"{free / MIB:,.0f} MiB are free, {self.leave / MIB:,.0f} MiB were left: another"
                " process took or gave back memory of the device meanwhile"
            )
        return free

    def close(self) -> None:
        """Its memory is free when this returns. Safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdout is not None
        if not select.select([process.stdout], [], [], PATIENCE)[0]:
            raise BallastError(f"the ballast says nothing within {PATIENCE:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise BallastError(f"the ballast ended by itself, with code {process.wait()}")
        reply = json.loads(line)
        if "problem" in reply:
            raise BallastError(reply["problem"])
        return reply


def main(memory: Memory | None = None) -> None:
    try:
        there = memory or DriverMemory()
    except (OSError, BallastError) as problem:
        said = {"problem": f"no memory of a device to hold: {problem}"}
        os.write(1, (json.dumps(said) + "\n").encode())
        return
    serve(there, int(sys.argv[-1]), sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
