"""Gemma-3, image-text and text-only: sliding and global layers with their own masks and rotary, four norms a layer."""

from typing import Any

from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    apply_rotary_pos_emb,
)

models: tuple[type[nn.Module], ...] = (Gemma3ForConditionalGeneration, Gemma3ForCausalLM)

__all__ = ["apply_rotary_pos_emb", "models", "position_embeddings", "text_model", "visual_token_ids"]


def text_model(model: Any) -> Any:
    return model.model if isinstance(model, Gemma3ForCausalLM) else model.model.language_model


def visual_token_ids(config: Any) -> tuple[int, ...]:
    return (config.image_token_id,) if hasattr(config, "image_token_id") else ()


def position_embeddings(layer: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if "position_embeddings" in arguments:
        return arguments["position_embeddings"]
    # transformers 4.57 hands every layer both, and the layer takes its own.
    return arguments["position_embeddings_local" if layer.self_attn.is_sliding else "position_embeddings_global"]
