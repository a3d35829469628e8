"""Qwen3-VL, dense and mixture of experts: DeepStack, interleaved multimodal rotary, norms on queries and keys."""

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLForConditionalGeneration, apply_rotary_pos_emb
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

models: tuple[type[nn.Module], ...] = (Qwen3VLForConditionalGeneration, Qwen3VLMoeForConditionalGeneration)

__all__ = ["apply_rotary_pos_emb", "models", "position_embeddings", "text_model", "visual_token_ids"]


def text_model(model: Any) -> Any:
    return model.model.language_model


def visual_token_ids(config: Any) -> tuple[int, ...]:
    return config.image_token_id, config.video_token_id


def position_embeddings(layer: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return arguments["position_embeddings"]
