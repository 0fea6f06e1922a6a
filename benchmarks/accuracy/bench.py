"""What all runs of a process share: the pictures on the device, one net, its forward pass.

A run does not get a net of its own but fresh weights in the old tensors, so a forward pass is
compiled once for all runs (CUDA only: on a CPU compiling costs more than it saves here).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from accuracy.data import Part, Pictures
from accuracy.nets import build_net
from accuracy.recipes import Task

EVAL_BATCH = 1000


class Bench:
    def __init__(self, task: Task, pictures: Pictures, device: torch.device) -> None:
        self.task, self.pictures, self.device = task, pictures, device
        self.net = build_net(task.net).to(device).to(memory_format=torch.channels_last)
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.net
        if device.type == "cuda":
            self.forward = torch.compile(self.net, dynamic=False)

    def initialise(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net.load_state_dict(build_net(self.task.net).state_dict())

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.bfloat16)

    def normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        images = (pixels.float() - self.pictures.mean) / self.pictures.std
        return images.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def accuracy(self, part: Part) -> float:
        self.net.eval()
        right = torch.zeros((), dtype=torch.long, device=self.device)
        for first in range(0, len(part), EVAL_BATCH):
            images = self.normalised(part.pixels[first : first + EVAL_BATCH])
            with self.autocast():
                scores = self.net(images)
            right += (scores.argmax(1) == part.labels[first : first + EVAL_BATCH]).sum()
        self.net.train()
        return int(right) / len(part)
