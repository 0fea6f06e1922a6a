"""The mean loss of samples at their first serve, which the plateau rule watches."""

import logging
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

SAMPLE_LOSSES = "sample_losses"
"""A training_step may return one loss per sample under this key. The plateau rule then sees the
loss of first serves even if a batch mixes them with later serves."""


class FirstServeLoss:
    """Sums the loss of first serves between two validations."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._count = 0
        self._warned = False

    def add(self, outputs: Any, first: np.ndarray) -> None:
        """Add a batch. `outputs` is what training_step returned, `first` says which samples are
        served for the first time."""
        each = outputs.get(SAMPLE_LOSSES) if isinstance(outputs, dict) else None
        if each is not None:
            mask = torch.from_numpy(first).to(each.device)
            self._sum += float((each.detach() * mask).sum())
            self._count += int(first.sum())
        elif first.all():
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if loss is None:  # training_step skipped the batch
                return
            self._sum += float(loss) * len(first)
            self._count += len(first)
        elif not self._warned:
            self._warned = True
            log.warning(
                "the plateau rule sees accuracy only, because a batch mixes first and later serves"
                " and training_step does not return '%s' (one loss per sample)",
                SAMPLE_LOSSES,
            )

    def take_mean(self) -> float | None:
        """Return the mean since the last call, and begin anew; None if there was no first serve."""
        mean = self._sum / self._count if self._count else None
        self._sum, self._count = 0.0, 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"first_serve_loss": self._sum, "first_serves": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sum, self._count = state["first_serve_loss"], state["first_serves"]
