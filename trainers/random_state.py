"""The random generators of a process, and a few of its settings, for each of several jobs.

job a   restore | turn ................ | capture
job b                                             restore | turn ... | capture
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
    """None if the libraries have different settings, because torch has no single value then."""
    float32: tuple[str, ...]
    dtype: torch.dtype

    @classmethod
    def current(cls) -> "TorchSettings":
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            _matmul_precision(),
            float32_precisions(),
            torch.get_default_dtype(),
        )

    def apply(self) -> None:
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
class RandomState:
    """The state of every random generator of this process, the seeds, and the settings."""

    cpu: torch.Tensor
    """torch's generator."""
    python: Any
    numpy: Any
    device: torch.Tensor | None
    """The generator of the GPU; None if no GPU was in use. It has the seed of the others."""
    seeds: tuple[str | None, ...]
    settings: TorchSettings

    @classmethod
    def capture(cls, device: torch.device) -> "RandomState":
        """Return the state now. `device`: the device of the jobs of this process."""
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
            torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            tuple(os.environ.get(name) for name in SEED_VARIABLES),
            TorchSettings.current(),
        )

    def restore(self, device: torch.device) -> None:
        """Set every generator and setting of this process to this state."""
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)
        elif device.type == "cuda":  # captured where no GPU was in use
            torch.cuda.manual_seed(torch.initial_seed())
        for name, value in zip(SEED_VARIABLES, self.seeds, strict=True):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.settings.apply()

    @property
    def without_torch(self) -> tuple[Any, ...]:
        """The states of Python's and numpy's generators, which can be compared."""
        kind, keys, *others = self.numpy
        return self.python, kind, keys.tobytes(), *others

    def to_plain(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for a checkpoint."""
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
    def from_plain(cls, saved: dict[str, Any]) -> "RandomState":
        """Return the state of a checkpoint, with the settings that this process has now."""
        version, words, python_gauss = saved["python"]
        kind, keys, position, has_gauss, gauss = saved["numpy"]
        return cls(
            saved["cpu"],
            (version, tuple(words), python_gauss),
            (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss),
            saved["device"],
            tuple(saved["seeds"]),
            TorchSettings.current(),
        )
