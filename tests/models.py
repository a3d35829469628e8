"""Small random models of every family, prompts for them, and the slow oracle that shares no code with popvlm."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

LAYERS = 6
IMAGE, VIDEO, VISION_START, VISION_END = 290, 291, 292, 293
WINDOW = 8
WIDTHS = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
              num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, pad_token_id=0, eos_token_id=None,
              bos_token_id=1)
VISUAL = {"qwen3_vl", "qwen3_vl_moe", "gemma3"}
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma3_text", "llama", "qwen3")


def _qwen3_vl(config_class: Any, **text: Any) -> Any:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision = dict(depth=3, hidden_size=32, intermediate_size=48, num_heads=2, patch_size=4, spatial_merge_size=2,
                  temporal_patch_size=2, out_hidden_size=64, num_position_embeddings=64,
                  deepstack_visual_indexes=[0, 1])
    return config_class(text_config=WIDTHS | text | {"rope_scaling": rope}, vision_config=vision,
                        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=VISION_START,
                        vision_end_token_id=VISION_END)


def _gemma3_text() -> dict[str, Any]:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * (LAYERS // 3)
    return WIDTHS | dict(sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=16)


def config(family: str) -> Any:
    if family == "qwen3_vl":
        return _qwen3_vl(Qwen3VLConfig)
    if family == "qwen3_vl_moe":
        return _qwen3_vl(Qwen3VLMoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                         decoder_sparse_step=1, mlp_only_layers=[1])
    if family == "gemma3":
        vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                      patch_size=4)
        return Gemma3Config(text_config=_gemma3_text(), vision_config=vision, mm_tokens_per_image=4,
                            image_token_index=IMAGE, boi_token_index=VISION_START, eoi_token_index=VISION_END)
    if family == "gemma3_text":
        return Gemma3TextConfig(**_gemma3_text())
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**WIDTHS)


def build(family: str, attention: str = "sdpa", seed: int = 0) -> Any:
    """A random model, in float32, whose layers each move the residual stream a good deal."""
    classes = dict(qwen3_vl=Qwen3VLForConditionalGeneration, qwen3_vl_moe=Qwen3VLMoeForConditionalGeneration,
                   gemma3=Gemma3ForConditionalGeneration, gemma3_text=Gemma3ForCausalLM, llama=LlamaForCausalLM,
                   qwen3=Qwen3ForCausalLM)
    settings = config(family)
    settings._attn_implementation = attention
    torch.manual_seed(seed)
    model = classes[family](settings).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.5 / weight.shape[-1] ** 0.5)
            elif name.endswith("norm.weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def text_model(model: Any) -> Any:
    inner = model.model
    return getattr(inner, "language_model", inner)


def is_qwen(model: Any) -> bool:
    return hasattr(model.config, "video_token_id")


Parts = list[Any]
"""A prompt: token counts of text (int), images ((height, width) in merged patches) and videos ((frames, h, w))."""


def prompt(model: Any, samples: list[Parts], seed: int = 0) -> dict[str, Tensor]:
    """The arguments of a left-padded batch of prompts."""
    draw = torch.Generator().manual_seed(seed)
    rows, kinds, images, videos = [], [], [], []
    qwen = is_qwen(model)
    for parts in samples:
        row: list[int] = [1]
        kind: list[int] = [0]
        for part in parts:
            if isinstance(part, int):
                row += torch.randint(2, 280, (part,), generator=draw).tolist()
                kind += [0] * part
                continue
            count = part[-1] * part[-2] if qwen else 4
            for _ in range(1 if len(part) == 2 else part[0]):  # a video's frames stand apart, each in its own marks
                row += [VISION_START, *[IMAGE if len(part) == 2 else VIDEO] * count, VISION_END]
                kind += [0, *[1 if len(part) == 2 else 2] * count, 0]
            (images if len(part) == 2 else videos).append((1, *part) if len(part) == 2 else part)
        rows.append(row)
        kinds.append(kind)
    length = max(len(row) for row in rows)
    padded = dict(input_ids=torch.tensor([[0] * (length - len(row)) + row for row in rows]),
                  attention_mask=torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]))
    types = torch.tensor([[0] * (length - len(kind)) + kind for kind in kinds])
    forward = inspect.signature(type(model).forward).parameters
    for name in "mm_token_type_ids", "token_type_ids":
        if name in forward:
            padded[name] = types
    for found, pixels, grid in (images, "pixel_values", "image_grid_thw"), (videos, "pixel_values_videos",
                                                                            "video_grid_thw"):
        if found and qwen:
            grids = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in found])
            padded |= {pixels: torch.randn(int(grids.prod(-1).sum()), 3 * 2 * 4 * 4, generator=draw), grid: grids}
        elif found:
            padded[pixels] = torch.randn(len(found), 3, 16, 16, generator=draw)
    return padded


def sample(batch: dict[str, Tensor], model: Any, samples: list[Parts], row: int) -> dict[str, Tensor]:
    """One sample of a batch, alone and without its padding."""
    start = int((batch["attention_mask"][row] == 0).sum())
    alone = {name: value[row:row + 1, start:] for name, value in batch.items() if name.endswith(("ids", "mask"))}
    for name, length in ("pixel_values", 2), ("pixel_values_videos", 3):
        if name not in batch:
            continue
        counts = [sum(not isinstance(part, int) and len(part) == length for part in parts) for parts in samples]
        first, last = sum(counts[:row]), sum(counts[:row + 1])
        if first == last:
            continue
        if is_qwen(model):
            grid = "image_grid_thw" if length == 2 else "video_grid_thw"
            sizes = batch[grid].prod(-1).tolist()
            alone[name] = batch[name][sum(sizes[:first]):sum(sizes[:last])]
            alone[grid] = batch[grid][first:last]
        else:
            alone[name] = batch[name][first:last]
    return alone


def cache_of(output: Any) -> Any:
    return output["cache"] if "cache" in output else output["past_key_values"]


def cache_argument() -> str:
    names = inspect.signature(LlamaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def cached(output: Any) -> list[Tensor]:
    return [part for layer in cache_of(output).layers for part in (layer.keys, layer.values)]


def fitted_for(model: Any, visual: set[int], text: set[int], seed: int = 5) -> dict[str, Tensor]:
    """Random fitted projections of the right shapes: what they compute does not matter to whether it is run right."""
    draw = torch.Generator().manual_seed(seed)
    width, out = WIDTHS["hidden_size"], 2 * WIDTHS["num_key_value_heads"] * WIDTHS["head_dim"]
    tensors = {}
    for kind, layers in ("visual", visual), ("text", text):
        for layer in layers:
            tensors[f"{kind}.{layer}.weight"] = torch.randn(out, width, generator=draw) / width ** 0.5
            tensors[f"{kind}.{layer}.bias"] = torch.randn(out, generator=draw) / 4
    return tensors


@contextmanager
def oracle(model: Any, visual: set[int], text: set[int], tail: int = 1,
           fitted: dict[str, Tensor] | None = None, types: Tensor | None = None,
           visual_ids: tuple[int, ...] = (IMAGE, VIDEO)) -> Iterator[None]:
    """Prefill-only pruning as the design page defines it: run the whole layer, put the skipped states back.

    Slow and plain: hooks on the untouched model, positions told apart token by token in Python. `types` says which
    positions are visual where a call has no ids.
    """
    skipped: dict[str, Tensor] | None = None

    forward = model.forward

    @functools.wraps(forward)
    def sorted_forward(*args: Any, **call: Any) -> Any:
        sort(dict(zip(names, args)) | call)
        return forward(*args, **call)

    names = list(inspect.signature(forward).parameters)

    def sort(call: dict[str, Any]) -> None:
        nonlocal skipped
        skipped = None
        tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
        keep = call.get("logits_to_keep", 0)
        length = tokens.shape[1]
        if call.get("labels") is not None or (isinstance(keep, int) and keep == 0):
            return
        masks = {"visual": torch.zeros(tokens.shape[:2], dtype=torch.bool)}
        masks["text"] = masks["visual"].clone()
        for row in range(tokens.shape[0]):
            if isinstance(keep, int):
                answers = set(range(length - (keep + tail - 1), length))
            else:
                wanted = keep[row] if keep.ndim == 2 else keep
                if wanted.dtype == torch.bool:
                    wanted = wanted.nonzero()[:, 0]
                answers = {int(index) % length for index in wanted} | set(range(length - tail, length))
            for column in range(length):
                if column in answers:
                    continue
                if call.get("input_ids") is not None:
                    seen = int(tokens[row, column]) in visual_ids
                else:
                    seen = types is not None and bool(types[row, column - length])
                masks["visual" if seen else "text"][row, column] = True
        skipped = masks

    def where_skipped(index: int) -> Tensor | None:
        if skipped is None:
            return None
        mask = torch.zeros_like(skipped["text"])
        for kind, layers in ("visual", visual), ("text", text):
            if index in layers:
                mask |= skipped[kind]
        return mask[..., None]

    def put_back(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            mask = where_skipped(index)
            if mask is None:
                return None
            states = output[0] if isinstance(output, tuple) else output
            states = torch.where(mask, args[0], states)
            return (states, *output[1:]) if isinstance(output, tuple) else states
        return hook

    def fit(index: int, half: int, states: dict[str, Tensor]) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            if skipped is None:
                return None
            hidden = states["hidden"]
            scaled = hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
            for kind, layers in ("visual", visual), ("text", text):
                if index in layers:
                    both = scaled @ fitted[f"{kind}.{index}.weight"].T + fitted[f"{kind}.{index}.bias"]
                    output = torch.where(skipped[kind][..., None], both.chunk(2, -1)[half], output)
            return output
        return hook

    model.forward = sorted_forward
    handles = []
    for index, layer in enumerate(text_model(model).layers):
        handles.append(layer.register_forward_hook(put_back(index)))
        if fitted is not None and index in visual | text:
            states: dict[str, Tensor] = {}
            handles.append(layer.register_forward_pre_hook(
                lambda module, args, states=states: states.__setitem__("hidden", args[0])))
            handles.append(layer.self_attn.k_proj.register_forward_hook(fit(index, 0, states)))
            handles.append(layer.self_attn.v_proj.register_forward_hook(fit(index, 1, states)))
    try:
        yield
    finally:
        del model.forward
        for handle in handles:
            handle.remove()
