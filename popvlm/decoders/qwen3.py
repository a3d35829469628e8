"""Qwen3, text only: norms on queries and keys."""

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, apply_rotary_pos_emb

models: tuple[type[nn.Module], ...] = (Qwen3ForCausalLM,)

__all__ = ["apply_rotary_pos_emb", "models", "position_embeddings", "text_model", "visual_token_ids"]


def text_model(model: Any) -> Any:
    return model.model


def visual_token_ids(config: Any) -> tuple[int, ...]:
    return ()


def position_embeddings(layer: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return arguments["position_embeddings"]
