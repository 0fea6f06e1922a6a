"""Models of diffusers. Those that remove noise are trained as its examples train them: noise and
time steps are drawn in the step, and the scheduler adds the noise."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.surveyed.case import Case, library, wrapped

UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
}  # fmt: skip
TIMES = 100


def _net(kind: str, **sizes: Any) -> Any:
    return lambda: getattr(library("diffusers"), kind)(**sizes)


class Noised(nn.Module):
    """A net and the scheduler of its noise; both in one, so that the loss needs no global."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.scheduler = library("diffusers").DDPMScheduler(num_train_timesteps=TIMES)

    def forward(self, clean: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(clean)
        times = torch.randint(0, TIMES, (clean.shape[0],), device=clean.device).long()
        noisy = self.scheduler.add_noise(clean, noise, times)
        return functional.mse_loss(self.net(noisy, times, *more).sample, noise)


class Flow(nn.Module):
    """Flow matching, as the examples for SD3 and Flux do it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, clean: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(clean)
        part = torch.rand(clean.shape[0], device=clean.device)
        wide = part.view(-1, *[1] * (clean.ndim - 1))
        noisy = (1 - wide) * clean + wide * noise
        said = self.net(hidden_states=noisy, timestep=part, **more).sample
        return functional.mse_loss(said, noise - clean)


def _called(net: nn.Module, batch: Any) -> torch.Tensor:
    return net(**batch) if isinstance(batch, dict) else net(*batch)


def _dit_loss(net: nn.Module, batch: Any) -> torch.Tensor:
    clean, times, classes, noise = batch
    said = net(clean, timestep=times, class_labels=classes).sample
    return functional.mse_loss(said, noise)


def _variational(net: Any, batch: torch.Tensor) -> torch.Tensor:
    posterior = net.encode(batch).latent_dist
    again = net.decode(posterior.sample()).sample
    return functional.mse_loss(again, batch) + 1e-6 * posterior.kl().mean()


def _quantized(net: Any, batch: torch.Tensor) -> torch.Tensor:
    said = net(batch, return_dict=True)
    return functional.mse_loss(said.sample, batch) + said.commit_loss.mean()


def _pictures(channels: int = 3, size: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def _dit_batch() -> Any:
    times, classes = torch.randint(0, TIMES, (2,)), torch.randint(0, 10, (2,))
    return _pictures(4), times, classes, _pictures(4)


def _sd3_batch() -> Any:
    return {"clean": _pictures(4), "encoder_hidden_states": torch.randn(2, 6, 16),
            "pooled_projections": torch.randn(2, 8)}  # fmt: skip


def _flux_batch() -> Any:
    places = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij"), -1)
    places = torch.cat([torch.zeros(16, 1), places.view(16, 2)], 1)
    return {"clean": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 16),
            "pooled_projections": torch.randn(2, 8), "txt_ids": torch.zeros(6, 3),
            "img_ids": places}  # fmt: skip


UNET_2D = _net(
    "UNet2DModel", **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
)  # fmt: skip
UNET_CONDITION = _net(
    "UNet2DConditionModel", **UNET, cross_attention_dim=16, attention_head_dim=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
DIT = _net(
    "DiTTransformer2DModel", num_attention_heads=2, attention_head_dim=8, in_channels=4,
    out_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=TIMES,
)  # fmt: skip
SD3 = _net(
    "SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, out_channels=4,
    num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=16,
    caption_projection_dim=16, pooled_projection_dim=8, pos_embed_max_size=8,
)  # fmt: skip
FLUX = _net(
    "FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
    attention_head_dim=16, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=8,
    guidance_embeds=False, axes_dims_rope=(4, 6, 6),
)  # fmt: skip
VAE = _net(
    "AutoencoderKL", block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
)  # fmt: skip
VQ = _net(
    "VQModel", block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4,
    num_vq_embeddings=16, down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
)  # fmt: skip

HOME = "diffusers"
CASES: tuple[Case, ...] = (
    wrapped("UNet2DModel", HOME, lambda: Noised(UNET_2D()), lambda: (_pictures(),), _called),
    wrapped("UNet2DConditionModel", HOME, lambda: Noised(UNET_CONDITION()),
            lambda: (_pictures(4), torch.randn(2, 6, 16)), _called),
    wrapped("DiTTransformer2DModel", HOME, DIT, _dit_batch, _dit_loss),
    wrapped("SD3Transformer2DModel", HOME, lambda: Flow(SD3()), _sd3_batch, _called),
    wrapped("FluxTransformer2DModel", HOME, lambda: Flow(FLUX()), _flux_batch, _called),
    wrapped("AutoencoderKL", HOME, VAE, _pictures, _variational),
    wrapped("VQModel", HOME, VQ, _pictures, _quantized),
)  # fmt: skip
