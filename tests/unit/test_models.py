"""The nets that configs name: sizes against counts made elsewhere, shapes, and errors.

Almost everything runs on the meta device, where a tensor has a shape and no numbers.
"""

import pytest
import torch
import torchvision.models
from torch import nn

from perfect.config.schema import MODEL_NAMES
from perfect.models import build_model


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def meta(name: str, num_classes: int = 10) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, num_classes).eval()


def test_resnet18_is_the_well_known_net_but_for_its_stem() -> None:
    with torch.device("meta"):
        known = torchvision.models.resnet18(num_classes=10)
    stem = 64 * 3 * (7 * 7 - 3 * 3)
    assert parameters(meta("resnet18")) == parameters(known) - stem == 11_173_962


def test_vgg16_has_the_well_known_convolutions_without_bias_and_one_linear_head() -> None:
    with torch.device("meta"):
        known = torchvision.models.vgg16_bn().features
    biases = sum(m.out_channels for m in known.modules() if isinstance(m, nn.Conv2d))
    assert parameters(meta("vgg16")) == parameters(known) - biases + 512 * 10 + 10


def test_mobilenetv2_has_as_many_parameters_as_the_well_known_net() -> None:
    with torch.device("meta"):
        known = torchvision.models.mobilenet_v2(num_classes=10)
    assert parameters(meta("mobilenetv2")) == parameters(known)


def test_the_pilot_net_has_280_thousand_parameters() -> None:
    weights = 3 * 32 * 16 + 9 * (32 * 64 + 64 * 64 + 64 * 128 + 128 * 128) + 128 * 10 + 10
    norms = 2 * (32 + 64 + 64 + 128 + 128)
    assert parameters(meta("pilot")) == weights + norms == 280_138


def test_resnet8_is_small_enough_for_two_cores() -> None:
    assert parameters(meta("resnet8")) < 100_000
    assert parameters(meta("resnet8_stride2")) == parameters(meta("resnet8"))


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_model_gives_one_logit_for_each_class(name: str) -> None:
    pictures = torch.empty(2, 3, 32, 32, device="meta")
    assert meta(name, num_classes=7)(pictures).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_a_32x32_picture_ends_as_4x4(name: str) -> None:
    net = meta(name)
    seen: list[torch.Size] = []
    body = net.stages if name == "resnet18" else net.features
    body.register_forward_hook(lambda module, given, maps: seen.append(maps.shape[2:]))
    net(torch.empty(1, 3, 32, 32, device="meta"))
    assert seen == [(4, 4)]


def test_the_stride_2_stem_gives_a_64x64_picture_the_feature_maps_of_a_32x32_one() -> None:
    large = meta("resnet8_stride2").stem(torch.empty(1, 3, 64, 64, device="meta"))
    small = meta("resnet8").stem(torch.empty(1, 3, 32, 32, device="meta"))
    assert large.shape == small.shape


@pytest.mark.parametrize("name", ["pilot", "resnet8", "mobilenetv2"])
def test_a_step_reaches_every_parameter(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    net = build_model(name, 3)
    logits = net(torch.rand(4, 3, 32, 32, generator=generator))
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
    untouched = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert untouched == []


def test_the_same_seed_gives_the_same_weights() -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(3)
        nets.append(build_model("resnet8", 10).state_dict())
    assert all(torch.equal(nets[0][key], nets[1][key]) for key in nets[0])
