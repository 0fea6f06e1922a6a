"""Data sets for tests/integration/test_processes.py: a worker process has to import them."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch


class Sized:
    """Sample i has i bytes, all of value i % 251."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index,), index % 251, dtype=torch.uint8)


class Picky(Exception):
    """Can be pickled, but not rebuilt: it needs two arguments."""

    def __init__(self, what: str, where: int) -> None:
        super().__init__(f"{what} at {where}")


class Faulty:
    """Sample i is i; these are not."""

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise KeyError("sector 7") from OSError("the disk")
        if index == 14:
            raise Picky("unlucky", index)
        if index == 15:
            return lambda: index
        if index == 16:
            raise SystemExit(3)
        return torch.tensor(index)


class Deadly:
    """Reading sample 5 ends the process, `times` times; a file counts."""

    def __init__(self, how: str, times: int, count: Path) -> None:
        self.how, self.times, self.count = how, times, count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            before = self.count.stat().st_size if self.count.exists() else 0
            if before < self.times:
                self.count.write_text("x" * (before + 1))
                if self.how.startswith("SIG"):
                    os.kill(os.getpid(), getattr(signal, self.how))
                os._exit(3)
        return torch.tensor(index)


class Reporting:
    """Says what the process is like."""

    def __getitem__(self, index: int) -> Any:
        return (torch.get_num_threads(), os.getpid(), threading.active_count())


class Hanging:
    """Sample 1 says that it is being read, and never comes."""

    def __init__(self, fifo: Path) -> None:
        self.fifo = fifo

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            self.fifo.write_text("reading")
            threading.Event().wait()
        return torch.tensor(index)


class Stuck:
    """Sample i is i; some never come, and 13 cannot be read."""

    def __init__(self, *never: int) -> None:
        self.never = never

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.never:
            threading.Event().wait()
        if index == 13:
            raise KeyError("sector 7")
        return torch.tensor(index)


class Slow:
    """Sample i is i, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Event().wait(self.seconds)
        return torch.tensor(index)


class Stubborn(Hanging):
    """... and does not mind a SIGTERM."""

    def __getitem__(self, index: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().__getitem__(index)


class Waiting:
    """Every sample says that it is being read and waits to be let go on."""

    def __init__(self, began: Path, go_on: Path) -> None:
        self.began, self.go_on = began, go_on

    def __getitem__(self, index: int) -> torch.Tensor:
        self.began.write_text(f"{index}")
        self.go_on.read_text()
        return torch.tensor(index)


class WithAThread:
    """Leaves a thread behind that holds its process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        threading.Thread(target=threading.Event().wait).start()
        return torch.tensor(index)


class Unpicklable:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return torch.tensor(index)


class NotRebuilt:
    """Falls apart where it is unpickled."""

    def __getitem__(self, index: int) -> None: ...

    def __reduce__(self) -> Any:
        return int, ("no number",)


class DeadAtStart:
    """Ends the process where it is unpickled."""

    def __getitem__(self, index: int) -> None: ...

    def __reduce__(self) -> Any:
        return os._exit, (9,)


class Together:
    """Sample i is i and the number of samples that were read with it; 13 cannot be read."""

    def __init__(self, spare: int = 0) -> None:
        self.spare = spare

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, ids: list[int]) -> list[torch.Tensor]:
        if 13 in ids:
            raise KeyError("sector 7")
        return [torch.tensor([index, len(ids)]) for index in [*ids, *ids[: self.spare]]]
