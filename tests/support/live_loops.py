"""Loops of training, each with something that outside code does: what a live session must keep."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 6


class Net(nn.Module):
    def __init__(self, width: int = 48, dropout: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.first(x)))
        for block in self.blocks:
            x = x + self.dropout(F.gelu(block(x)))
        return self.last(x)


class Loop:
    """A loop over a few batches. A case changes one part of it."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        self.device = device
        self.net = Net().to(device)
        self.batches = [
            (torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)) for _ in range(STEPS)
        ]
        self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), 1e-2)
        self.seen: list[Any] = []
        self.calls = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen.append(loss.detach())

    def between(self) -> None:
        """What the loop does between two steps."""

    def result(self) -> list[Any]:
        """What is compared: what was seen, weights, states, and the generators."""
        states = [v for s in self.optimizer.state.values() for v in s.values()]
        tensors = [*self.seen, *self.net.state_dict().values(), *states]
        found = [t.tolist() if isinstance(t, torch.Tensor) else t for t in tensors]
        return [
            *found,
            self.calls,
            torch.rand(()).item(),
            torch.rand((), device=self.device).item(),
        ]


class Scheduled(Loop):
    """Three numbers change from step to step: the rate, and two corrections of the bias."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def between(self) -> None:
        self.schedule.step()


class AnnealedInTheStep(Loop):
    """A number of the loss that Python computes, and a rate that is set in the middle of a step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.calls)
        out = self.net(x)
        return F.cross_entropy(out, y) + 0.1 * self.calls * out.square().mean()


class Clipped(Loop):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        for part in (slice(0, 4), slice(4, 8)):  # two micro-batches
            (self.loss(x[part], y[part]) / 2).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Autocast(Loop):
    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-2, fused=True)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return super().loss(x, y)


class Checkpointed(Loop):
    """The forward pass of a block runs again within the backward pass, with the same draws."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.net, x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return F.cross_entropy(out, y)


class CheckpointedWithoutDraws(Checkpointed):
    """The state of the generators is read and put back, and nobody draws."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.net.eval()


class Held(Loop):
    """The loop keeps what a step made, and the next step reads it; weights are read by an alias."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.aliases = [p.data for p in self.net.parameters()]
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.latest = torch.zeros((), device=device)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y) + 0.1 * self.latest
        self.latest = loss.detach()
        return loss

    def between(self) -> None:
        for mean, weight in zip(self.average, self.aliases, strict=True):
            mean.lerp_(weight, 0.5)
        self.seen += [self.average[0].clone(), self.aliases[-1].sum()]


class Asking(Loop):
    """Python asks for a value in the middle of a step, and goes another way by it."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = super().loss(x, y)
        if self.calls % 2 and loss > 0:
            self.seen.append(loss.item())
            return loss * 2
        return loss


class Lengths(Loop):
    """Three lengths of batches in turns, each often enough to be planned."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.batches = [
            (x[: 2 + n % 3], y[: 2 + n % 3]) for n, (x, y) in enumerate(self.batches * 3)
        ]


class Failing(Loop):
    """A step raises in its middle; what it issued before has happened, and the loop goes on."""

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        try:
            if self.calls == 4:
                self.calls += 1
                self.net(x).mean().backward()  # the statistics of the norm have changed
                raise ValueError("of the user's own")
            super().step(x, y)
        except ValueError:
            self.optimizer.zero_grad()


class Refilled(Loop):
    """Python writes into the memory of a batch while the step goes on."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.memory = torch.zeros(8, 16).numpy()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shared = torch.from_numpy(self.memory)
        self.memory[:] = self.calls
        first = shared.to(self.device, copy=True) * 2
        self.memory[:] = 7
        second = shared.to(self.device, copy=True) * 3
        self.memory[:] = 0
        return super().loss(x + first - second, y)


class Explicit(Loop):
    """A generator of the loop's own, whose state it reads between two draws."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.generator = torch.Generator(device).manual_seed(5)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn(x.shape, generator=self.generator, device=self.device)
        self.seen.append(self.generator.get_state())
        return super().loss(x, y)


class Replaced(Loop):
    """A weight gets other memory, and the optimizer a weight more."""

    def between(self) -> None:
        if self.calls == 3:
            weight = self.net.first.weight
            weight.data = weight.data.clone() * 0.5
        if self.calls == 4:
            more = nn.Parameter(torch.ones(3, device=self.device))
            self.optimizer.add_param_group({"params": [more]})


class Tied(Loop):
    """Two layers share a weight, and gradients live until the next step."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.net.blocks[1].weight = self.net.blocks[0].weight
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1
        )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.calls += 1
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.seen.append(loss.detach())


class Flagged(Loop):
    """A flag changes that no shape depends on."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.net(x).sort(1, descending=self.calls % 2 == 0).values
        return super().loss(x, y) + scores[:, 0].mean()


class AliasedInTurns(Loop):
    """What is written and what is read afterwards are one tensor in every other step."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.one, self.other = torch.zeros(4, device=device), torch.zeros(4, device=device)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        read = self.one if self.calls % 2 == 0 else self.other
        self.one.add_(1)
        return super().loss(x, y) + (read * self.net(x)).mean()

    def between(self) -> None:
        self.seen += [self.one.clone(), self.other.clone()]


class RecurrentInTurns(Loop):
    """The same kernels with and without gradients: some keep more if there are any."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.cells = nn.LSTM(16, 16, batch_first=True).to(device)
        self.optimizer.add_param_group({"params": [*self.cells.parameters()]})

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.calls % 2 == 0):
            states = self.cells(x[None])[0][0]
        return super().loss(states, y)


class Tries(Loop):
    """Operations that raise, and the loop goes on with their arguments."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        for wrong in (lambda: out[1:] @ out[2:], lambda: out[1:].T.view(7, 5)):
            try:
                wrong()
            except RuntimeError:
                self.seen.append(out[1:].T.sum())
        return super().loss(x, y) + out[1:].T.mean()


class Copied(Loop):
    """Deep copies of a tensor and of views, which have memory in common, and of the copy itself."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        whole = out.detach() * 2
        copied, again = copy.deepcopy([whole, whole])
        again.mul_(0.5)
        self.seen += [copied, copy.deepcopy(copied), copy.deepcopy({}), whole]
        return F.cross_entropy(out + copied, y)


class FromTheHost(Loop):
    """Tensors of the host that are made, changed and brought to the device in the step."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factors = torch.linspace(0.5, 1.0, 4)
        factors[self.calls % 4] = 2.0
        noise = torch.ones(8, 4).mul_(factors)
        scale = torch.tensor([1.0, 0.5, 2.0, float(self.calls)], device=self.device)
        return F.cross_entropy(self.net(x) * scale + noise.to(self.device), y)
