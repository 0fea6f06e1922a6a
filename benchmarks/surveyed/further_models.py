"""Models of other libraries whose training step reads values, keeps caches, or changes its way."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.surveyed.case import Case, Loss, Wrapped, library, padded_text, pictures, wrapped
from benchmarks.surveyed.transformers_models import BERT, WORDS

NODES, GRAPHS = 12, "torch_geometric.nn"
FEATURES = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16), "num_classes": 0}
CODES = {
    "dim": 16, "codebook_dim": 8, "num_quantizers": 3, "codebook_size": 16, "kmeans_init": True,
    "threshold_ema_dead_code": 2, "quantize_dropout": True,
}  # fmt: skip
RANKS = {"init_r": 6, "target_r": 3, "tinit": 1, "tfinal": 1, "deltaT": 1, "total_step": 5}


def _net(where: str, name: str, *sizes: Any, **more: Any) -> Callable[[], Any]:
    return lambda: getattr(library(where), name)(*sizes, **more)


def _loss(where: str, name: str, *kind: Any, **more: Any) -> Loss:
    return lambda net, batch: _net(where, name, *kind, **more)()(net(batch[0]), batch[1])


def _called(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(batch)


def _detector(name: str, anchors: str, shapes: tuple[float, ...] = (0.5, 1.0, 2.0)) -> Case:
    def net() -> nn.Module:
        models = library("torchvision.models.detection")
        sizes = {"backbone_name": "mobilenet_v3_small", "weights": None, "fpn": True}
        pyramid = models.backbone_utils.mobilenet_backbone(**sizes)
        made = models.anchor_utils.AnchorGenerator(((16,), (32,), (64,)), (shapes,) * 3)
        return getattr(models, name)(pyramid, 4, min_size=64, max_size=96, **{anchors: made})

    return wrapped(name, "torchvision", net, _boxed_pictures,
                   lambda net, batch: torch.stack([*net(*batch).values()]).sum())  # fmt: skip


def _boxed_pictures() -> Any:
    corners = [torch.rand(count, 2) * 30 for count in (2, 3)]
    wanted = [{"boxes": torch.cat([corner, corner + 10 + 20 * torch.rand_like(corner)], 1),
               "labels": torch.randint(1, 4, (len(corner),)),
               "masks": torch.randint(0, 2, (len(corner), 64, 64), dtype=torch.uint8)}
              for corner in corners]  # fmt: skip
    return [torch.rand(3, 64, 64), torch.rand(3, 64, 72)], wanted


def _remembering() -> Any:
    """Embeddings compared with those of earlier steps, the hardest pairs of them."""
    losses = library("pytorch_metric_learning.losses")
    miner = library("pytorch_metric_learning.miners").MultiSimilarityMiner()
    loss = losses.CrossBatchMemory(losses.ContrastiveLoss(), 16, 24, miner)
    return nn.ModuleList([_net("timm", "create_model", "convnext_atto", **FEATURES)(), loss])


def _self_conditioned() -> nn.Module:
    parts = library("denoising_diffusion_pytorch")
    sizes = {"attn_dim_head": 4, "attn_heads": 2, "full_attn": (False, True)}
    unet = parts.Unet(8, dim_mults=(1, 2), self_condition=True, **sizes)
    return parts.GaussianDiffusion(unet, image_size=16, timesteps=50)


class Adapted(Wrapped):
    """AdaLoRA, whose ranks are shared out anew after every update."""

    def __init__(self) -> None:
        models, peft = library("transformers"), library("peft")
        base = models.BertForMaskedLM(models.BertConfig(**BERT))
        config = peft.AdaLoraConfig(**RANKS, target_modules=["query", "value"])
        super().__init__(peft.get_peft_model(base, config), lambda net, batch: net(**batch).loss)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        net: Any = self.net
        net.base_model.update_and_allocate(self.global_step)


def _decoder() -> nn.Module:
    parts = library("x_transformers")
    layers = parts.Decoder(dim=32, depth=3, heads=2, rotary_pos_emb=True, layer_dropout=0.3)
    net = parts.TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers)
    return parts.AutoregressiveWrapper(net, mask_prob=0.15)


def _quantized(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    again, _, commitment = net(batch)
    return functional.mse_loss(again, batch) + commitment.sum()


def _graph() -> Any:
    edges = torch.randint(0, NODES, (2, 40))
    return torch.randn(NODES, 8), edges, torch.randint(0, 4, (NODES,))


def _measurements() -> Any:
    return torch.rand(12, 2), torch.randn(12, 1)


def _evidence(net: Any, batch: Any) -> torch.Tensor:
    net.set_train_data(batch[0], batch[1][:, 0], strict=False)
    gained = library("gpytorch.mlls").ExactMarginalLogLikelihood(net.likelihood, net)
    return -gained(net(batch[0]), batch[1][:, 0])


CASES: tuple[Case, ...] = (
    _detector("FasterRCNN", "rpn_anchor_generator"),
    _detector("MaskRCNN", "rpn_anchor_generator"),
    _detector("RetinaNet", "anchor_generator"),
    _detector("FCOS", "anchor_generator", (1.0,)),
    wrapped("CrossBatchMemory", "pytorch_metric_learning", _remembering, lambda: pictures(32, 8),
            lambda net, batch: net[1](net[0](batch[0]), batch[1] % 3)),
    wrapped("Unet, LovaszLoss", "segmentation_models_pytorch",
            _net("segmentation_models_pytorch", "Unet", "mobilenet_v2", 3, None,
                 decoder_channels=(16, 8, 8), classes=4),
            lambda: (torch.randn(2, 3, 32, 32),
                     torch.randint(0, int(torch.randint(2, 5, ())), (2, 32, 32))),
            _loss("segmentation_models_pytorch.losses", "LovaszLoss", "multiclass")),
    wrapped("BasicUNet, HausdorffDTLoss", "monai",
            _net("monai.networks.nets", "BasicUNet", 2, 1, 1, features=(8,) * 6),
            lambda: (torch.randn(2, 1, 32, 32), (torch.rand(2, 1, 32, 32) < 0.3).float()),
            _loss("monai.losses", "HausdorffDTLoss", sigmoid=True)),
    wrapped("GaussianDiffusion", "denoising_diffusion_pytorch", _self_conditioned,
            lambda: torch.rand(2, 3, 16, 16), _called),
    Case("AdaLoraModel", "peft", Adapted, padded_text),
    wrapped("Decoder, layer dropout", "x_transformers", _decoder,
            lambda: torch.randint(0, WORDS, (4, 16)), _called),
    wrapped("ResidualVQ", "vector_quantize_pytorch",
            _net("vector_quantize_pytorch", "ResidualVQ", **CODES),
            lambda: torch.randn(2, 24, 16), _quantized),
    wrapped("GraphUNet", "torch_geometric",
            _net(GRAPHS, "GraphUNet", 8, 16, 4, depth=2, pool_ratios=0.6), _graph,
            lambda net, batch: functional.cross_entropy(net(*batch[:2]), batch[2])),
    wrapped("GAE", "torch_geometric",
            lambda: _net(GRAPHS, "GAE", _net(GRAPHS, "GCN", 8, 16, 2)())(),
            _graph, lambda net, batch: net.recon_loss(net.encode(*batch[:2]), batch[1])),
    wrapped("SingleTaskGP", "botorch",
            lambda: library("botorch.models").SingleTaskGP(*_measurements()),
            _measurements, _evidence),
)  # fmt: skip
