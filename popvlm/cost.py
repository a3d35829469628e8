"""Arithmetic of a prefill, from a config alone: its FLOPs, and the speed-up that a plan can reach at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from popvlm.decoders import UnsupportedModel, models
from popvlm.plan import KINDS, Kind, PlanError, PruningPlan


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one prefill.

    As torch's FlopCounterMode counts them: two for each multiply-and-add of a matrix product or a convolution, none for
    norms, rotary, softmax, activations and look-ups.
    """

    decoder: int
    """The decoder layers."""
    head: int
    """The language-model head, at the one position a sample whose logits the first token needs."""
    vision: int
    """The vision encoder, and what maps its output to the decoder's width."""

    @property
    def total(self) -> int:
        """All that the time to first token waits for, but for the preprocessing."""
        return self.decoder + self.head + self.vision


def prefill_flops(config: Any, plan: PruningPlan | None, visual: int, text: int, *, batch: int = 1, images: int = 1,
                  causal: bool = True) -> Flops:
    """The FLOPs that a prefill needs: what a pruned prefill that wastes nothing computes.

    A skipped position costs a layer its keys and values, `D -> 2GK`, own or fitted alike, and an active position all of
    the layer. In a sliding-window layer a key that neither an active query nor a later token can see costs nothing.

    Args:
        config: the whole model's config.
        plan: the plan that it runs under; None for the full model.
        visual: visual tokens of the prompt. They are taken to stand before the text.
        text: all other tokens of the prompt, placeholders around images too.
        batch: prompts like this one, run together.
        images: how many images, of one size, the visual tokens are: Qwen3-VL's vision encoder attends within each. The
            images of Gemma-3 all have the number of tokens that its config says, and one that is begun counts whole.
        causal: count the pairs of query and key that the mask lets through, as flash attention computes them (and sdpa
            where it gets no mask); False for every active query with every key, as eager attention and sdpa with a
            mask compute them, and as FlopCounterMode counts either. Gemma-3's images, which look ahead within
            themselves, are counted as causal: up to 0.6 % of its decoder's FLOPs, and nothing to speak of in a limit.

    Raises:
        PlanError: the plan has another number of layers than the model.
        UnsupportedModel: the config is of no model that popvlm prunes.
        ValueError: an impossible prompt, or visual tokens for a model that has no vision encoder.
    """
    if not _is_known(config):
        raise UnsupportedModel(f"popvlm does not know what a prefill of {type(config).__name__} costs; give the whole "
                               "config of a model that it prunes (model.config, not a part of it)")
    decoder = config.get_text_config()
    depth = decoder.num_hidden_layers
    if plan is None:
        plan = PruningPlan(depth)
    elif plan.num_layers != depth:
        raise PlanError(f"the plan is for {plan.num_layers} decoder layers and this model has {depth}; make one with "
                        f"num_layers={depth}")
    if visual < 0 or text < 0 or visual + text < 1 or batch < 1 or images < 1:
        raise ValueError(f"a prompt of {visual} visual and {text} text tokens, {images} images and batch {batch} is "
                         "none; give at least one token, one image and one sample")
    if visual and not hasattr(config, "vision_config"):
        raise ValueError(f"{type(config).__name__} has no vision encoder, so it reads no visual tokens; give visual=0")
    layers = sum(_layer(decoder, index, plan, visual, text, causal) for index in range(depth))
    return Flops(decoder=batch * layers, head=batch * 2 * decoder.hidden_size * decoder.vocab_size,
                 vision=batch * _vision(config, visual, images) if visual else 0)


def limit(config: Any, plan: PruningPlan, visual: int, text: int, *, causal: bool = True) -> float:
    """The speed-up of the decoder's prefill, head included, that `plan` can reach at most: FLOPs full over pruned.

    Where arithmetic is what takes the time: a short prompt on a fast device waits for the weights instead. For the
    whole time to first token compare the `total` of two `prefill_flops`.

    Arguments and errors: those of `prefill_flops`.
    """
    full, pruned = (prefill_flops(config, each, visual, text, causal=causal) for each in (None, plan))
    return (full.decoder + full.head) / (pruned.decoder + pruned.head)


def fitted_bytes(config: Any, plan: PruningPlan, itemsize: int = 2) -> int:
    """Bytes of the fitted projections that `plan` needs or has, at `itemsize` bytes a number."""
    decoder = config.get_text_config()
    return itemsize * sum(len(getattr(plan, kind)) for kind in KINDS) * (decoder.hidden_size + 1) * _kv_width(decoder)


def moments_bytes(config: Any, plan: PruningPlan) -> int:
    """The most bytes that the moments of a fit (`popvlm.fitting`) take, both parts, if all are gathered in one turn.

    8 (D + 1)^2 for each run of layers and 8 (D + 2) 2GK for each layer, of each kind, twice. The last third of
    Qwen3-VL-8B (12 layers, D 4,096, 2GK 2,048): 3.8 GB; solving takes up to as much again for a while. A position costs
    2 (D + 1) (D + 1 + M 2GK) FLOPs in float64, there 0.23 GFLOP, beside the 16 of the model's own pass.
    """
    decoder = config.get_text_config()
    rows, total = decoder.hidden_size + 1, 0
    for kind in KINDS:
        layers = getattr(plan, kind)
        runs = sum(layer - 1 not in layers for layer in layers)
        total += runs * rows * rows + len(layers) * (rows + 1) * _kv_width(decoder)
    return 2 * 8 * total


def _is_known(config: Any) -> bool:
    known: tuple[Any, ...] = models()
    return isinstance(config, tuple(model.config_class for model in known))


def _head_dim(decoder: Any) -> int:
    return getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads


def _kv_width(decoder: Any) -> int:
    return 2 * decoder.num_key_value_heads * _head_dim(decoder)


def _layer(decoder: Any, index: int, plan: PruningPlan, visual: int, text: int, causal: bool) -> int:
    """FLOPs of one decoder layer on one prompt."""
    length = visual + text
    leading, trailing = _active(plan.skips(index), plan.tail, visual, text)
    active = leading + trailing
    kinds = getattr(decoder, "layer_types", None)
    window = min(decoder.sliding_window, length) if kinds and kinds[index] == "sliding_attention" else length
    keys = min(length, active + window - 1)  # the leading queries see none but each other's
    if causal:
        pairs = _seen(leading, window) + _seen(length, window) - _seen(length - trailing, window)
    else:
        pairs = active * keys
    width, query_width = decoder.hidden_size, decoder.num_attention_heads * _head_dim(decoder)
    return (2 * keys * width * _kv_width(decoder)
            + 2 * active * (2 * width * query_width + _mlp(decoder, index))
            + 4 * pairs * query_width)


def _active(skipping: frozenset[Kind], tail: int, visual: int, text: int) -> tuple[int, int]:
    """How many positions at the start and at the end of a prompt, visual before text, are active at a layer."""
    length = visual + text
    tail = min(tail, length)
    trailing = tail if "text" in skipping else max(text, tail)
    return 0 if "visual" in skipping else min(visual, length - trailing), trailing


def _seen(queries: int, window: int) -> int:
    """The keys that a prompt's first `queries` queries see, added up: 1, 2, ..., `window`, `window`, ..."""
    growing = min(queries, window)
    return growing * (growing + 1) // 2 + (queries - growing) * window


def _mlp(decoder: Any, index: int) -> int:
    """Multiply-and-adds of a layer's MLP, or of its router and the experts that it picks, for one position."""
    experts = getattr(decoder, "num_experts", None)
    if experts and index not in decoder.mlp_only_layers and (index + 1) % decoder.decoder_sparse_step == 0:
        return decoder.hidden_size * (experts + 3 * decoder.num_experts_per_tok * decoder.moe_intermediate_size)
    return 3 * decoder.hidden_size * decoder.intermediate_size


def _vision(config: Any, visual: int, images: int) -> int:
    """FLOPs from one prompt's pixels to its `visual` tokens of the decoder's width."""
    vision = config.vision_config
    width, area = vision.hidden_size, vision.patch_size ** 2
    if hasattr(config, "mm_tokens_per_image"):  # Gemma-3: SigLIP, pooled to a number of tokens and projected
        images = -(-visual // config.mm_tokens_per_image)
        patches = images * (vision.image_size // vision.patch_size) ** 2
        depth, pixels = vision.num_hidden_layers, vision.num_channels * area
        out = images * config.mm_tokens_per_image * width * config.get_text_config().hidden_size
    else:  # Qwen3-VL: patches merged into tokens, at the end and once for each DeepStack layer
        patches = visual * vision.spatial_merge_size ** 2
        depth, pixels = vision.depth, vision.in_channels * vision.temporal_patch_size * area
        merged = width * vision.spatial_merge_size ** 2
        mergers = 1 + len(vision.deepstack_visual_indexes)
        out = mergers * visual * merged * (merged + vision.out_hidden_size)
    block = 4 * width ** 2 + 2 * width * vision.intermediate_size
    return 2 * (patches * (pixels * width + depth * block) + out) + 4 * depth * patches ** 2 * width // images
