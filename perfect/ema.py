"""An exponential moving average of a module's weights, beside the weights themselves.

It is what validation (and so the plateau rule) looks at: the raw weights of a high learning rate
jump by several points from one evaluation to the next. Buffers (BatchNorm statistics) are averaged
too; whole numbers (counters) are copied.
"""

from typing import Any

import torch

WARMUP_STEPS = 10  # the average forgets the initial weights faster at first, as TF's EMA does


class Ema:
    """Starts at the module's present state."""

    def __init__(self, module: torch.nn.Module, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._shadow = {name: value.detach().clone() for name, value in _state(module).items()}

    @torch.no_grad()
    def update(self, module: torch.nn.Module) -> None:
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (WARMUP_STEPS + self.updates))
        now = _state(module)
        names = [name for name, value in now.items() if value.is_floating_point()]
        for name in names:  # it lies where its weight does: an offloaded run has some on the host
            if self._shadow[name].device != now[name].device:
                self._shadow[name] = self._shadow[name].to(now[name].device)
        shadows, values = [self._shadow[n] for n in names], [now[n] for n in names]
        # One fused call, as torch.optim makes it: a call a tensor costs more than the arithmetic.
        torch._foreach_lerp_(shadows, values, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]
        for name in now.keys() - names:
            self._shadow[name].copy_(now[name])

    @torch.no_grad()
    def swap(self, module: torch.nn.Module) -> None:
        """Exchange average and weights; again to get them back."""
        for name, value in _state(module).items():
            kept = value.clone()
            value.copy_(self._shadow[name])
            self._shadow[name].copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "updates": self.updates, "shadow": self._shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay, self.updates = state["decay"], state["updates"]
        for name, value in state["shadow"].items():
            self._shadow[name].copy_(value)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])
