"""Virtual gates: a factor of one on the output of every residual branch at every position, to differentiate by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from popvlm.decoders import UnsupportedModel, family_of, unwrapped

BRANCHES = ("attention", "mlp")


@contextmanager
def virtual_gates(model: nn.Module, batch: int, length: int) -> Iterator[Tensor]:
    """Multiplies each decoder layer's two residual branches by gates, inside the block (POP, arXiv 2602.03295).

    `h + gate * attention(norm(h))`, then `h + gate * mlp(norm(h))`; Gemma's post-norms are inside the branch. A gate of
    zero at a position is the layer skipped there. What is added to the states outside the layers (DeepStack's visual
    features in Qwen3-VL) is not gated.

    Differentiate what the model gives with respect to the gates: `torch.autograd.grad(loss, gates)`. Gradients are on
    inside the block, weights need none (a LoRA's are frozen for its time), and memory is bounded: each layer keeps its
    input only and runs again in the backward pass. So end the backward pass inside the block, and call the model
    without a cache.

    Args:
        model: a model of one of popvlm's families, or PEFT's or another wrapper around one; on any devices, its
            weights quantized or not.
        batch: `B` of the calls inside the block.
        length: `T` of the calls inside the block.

    Yields:
        The gates, all ones, `[L, 2, B, T]`: layer, branch (attention, MLP), sample, position. On the CPU, as layers may
        be anywhere. In float32, or float64 where the model is; so are the sums over the hidden width that make a
        position's gradient.

    Raises:
        UnsupportedModel: popvlm does not know the decoder; or, from the call inside, its layers pass no gradient back.
        ValueError: from a call inside that has another shape.
    """
    inner = unwrapped(model)
    layers = family_of(inner).text_model(inner).layers
    with ExitStack() as undo:
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        undo.callback(_freeze(inner))
        gates = torch.ones(len(layers), len(BRANCHES), batch, length, requires_grad=True,
                           dtype=torch.promote_types(inner.dtype, torch.float32))
        for index, layer in enumerate(layers):
            for branch, module in enumerate(_branches(layer)):
                gate = partial(_gate, gates, index, branch)
                undo.callback(module.register_forward_hook(gate).remove)
            undo.callback(_checkpoint(layer))
        yield gates


def _branches(layer: Any) -> tuple[nn.Module, nn.Module]:
    """The modules whose outputs a layer adds to its residual stream."""
    if hasattr(layer, "post_feedforward_layernorm"):  # Gemma: a norm at the end of each branch
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm
    return layer.self_attn, layer.mlp


def _gate(gates: Tensor, layer: int, branch: int, module: nn.Module, args: Any, output: Any) -> Any:
    states = output[0] if isinstance(output, tuple) else output  # beside attention weights, or a router's logits
    if states.shape[:2] != gates.shape[2:]:
        raise ValueError(f"the gates are for {list(gates.shape[2:])} samples and positions and this call has "
                         f"{list(states.shape[:2])}; open virtual_gates with the call's own, and without a cache")
    if torch.is_grad_enabled() and not states.requires_grad and (layer, branch) != (0, 0):
        # Its input is gated, so a gradient was lost on the way: all gates before would be wrong, and nobody would know.
        raise UnsupportedModel(f"the {BRANCHES[branch]} of layer {layer} passes no gradient back, as weights for "
                               "inference only do; load the model unquantized, or with int8 weights and unquantized "
                               "activations (torchao's Int8WeightOnlyConfig, quanto's qint8)")
    # Type promotion makes the product, and in the backward pass the gate's gradient, float32 at least.
    gated = (states * gates[layer, branch].to(states.device)[..., None]).to(states.dtype)
    return (gated, *output[1:]) if isinstance(output, tuple) else gated


def _freeze(model: nn.Module) -> Callable[[], None]:
    """Takes the gradients off all weights; what it returns gives them back."""
    # By name: accelerate's offloading puts new tensors in the place of old ones.
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}

    def require(flag: bool) -> None:
        for name, weight in model.named_parameters():
            if name in trained:
                weight.requires_grad_(flag)

    require(False)
    return partial(require, True)


def _checkpoint(layer: nn.Module) -> Callable[[], None]:
    """Makes a layer keep its input only, and run again in the backward pass; what it returns undoes that.

    Not transformers' own gradient checkpointing, which works in training mode only.
    """
    before = layer.__dict__.get("forward")  # a pruning plan's, or that of accelerate's hook, which brings weights in
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    def undo() -> None:
        if before is None:
            del layer.forward
        else:
            layer.forward = before

    return undo
