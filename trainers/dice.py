"""What random numbers and a few settings of a process are for one of several jobs in it.

    job a   rolls its dice | turn ................ | keeps them
    job b                                            rolls its dice | turn ... | keeps them

Random generators belong to a process, and so do torch's settings and the seed that Lightning gives
to its workers. Every job has its own values of them: it puts them in place when its turn begins,
and keeps them when its turn ends. So a job draws what it would draw alone, in any order of turns.
"""

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.torch_seams import float32_precisions, set_float32_precisions

SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
"""The environment variables in which Lightning keeps a run's seed."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """The process-wide settings of torch that a Trainer or a user sets for a run."""

    deterministic: bool
    warn_only: bool
    benchmark: bool
    cudnn_deterministic: bool
    matmul_precision: str | None
    """None where the settings of the libraries are others: torch cannot say it then."""
    float32: tuple[str, ...]
    """The settings of the libraries."""
    dtype: torch.dtype

    @classmethod
    def now(cls) -> "TorchSettings":
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            _matmul_precision(),
            float32_precisions(),
            torch.get_default_dtype(),
        )

    def set(self) -> None:
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.backends.cudnn.benchmark = self.benchmark
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        if self.matmul_precision not in (None, _matmul_precision()):
            torch.set_float32_matmul_precision(self.matmul_precision)
        set_float32_precisions(self.float32)
        torch.set_default_dtype(self.dtype)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Dice:
    """The state of every generator of this process, and the settings beside them."""

    cpu: torch.Tensor
    """torch's generator."""
    python: Any
    numpy: Any
    device: torch.Tensor | None
    """The generator of the fleet's GPU; None where no GPU was in use. It has the others' seed."""
    seeds: tuple[str | None, ...]
    settings: TorchSettings

    @classmethod
    def now(cls, device: torch.device) -> "Dice":
        """Return the dice as they lie now. `device`: where the jobs of this process run."""
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            tuple(os.environ.get(name) for name in SEED_VARIABLES),
            TorchSettings.now(),
        )

    def roll(self, device: torch.device) -> None:
        """Put every generator and setting of this process into this state."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        elif device.type == "cuda":  # the dice were kept where no GPU was in use
            torch.cuda.manual_seed(torch.initial_seed())
        for name, value in zip(SEED_VARIABLES, self.seeds, strict=True):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.settings.set()

    @property
    def of_python(self) -> tuple[Any, ...]:
        """Those that torch has no part in, to be compared."""
        kind, keys, *others = self.numpy
        return self.python, kind, keys.tobytes(), *others

    def plain(self) -> dict[str, Any]:
        """Return the generators' states as tensors and plain values, as a checkpoint holds them."""
        kind, keys, position, has_gauss, gauss = self.numpy
        version, words, python_gauss = self.python
        return {
            "cpu": self.cpu,
            "python": [version, list(words), python_gauss],
            "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
            "device": self.device,
            "seeds": list(self.seeds),
        }

    @classmethod
    def of_plain(cls, saved: dict[str, Any]) -> "Dice":
        """Return the dice of a checkpoint. The settings are those of this process now: a program
        sets them again before it goes on."""
        version, words, python_gauss = saved["python"]
        kind, keys, position, has_gauss, gauss = saved["numpy"]
        return cls(
            saved["cpu"],
            (version, tuple(words), python_gauss),
            (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss),
            saved["device"],
            tuple(saved["seeds"]),
            TorchSettings.now(),
        )
