"""Llama and what loads as Llama (Llama-3.1, SmolLM2, ...); text only."""

from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

models: tuple[type[nn.Module], ...] = (LlamaForCausalLM,)

__all__ = ["apply_rotary_pos_emb", "models", "position_embeddings", "text_model", "visual_token_ids"]


def text_model(model: Any) -> Any:
    return model.model


def visual_token_ids(config: Any) -> tuple[int, ...]:
    return ()


def position_embeddings(layer: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return arguments["position_embeddings"]
