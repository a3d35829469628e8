"""The decoder families: one file each, found by the classes that it names."""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Protocol

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import Tensor, nn

from popvlm.plan import Fingerprint

SAMPLED = 64
"""Numbers of each weight that go into a model's identity."""


class Family(Protocol):
    """What a family's file says: where its decoder is and how its attention gets keys and values.

    Each layer must be called with the hidden states as its one positional argument and have `input_layernorm` and
    `self_attn` with `k_proj`, `v_proj`, `head_dim` and, where there is one, `k_norm`.
    """

    __name__: str
    models: tuple[type[nn.Module], ...]
    """The transformers classes that generate with this decoder."""

    @staticmethod
    def text_model(model: Any) -> Any:
        """The module whose `layers` are the decoder layers."""

    @staticmethod
    def visual_token_ids(config: Any) -> tuple[int, ...]:
        """The placeholder ids that images and videos are put in place of."""

    @staticmethod
    def position_embeddings(layer: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The cosines and sines, each `[B or 1, T, K]`, that `layer` rotates with, from its call's arguments."""

    @staticmethod
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The family's own rotary function, from its modeling file."""


class UnsupportedModel(ValueError):
    """A model whose decoder popvlm cannot prune; the message says what it can."""


@cache
def families() -> dict[str, Family]:
    """Every family by its file's name."""
    return {found.name: importlib.import_module(f"{__name__}.{found.name}")  # type: ignore[misc]
            for found in pkgutil.iter_modules(__path__)}


def models() -> tuple[type[nn.Module], ...]:
    """The transformers classes that popvlm prunes."""
    return tuple(model for family in families().values() for model in family.models)


def family_of(model: nn.Module) -> Family:
    """The family that `model` belongs to.

    Raises:
        UnsupportedModel: no family's file names its class.
    """
    for family in families().values():
        if isinstance(model, family.models):
            return family
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder, and prefill-only pruning is for "
                               f"decoders that read their own prompt; use one of {_supported()}")
    raise UnsupportedModel(f"popvlm does not know {type(model).__name__}; it prunes {_supported()}. To add a family, "
                           "add a file to popvlm/decoders/ that says where its layers are, like llama.py, and a row to "
                           "tests/models.py")


def unwrapped(model: Any) -> Any:
    """The transformers model inside what PEFT, torch.compile or data parallelism put around it."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _supported() -> str:
    return ", ".join(sorted(model.__name__ for model in models()))


def fingerprint(model: Any) -> Fingerprint:
    """The family, depth, widths and checkpoint name of `model`."""
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Fingerprint(model.config.model_type, text.num_hidden_layers, text.hidden_size, text.num_key_value_heads,
                       head_dim, model.config._name_or_path)


def identity(model: Any) -> str:
    """16 hexadecimal digits of a model's shape and weights but its head's, `SAMPLED` numbers of each.

    The same whether loaded in float32 or bfloat16, on whichever devices or offloaded, by whichever transformers.
    """
    shape = asdict(replace(fingerprint(model), checkpoint=""))
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
    # A head that is tied is named of its own where it is offloaded.
    for name in sorted({name for name, _ in model.named_parameters()} - {"lm_head.weight"}):
        weight = _weight(model, name)
        digest.update(f"{name}{list(weight.shape)}".encode())
        if weight.device.type != "meta":
            flat = weight.detach().reshape(-1)
            some = flat[::max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu()
            some = some.to(torch.bfloat16) if some.is_floating_point() else some
            digest.update(some.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _weight(model: Any, name: str) -> Tensor:
    """The parameter of this name; on the CPU if it is offloaded, as a look at it needs no accelerator."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    with align_module_device(module, torch.device("cpu") if has_offloaded_params(module) else None):
        weight: Tensor = getattr(module, leaf)
        return weight.dequantize() if type(weight).__module__.startswith("torchao") else weight
