"""The README's picture: memory over a step of ResNet-18 in 60 % of its peak.

python benchmarks/offload_picture.py docs/images/offload_memory.png
"""

import sys

import torch
import torchvision
from torch.nn.functional import cross_entropy

import offload


def main(path: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine measure nothing
    module = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    inputs, targets = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    with offload.within("60%", module, optimizer) as within:
        for _ in range(2):  # the first one makes the momenta
            cross_entropy(module(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert within.plan is not None
    within.plan.draw(path)
    print(within.plan.explain())


if __name__ == "__main__":
    main(sys.argv[1])
