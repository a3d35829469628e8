"""The published sizes of the models that popvlm is measured on: their configs, without their weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import Gemma3Config, LlamaConfig, Qwen3VLConfig, Qwen3VLMoeConfig


def config(name: str, layers: int | None = None) -> Any:
    """The config of a published model, at its real size.

    Args:
        name: one of `NAMES`.
        layers: decoder layers to keep, the first ones, for small machines; None for all. The vision encoder stays.

    Raises:
        ValueError: no such shape, or not that many layers.
    """
    if name not in _SHAPES:
        raise ValueError(f"there is no shape {name!r}; give one of {', '.join(NAMES)}")
    family, text, vision = deepcopy(_SHAPES[name])  # a config takes the dicts in it for its own
    depth = text["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= depth:
        raise ValueError(f"layers is {layers}, and {name} has {depth}; give 1 to {depth}, or leave it out for all")
    text["num_hidden_layers"] = layers or depth
    if family is LlamaConfig:
        return LlamaConfig(**text)
    return family(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])


# From the config.json of Qwen/Qwen3-VL-*-Instruct, google/gemma-3-*-it and meta-llama/Llama-3.1-8B-Instruct; what is
# not here is transformers' default for the family.
_QWEN = dict(vocab_size=151936, head_dim=128, num_key_value_heads=8, max_position_embeddings=262144,
             rope_theta=5000000, tie_word_embeddings=True,
             rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True})
_QWEN_SMALL_VISION = dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16,
                          deepstack_visual_indexes=[5, 11, 17])
_QWEN_VISION = dict(depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16,
                    deepstack_visual_indexes=[8, 16, 24])
_GEMMA = dict(vocab_size=262208, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
              max_position_embeddings=131072, rope_scaling={"rope_type": "linear", "factor": 8.0},
              tie_word_embeddings=True)
_SIGLIP = dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304, num_hidden_layers=27,
               num_attention_heads=16, image_size=896, patch_size=14, vision_use_head=False)

_SHAPES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (
        Qwen3VLConfig,
        _QWEN | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
        _QWEN_SMALL_VISION | dict(out_hidden_size=2048)),
    "qwen3-vl-4b": (
        Qwen3VLConfig,
        _QWEN | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
        _QWEN_SMALL_VISION | dict(out_hidden_size=2560)),
    "qwen3-vl-8b": (
        Qwen3VLConfig,
        _QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                     tie_word_embeddings=False),
        _QWEN_VISION | dict(out_hidden_size=4096)),
    "qwen3-vl-30b-a3b": (
        Qwen3VLMoeConfig,
        _QWEN | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
                     num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
                     tie_word_embeddings=False),
        _QWEN_VISION | dict(out_hidden_size=2048)),
    "gemma-3-4b": (
        Gemma3Config,
        _GEMMA | dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
                      num_key_value_heads=4),
        _SIGLIP),
    "gemma-3-12b": (
        Gemma3Config,
        _GEMMA | dict(hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
                      num_key_value_heads=8),
        _SIGLIP),
    "gemma-3-27b": (
        Gemma3Config,
        _GEMMA | dict(hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, num_attention_heads=32,
                      num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168),
        _SIGLIP),
    "llama-3.1-8b": (
        LlamaConfig,
        dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
             rope_theta=500000.0, tie_word_embeddings=False,
             rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8192}),
        {}),
}

NAMES = tuple(_SHAPES)
