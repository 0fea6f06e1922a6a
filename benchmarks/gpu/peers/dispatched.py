"""accelerate: hooks that bring a module's weights when it is called and drop them after. Inference.

`by_map` is what people use: as many layers as fit stay on the device, the others come every time.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.gpu.peers.task import GIB, Running, Setup, batch, whole

HOST = "110GiB"
WHOLE_BLOCKS = ["LlamaBlock", "GptBlock"]


def room(setup: Setup) -> int:
    """For activations: of a block the widest, three times, and the stream beside it."""
    size = setup.kind.size
    return setup.kind.tokens * (3 * size.inner + 8 * size.width) * 2


@contextmanager
def by_map(setup: Setup) -> Iterator[Running]:
    from accelerate import (  # pyright: ignore[reportMissingImports]
        dispatch_model,
        infer_auto_device_map,
    )

    module = whole(setup, "cpu").eval()
    budget = setup.budget or 16 * GIB
    there = infer_auto_device_map(
        module, max_memory={0: budget - room(setup), "cpu": HOST},
        no_split_module_classes=WHOLE_BLOCKS,
    )  # fmt: skip
    yield _call(dispatch_model(module, there, main_device=torch.device("cuda", 0)), setup)


@contextmanager
def all_of_it(setup: Setup) -> Iterator[Running]:
    from accelerate import cpu_offload  # pyright: ignore[reportMissingImports]

    module = whole(setup, "cpu").eval()
    yield _call(cpu_offload(module, torch.device(setup.device)), setup)


def _call(module: torch.nn.Module, setup: Setup) -> Running:
    inputs = batch(setup, setup.device)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return module(*inputs)

    return Running(step)
