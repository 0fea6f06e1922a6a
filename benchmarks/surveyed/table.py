"""All cases, in the order of the tables."""

from benchmarks.surveyed import (
    diffusers_models,
    further_models,
    further_transformers,
    public_modules,
    timm_models,
    torchvision_models,
    transformers_models,
)
from benchmarks.surveyed.case import Case

TABLES: dict[str, tuple[Case, ...]] = {
    "Public Lightning modules": public_modules.CASES,
    "Models in one small module": (
        *timm_models.CASES,
        *transformers_models.CASES,
        *torchvision_models.CASES,
        *diffusers_models.CASES,
    ),
    "Modules that read values, keep caches or change their way": (
        *further_transformers.CASES,
        *further_models.CASES,
    ),
}
LIBRARIES = (
    "lightning", "lightly", "timm", "transformers", "torchvision", "diffusers", "botorch", "monai",
    "peft", "torch_geometric", "segmentation_models_pytorch", "pytorch_metric_learning",
    "x_transformers", "vector_quantize_pytorch", "denoising_diffusion_pytorch",
)  # fmt: skip
SMOKE = "autoencoder example", "VisionTransformer"


def list_cases() -> dict[str, Case]:
    return {case.name: case for table in TABLES.values() for case in table}
