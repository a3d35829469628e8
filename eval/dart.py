"""Visual-token pruning by DART's rule (Wen et al., arXiv 2502.11494), at the embedding level: the baseline beside POP.

DART keeps the visual tokens that repeat least what a few pivots already say. Its authors prune after the decoder's
second layer, and rank by that layer's keys; here, as in TensorRT-Edge-LLM, the decoder never sees the tokens that go,
and the rule reads embeddings. The others keep the positions that they had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from popvlm import cost
from popvlm.decoders import family_of
from popvlm.plan import PruningPlan

PIVOTS = 4
"""Visual pivots, and as many of the text, as in the authors' code."""


def kept(visual: Tensor, text: Tensor, count: int) -> Tensor:
    """Which visual tokens stay: the pivots, and for each pivot those least like it, as many for each.

    Visual pivots have the greatest L1 norm of all visual tokens; text pivots of the text after the image.

    Args:
        visual: embeddings `[N, D]` of the visual tokens.
        text: embeddings of the text after them, `[T, D]`.
        count: how many stay.

    Returns:
        A mask `[N]` with `count` true, or all where `N` is no more.
    """
    stays = torch.zeros(len(visual), dtype=torch.bool, device=visual.device)
    visual, text = visual.float(), text.float()
    first = visual.abs().sum(-1).topk(min(PIVOTS, count, len(visual))).indices
    stays[first] = True
    pivots = torch.cat([visual[first], text[text.abs().sum(-1).topk(min(PIVOTS, len(text))).indices]])
    for done, pivot in enumerate(pivots):
        left = min(count, len(visual)) - int(stays.sum())
        share = -(-left // (len(pivots) - done))  # so that all of them together come to `count`
        likeness = F.cosine_similarity(visual, pivot[None]).masked_fill(stays, torch.inf)
        stays[likeness.topk(share, largest=False).indices] = True
    return stays


def matching(config: Any, plan: PruningPlan, visual: int, text: int) -> float:
    """The share of visual tokens to keep for the prefill of `plan`, in FLOPs of the decoder, on a prompt of so many
    visual and text tokens: the largest that costs no more. The vision encoder reads the whole image for both."""

    def decoder(plan: PruningPlan | None, visual: int) -> int:
        flops = cost.prefill_flops(config, plan, visual, text)
        return flops.decoder + flops.head

    wanted = decoder(plan, visual)
    few, many = 0, visual
    while few < many:
        middle = (few + many + 1) // 2
        if decoder(None, middle) <= wanted:
            few = middle
        else:
            many = middle - 1
    return few / max(1, visual)


@contextmanager
def dart(model: Any, keep: float) -> Iterator[None]:
    """Inside the block, `generate` drops all but `keep` of each prompt's visual tokens before the first layer.

    For transformers 5, prompts in one call, left-padded, and dynamic caches. Of the positions that a sliding window
    counts, those that went are none.

    Args:
        model: a vision-language model that popvlm knows, in eval mode.
        keep: the share of visual tokens to keep, from 0 to 1.
    """
    family = family_of(model)
    ids = torch.tensor(family.visual_token_ids(model.config))
    call: dict[str, Tensor] = {}

    def outer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs["input_ids"]
        if tokens.shape[1] > 1:
            mask = kwargs.get("attention_mask")
            call["attended"] = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            call["visual"] = torch.isin(tokens, ids.to(tokens.device)) & call["attended"]
            return args, kwargs
        # Decode: the cache holds the tokens that stayed, and the mask says which of its columns are padding.
        stayed = call["stayed"]
        grown = kwargs["cache"].get_seq_length() + 1 - stayed.shape[1]
        mask = torch.cat([stayed, stayed.new_ones(len(stayed), grown)], 1).long()
        return args, kwargs | {"attention_mask": mask}

    def inner(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        embeds = kwargs["inputs_embeds"]
        if embeds.shape[1] == 1:
            return None
        keeps = call["attended"].clone()
        for row, visual in enumerate(call["visual"]):
            if visual.any():
                after = call["attended"][row] & (torch.arange(len(visual), device=visual.device)
                                                 > visual.nonzero().max())
                count = max(1, round(keep * int(visual.sum())))
                keeps[row, visual] = kept(embeds[row, visual], embeds[row, after], count)
        # Those that stay, in order, behind padding.
        index = keeps.int().argsort(dim=1, stable=True)[:, -int(keeps.sum(1).max()):]
        call["stayed"] = keeps.gather(1, index)
        changed = {"inputs_embeds": _taken(embeds, index), "attention_mask": _mask(kwargs["attention_mask"], index,
                                                                                    call["stayed"])}
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = (call["attended"].long().cumsum(1) - 1).clamp(min=0)
        where = index.expand(*positions.shape[:-2], *index.shape)
        changed["position_ids"] = positions.expand(*positions.shape[:-2], *embeds.shape[:2]).gather(-1, where)
        if kwargs.get("visual_pos_masks") is not None:  # Qwen3-VL's DeepStack
            seen = kwargs["visual_pos_masks"]
            changed["visual_pos_masks"] = (seen & keeps).gather(1, index)
            changed["deepstack_visual_embeds"] = [part[keeps[seen]] for part in kwargs["deepstack_visual_embeds"]]
        return args, kwargs | changed

    hooks = [model.register_forward_pre_hook(outer, with_kwargs=True),
             family.text_model(model).register_forward_pre_hook(inner, with_kwargs=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _mask(mask: Any, index: Tensor, stayed: Tensor) -> Any:
    """An attention mask's rows and columns at the positions `index` `[B, T']`, of which those not `stayed` are
    padding. It is one of padding `[B, T]`, one of all pairs `[B, 1, T, T]`, boolean or added, None, or several by name.
    """
    if isinstance(mask, dict):
        return {name: _mask(each, index, stayed) for name, each in mask.items()}
    if mask is None or mask.ndim == 2:
        return stayed.long()
    batch = torch.arange(len(index), device=index.device)
    pairs = mask.expand(len(index), -1, -1, -1)[batch[:, None, None], 0, index[:, :, None], index[:, None, :]]
    seen = stayed[:, None] | torch.eye(index.shape[1], dtype=torch.bool, device=index.device)  # no row is empty
    if pairs.dtype == torch.bool:
        return (pairs & seen)[:, None]
    return pairs.masked_fill(~seen, torch.finfo(pairs.dtype).min)[:, None]
