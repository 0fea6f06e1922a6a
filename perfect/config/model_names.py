"""The networks that a YAML can name. `perfect/models` builds them, and needs torch."""

MODEL_NAMES = (
    "resnet18",
    "vgg16",
    "mobilenetv2",
    "resnet8",
    "resnet8_stride2",
    "pilot",
    "resnet50",
)
LANGUAGE_MODEL_NAMES = (
    "gpt2_tiny", "gpt2_small", "gpt2_medium", "gpt2_large", "gpt2_xl", "llama_tiny", "llama_7b",
)  # fmt: skip
