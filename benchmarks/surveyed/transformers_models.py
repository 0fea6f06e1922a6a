"""Models of transformers: encoders, decoders, both, mixtures of experts, vision, audio."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.surveyed.case import (
    Case,
    classified_pictures,
    library,
    own_loss,
    padded_text,
    wrapped,
)

WORDS = 64
BERT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
LLAMA = {**BERT, "num_key_value_heads": 1, "head_dim": 16}
VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 10,
}  # fmt: skip
WAV2VEC = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "mask_time_length": 4, "pad_token_id": 0,
}  # fmt: skip


def _net(kind: str, sizes: dict[str, Any]) -> nn.Module:
    model = getattr(library("transformers"), kind)
    return model(model.config_class(**sizes))


def model_case(name: str, batch: Callable[[], Any], **sizes: Any) -> Case:
    """`name`: the model's class, and what is special about it after a comma."""
    kind = name.partition(",")[0]
    return wrapped(name, "transformers", lambda: _net(kind, sizes), batch, own_loss)


def _clip(kind: str) -> Case:
    text = {**BERT, "eos_token_id": WORDS - 1}
    sizes = {"text_config": text, "vision_config": VIT, "projection_dim": 16}
    return model_case(kind, _captions, **sizes)


def _captions() -> Any:
    text = padded_text()
    del text["labels"]
    return {**text, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def _speech() -> Any:
    labels = torch.randint(4, WORDS, (2, 6))
    labels[0, 4:] = -100
    lengths = torch.tensor([[400], [640]])
    mask = (torch.arange(640) < lengths).long()
    return {"input_values": torch.randn(2, 640) * mask, "attention_mask": mask, "labels": labels}


def _spectra() -> Any:
    return {"input_features": torch.randn(2, 16, 40), "labels": torch.randint(4, WORDS, (2, 7))}


def _spectrogram() -> Any:
    return {"input_values": torch.randn(2, 32, 16), "labels": torch.randint(0, 4, (2,))}


def _sentence_classes() -> Any:
    return padded_text("classes")


CASES: tuple[Case, ...] = (
    model_case("BertForMaskedLM", padded_text, **BERT),
    model_case("RobertaForSequenceClassification", _sentence_classes, **BERT, pad_token_id=0),
    model_case("DistilBertForSequenceClassification", _sentence_classes, vocab_size=WORDS, dim=32,
          n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=32),
    model_case("AlbertForMaskedLM", padded_text, **BERT, embedding_size=16),
    model_case("DebertaV2ForSequenceClassification", _sentence_classes, **BERT,
          relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    model_case("GPT2LMHeadModel", padded_text, vocab_size=WORDS, n_positions=32, n_embd=32,
          n_layer=2, n_head=2),
    model_case("LlamaForCausalLM", padded_text, **LLAMA),
    model_case("Qwen3ForCausalLM", padded_text, **LLAMA),
    model_case("GPTNeoXForCausalLM", padded_text, **BERT),
    model_case("OPTForCausalLM", padded_text, vocab_size=WORDS, hidden_size=32, num_hidden_layers=2,
          ffn_dim=64, num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=32),
    model_case("MambaForCausalLM", padded_text, vocab_size=WORDS, hidden_size=32, state_size=4,
          num_hidden_layers=2),
    model_case("MixtralForCausalLM", padded_text, **LLAMA, num_local_experts=4,
          output_router_logits=True),
    model_case("Qwen2MoeForCausalLM", padded_text, **LLAMA, num_experts=4, num_experts_per_tok=2,
          moe_intermediate_size=32, shared_expert_intermediate_size=32),
    model_case("T5ForConditionalGeneration", padded_text, vocab_size=WORDS, d_model=32, d_kv=16,
          d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0),
    model_case("BartForConditionalGeneration", padded_text, vocab_size=WORDS, d_model=32,
          encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
          encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, pad_token_id=0),
    model_case("ViTForImageClassification", classified_pictures, **VIT),
    model_case("Dinov2ForImageClassification", classified_pictures, **VIT, drop_path_rate=0.1),
    _clip("CLIPModel"),
    model_case("Wav2Vec2ForCTC", _speech, **WAV2VEC),
    model_case("WhisperForConditionalGeneration", _spectra, vocab_size=WORDS, num_mel_bins=16,
          d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
          decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
          max_source_positions=20, max_target_positions=16, pad_token_id=0, bos_token_id=1,
          eos_token_id=2, decoder_start_token_id=3),
)  # fmt: skip
