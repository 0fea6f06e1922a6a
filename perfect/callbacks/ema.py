"""Keeps an exponential moving average of a module's weights beside the weights themselves.

Validation, and with it the plateau rule, sees the average: at a high learning rate the accuracy of
the raw weights jumps by several points from one evaluation to the next. Buffers (BatchNorm
statistics) are averaged too; integers (counters) are copied.
"""

from typing import Any

import torch

from offload.torch_seams import foreach_lerp_

WARMUP_STEPS = 10  # the average forgets the initial weights faster at first, as TF's EMA does


class Ema:
    """The moving average, which starts at the module's present state."""

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
        for name in names:  # an offloaded run moves weights to the host, so the average follows
            if self._shadow[name].device != now[name].device:
                self._shadow[name] = self._shadow[name].to(now[name].device)
        shadows, values = [self._shadow[n] for n in names], [now[n] for n in names]
        # One fused call, as in torch.optim: a call per tensor costs more than the arithmetic.
        foreach_lerp_(shadows, values, 1 - decay)
        for name in now.keys() - names:
            self._shadow[name].copy_(now[name])

    @torch.no_grad()
    def swap(self, module: torch.nn.Module) -> None:
        """Exchange average and weights. A second call exchanges them back."""
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


class AverageOfWeights:
    """The moving average of a run's module: made at its first update, and shown in its place."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.ema: Ema | None = None
        self._saved: dict[str, Any] | None = None
        self._is_shown = False

    def update(self, module: torch.nn.Module) -> None:
        if self.ema is None:
            self.ema = Ema(module, self.decay)
        self.ema.update(module)

    def clear(self) -> None:
        self.ema = None

    def show(self, module: torch.nn.Module) -> None:
        """Give the module the averaged weights, if there are any, until `hide`."""
        if self.ema is not None:
            self.ema.swap(module)
            self._is_shown = True

    def hide(self, module: torch.nn.Module) -> None:
        if self._is_shown and self.ema is not None:
            self.ema.swap(module)
            self._is_shown = False

    def state_dict(self) -> dict[str, Any] | None:
        return None if self.ema is None else self.ema.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Keep the state until `restore`, when there is a module."""
        self._saved = state

    def restore(self, module: torch.nn.Module) -> None:
        if self._saved is not None:
            self.ema = Ema(module, self.decay)
            self.ema.load_state_dict(self._saved)
            self._saved = None


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])
