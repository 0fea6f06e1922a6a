"""Models of transformers whose training step reads values, keeps caches, or changes its way."""

from typing import Any

import torch

from benchmarks.surveyed.case import Case, padded_text
from benchmarks.surveyed.transformers_models import BERT, LLAMA, WAV2VEC, WORDS, model_case

HALVES = {
    "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
DETECTOR = {**HALVES, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 8, "num_labels": 5}
DROPPED = {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}
RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1], "out_features": ["stage4"],
}  # fmt: skip
LATER_STAGES = {
    "backbone_config": RESNET | {
        "model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]},
    "encoder_in_channels": [8, 16, 16], "decoder_in_channels": [16] * 3, "encoder_hidden_dim": 16,
}  # fmt: skip
MASK2FORMER = {
    "backbone_config": RESNET | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "feature_size": 32, "hidden_dim": 32, "mask_feature_size": 32, "encoder_feedforward_dim": 32,
    "dim_feedforward": 32, "encoder_layers": 1, "decoder_layers": 3, "num_attention_heads": 2,
    "num_queries": 6, "train_num_points": 64, "num_labels": 5,
}  # fmt: skip
AUTOFORMER = {
    "prediction_length": 4, "context_length": 16, "lags_sequence": [1, 2], "d_model": 16,
    "num_time_features": 1, "moving_average": 5, "label_length": 4, **DROPPED,
}  # fmt: skip
SPEECH = {
    **HALVES, **DROPPED, "vocab_size": WORDS, "encoder_layers": 3, "decoder_layers": 3,
    "input_feat_per_channel": 16, "conv_channels": 16, "max_source_positions": 40,
}  # fmt: skip
QWEN_TEXT = {**BERT, "num_key_value_heads": 1, "rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}  # fmt: skip
QWEN_PICTURES = {
    "depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2,
}  # fmt: skip
PICTURE = 60  # the word in whose place a part of a picture is


def _boxes() -> Any:
    labels = [{"class_labels": torch.randint(0, 5, (count,)),
               "boxes": torch.rand(count, 4) * 0.4 + 0.1} for count in (2, 3)]  # fmt: skip
    return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels}


def _masks() -> Any:
    return {"pixel_values": torch.randn(2, 3, 64, 64),
            "mask_labels": [torch.randint(0, 2, (count, 64, 64)).float() for count in (2, 3)],
            "class_labels": [torch.randint(0, 5, (count,)) for count in (2, 3)]}  # fmt: skip


def _long_text() -> Any:
    batch = padded_text(length=16)
    everywhere = (torch.rand(4, 16) < 0.1) * torch.randint(0, 2, ())  # or no word at all
    return {**batch, "global_attention_mask": everywhere.long() * batch["attention_mask"]}


def _series() -> Any:
    return {
        "past_values": torch.randn(4, 18),
        "past_time_features": torch.randn(4, 18, 1),
        "past_observed_mask": (torch.rand(4, 18) < 0.9).float(),
        "future_values": torch.randn(4, 4),
        "future_time_features": torch.randn(4, 4, 1),
    }


def _speech() -> Any:
    return {"input_features": torch.randn(2, 40, 16),
            "attention_mask": (torch.arange(40) < torch.tensor([[32], [40]])).long(),
            "labels": torch.randint(4, WORDS, (2, 7))}  # fmt: skip


def _masked_speech() -> Any:
    return {"input_values": torch.randn(2, 640),
            "attention_mask": (torch.arange(640) < torch.tensor([[480], [640]])).long(),
            "mask_time_indices": torch.rand(2, 63) < 0.4,
            "sampled_negative_indices": torch.randint(0, 2 * 63, (2, 63, 5))}  # fmt: skip


def _pictures_in_text() -> Any:
    """A picture of 4 x 4 patches, of which the text has four words, and one of 4 x 8."""
    words = torch.randint(4, 50, (2, 16))
    words[0, 2:6], words[1, 3:11] = PICTURE, PICTURE
    return {"input_ids": words, "attention_mask": torch.ones_like(words),
            "mm_token_type_ids": (words == PICTURE).int(),
            "labels": words.masked_fill(words == PICTURE, -100),
            "pixel_values": torch.randn(16 + 32, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]])}  # fmt: skip


CASES: tuple[Case, ...] = (
    model_case("DetrForObjectDetection", _boxes, **DETECTOR, backbone_config=RESNET,
        auxiliary_loss=True),
    model_case("RTDetrForObjectDetection", _boxes, **DETECTOR, **LATER_STAGES, num_denoising=4),
    model_case("Mask2FormerForUniversalSegmentation", _masks, **MASK2FORMER),
    model_case("LongformerForMaskedLM", _long_text, **BERT, attention_window=4, pad_token_id=0),
    model_case("Wav2Vec2ForPreTraining", _masked_speech, **WAV2VEC, layerdrop=0.3,
        num_codevectors_per_group=8, codevector_dim=16, proj_codevector_dim=16, num_negatives=5,
        do_stable_layer_norm=True, feat_extract_norm="layer"),
    model_case("ReformerModelWithLMHead", lambda: padded_text(length=32), vocab_size=WORDS,
        hidden_size=32, attention_head_size=16, num_attention_heads=2, feed_forward_size=64,
        attn_layers=["local", "lsh"], axial_pos_shape=[4, 8], axial_pos_embds_dim=[16, 16],
        local_attn_chunk_length=8, lsh_attn_chunk_length=8, num_buckets=4, num_hashes=2,
        max_position_embeddings=32, is_decoder=True, hash_seed=1, hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0),
    model_case("SwitchTransformersForConditionalGeneration", padded_text, vocab_size=WORDS,
        d_model=32, d_kv=16, d_ff=64, num_heads=2, decoder_start_token_id=0, num_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4, expert_capacity=8),
    model_case("JetMoeForCausalLM", padded_text, vocab_size=WORDS, hidden_size=32,
        num_hidden_layers=2, num_key_value_heads=2, kv_channels=16, intermediate_size=64,
        num_local_experts=4),
    model_case("Qwen2VLForConditionalGeneration", _pictures_in_text, text_config=QWEN_TEXT,
        vision_config=QWEN_PICTURES, image_token_id=PICTURE),
    model_case("LlamaForCausalLM, dynamic rope",
        lambda: padded_text(length=int(torch.randint(10, 40, ()))),
        **LLAMA | {"max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    model_case("AutoformerForPrediction", _series, **AUTOFORMER),
    model_case("Speech2TextForConditionalGeneration", _speech, **SPEECH),
)  # fmt: skip
