"""What POP is compared with: layers removed from both stages, and POP without each of its two parts.

DART, which removes visual tokens instead, is in `dart.py`. Slow and plain, each a context manager on an unmodified
model. They are for greedy `generate` on prompts of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from popvlm.decoders import family_of
from popvlm.quality import placed

Forward = Callable[..., Any]

SUPPORTED = int(transformers.__version__.split(".")[0]) >= 5
"""Whether what is here and in dart.py works: Gemma-3's layers in transformers 4 return tuples, other families' not."""


@contextmanager
def removed(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """The layers do nothing, in prefill and in decode: stage-agnostic layer removal (ShortGPT and its kin)."""

    def instead(index: int, forward: Forward, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))  # renamed in transformers 5
        if cache is not None:  # transformers reads lengths off the first layer of each kind, which may be this one
            nothing = hidden.new_zeros(hidden.shape[0], 1, hidden.shape[1], 1)
            cache.update(nothing, nothing, index)
        return hidden

    with _instead(model, layers, instead):
        yield


@torch.no_grad()
def block_influence(model: Any, samples: Sequence[Mapping[str, Any]]) -> Tensor:
    """How much each layer turns the hidden state, `[L]`: ShortGPT's block influence (Men et al., arXiv 2403.03853).

    1 - the cosine of a position's state before and after the layer, averaged over all positions of all prompts. The
    layers of the least influence are those that ShortGPT removes, with `removed`.

    Args:
        model: a transformers model that popvlm knows, without a plan, in eval mode.
        samples: prompts, each what a processor returns for one, `[1, T]`.
    """
    layers = family_of(model).text_model(model).layers
    turned, count = torch.zeros(len(layers), dtype=torch.float64), 0

    def see(index: int, module: nn.Module, args: Any, output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        turned[index] += (1 - F.cosine_similarity(args[0].float(), after.float(), dim=-1)).double().sum().cpu()

    hooks = [layer.register_forward_hook(partial(see, index)) for index, layer in enumerate(layers)]
    try:
        for sample in samples:
            call = placed(model, sample)
            model(**call, logits_to_keep=1, use_cache=False)
            count += call["input_ids"].shape[1]
    finally:
        for hook in hooks:
            hook.remove()
    return turned / count


@contextmanager
def without_boundary(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """POP without boundary handling: the last prompt position skips the layers too, so the pruned model writes the
    first token; keys and values are the layers' own."""

    def instead(index: int, forward: Forward, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        output = forward(hidden, **kwargs)  # leaves keys and values
        return hidden if hidden.shape[1] > 1 else output

    with _instead(model, layers, instead):
        yield


@contextmanager
def without_kv(model: nn.Module, layers: Iterable[int]) -> Iterator[None]:
    """POP without independent KV projections: in the layers, answer positions see no context position's keys."""
    context = 0

    def instead(index: int, forward: Forward, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        nonlocal context
        if hidden.shape[1] > 1:
            context = hidden.shape[1] - 1
            # A context position sees itself, so that no row is empty; its output is thrown away.
            seen = torch.eye(context + 1, dtype=torch.bool)
        else:
            cache = kwargs.get("cache", kwargs.get("past_key_values"))  # renamed in transformers 5
            # The first layers have stored this step's token already, the chosen one has not.
            seen = torch.ones(1, cache.layers[index].get_seq_length() + 1, dtype=torch.bool)
            seen[:, :context] = False
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, torch.finfo(hidden.dtype).min)
        output = forward(hidden, **kwargs | {"attention_mask": mask[None, None].to(hidden.device)})
        if hidden.shape[1] == 1:
            return output
        states = output[0] if isinstance(output, tuple) else output
        states = torch.cat([hidden[:, :-1], states[:, -1:]], 1)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    with _instead(model, layers, instead):
        yield


@contextmanager
def _instead(model: Any, layers: Iterable[int], instead: Callable[[int, Forward, Tensor, dict[str, Any]], Any]
             ) -> Iterator[None]:
    """Runs `instead(index, forward, hidden, kwargs)` for the forward of each of the layers."""
    if not SUPPORTED:
        raise RuntimeError(f"the baselines need transformers 5, and this is {transformers.__version__}; upgrade it")
    stack = family_of(model).text_model(model).layers
    chosen = list(layers)
    for index in chosen:
        stack[index].forward = partial(_call, instead, index, stack[index].forward)
    try:
        yield
    finally:
        for index in chosen:
            del stack[index].forward


def _call(instead: Callable[..., Any], index: int, forward: Forward, hidden: Tensor, **kwargs: Any) -> Any:
    return instead(index, forward, hidden, kwargs)
