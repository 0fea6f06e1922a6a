"""The README's picture: memory over a step of ResNet-18 in 60 % of its peak.

python -m benchmarks.offload_picture docs/images/offload_memory.png
"""

import sys
from functools import partial

import torch
import torchvision
from torch.nn.functional import cross_entropy

from benchmarks.offloading.live_steps import LiveSteps, plan_share, training_step


def main(path: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine measure nothing
    module = torchvision.models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    batch = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    step = training_step(module, cross_entropy, optimizer)
    with LiveSteps(step, partial(plan_share, share=0.6), module, optimizer) as steps:
        steps.settle(*batch)
        steps.plan.draw(path)
        print(steps.plan.explain())


if __name__ == "__main__":
    main(sys.argv[1])
