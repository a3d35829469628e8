"""Puts a pruning plan on a model and takes it off: the model's forward, the pruned layer, the spliced cache."""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from popvlm.decoders import Family
from popvlm.plan import KINDS, Kind, PruningPlan
from popvlm.positions import Gather, Kept, Positions, Suffix

POSITIONS = "popvlm_positions"
"""The argument that carries a call's `Positions` from the model to its layers, beside those that transformers passes
down. So a call shares nothing with another, and layers called without it are the untouched model's."""

MASKED = ("eager", "sdpa", "flex_attention")
"""Attention implementations that take a mask for any set of queries; flash attention takes suffixes only."""


class PrunedModel:
    """Stands in for the forward of a model with a language-model head: sorts each call's positions for its layers."""

    def __init__(self, model: nn.Module, plan: PruningPlan, family: Family) -> None:
        self.module: Any = model
        self.plan = plan
        self.previous: Callable[..., Any] | None = None
        self.on = True
        self.layers: list[PrunedLayer] = []
        self.parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.visual_token_ids = family.visual_token_ids(self.module.config)
        self.full: list[weakref.WeakSet[threading.Thread]] = []
        """For each open `full_prefill`, the other threads that ran when it was opened, which keep the plan."""
        self.said: set[str] = set()

    def parts(self) -> tuple[PrunedModel | PrunedLayer, ...]:
        """All that stands in the model."""
        return self, *self.layers

    @property
    def __signature__(self) -> inspect.Signature:
        # `generate` asks the forward's signature whether it takes `logits_to_keep`, and for unknown arguments.
        return inspect.signature(self.previous or type(self.module).forward.__get__(self.module))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"full": [], "said": set()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions = self.positions(kwargs | dict(zip(self.parameters, args)) if args else kwargs)
        if positions is None:
            return _untouched(self, *args, **kwargs)
        return _untouched(self, *args, **kwargs, **{POSITIONS: positions})

    def positions(self, call: dict[str, Any]) -> Positions | None:
        """The positions of a call with these arguments; None where it runs in full."""
        keep = call.get("logits_to_keep", 0)
        if not self.on or not self.layers or call.get("labels") is not None:
            return None
        tokens = call.get("input_ids")
        if tokens is None:
            tokens = call.get("inputs_embeds")
        if tokens is None:
            return None  # the model says what is missing
        batch, length = tokens.shape[:2]
        answers: int | Tensor
        if isinstance(keep, Tensor):
            answers, most = _answer_mask(keep, batch, length, self.plan.tail)
        else:
            # The tail ends where the prompt ends: at the first position whose logits are asked for.
            answers, most = keep + self.plan.tail - 1 if isinstance(keep, int) else 0, None
            if not isinstance(keep, int) or keep <= 0 or answers >= length:
                return None  # all logits, or a decode step, or drafted tokens to verify: no context positions
        if self.full and any(threading.current_thread() not in others for others in self.full):
            return None
        if reason := self._unservable(call):
            self._say(f"{reason}; this call runs the full model")
            return None
        in_place = not (torch.is_grad_enabled() or torch.compiler.is_compiling() or self._asked(call, "hidden_states")
                        or self._watched())
        positions = Positions(self.plan, (batch, length), answers, self._visual(call, length), in_place, most)
        skipped = {(layer.skipping, layer.window) for layer in self.layers}
        positions.prepare(skipped)
        if self._attention not in MASKED and any(isinstance(positions.active(skipping), Gather)
                                                 for skipping, _ in skipped):
            self._say(f"{self._attention} cannot serve a plan in which visual and text positions differ; this call "
                      "runs the full model. Load the model with attn_implementation='sdpa', or widen the plan's tail "
                      "over the question")
            return None
        return positions

    @property
    def _attention(self) -> str:
        return self.module.config.get_text_config()._attn_implementation

    def _asked(self, call: dict[str, Any], output: str) -> Any:
        asked = call.get(f"output_{output}")
        configs = self.module.config, self.module.config.get_text_config()
        return asked if asked is not None else any(getattr(config, f"output_{output}", False) for config in configs)

    def _unservable(self, call: dict[str, Any]) -> str:
        for output in "attentions", "router_logits":
            if self._asked(call, output):
                return f"output_{output} asks for every position of every layer, and a pruned prefill skips some"
        if call.get("cu_seq_lens_q") is not None:
            return "the call packs several sequences into one, whose prompts have no common end"
        if self.module.training and torch.is_grad_enabled() and any(
                getattr(layer.module, "gradient_checkpointing", False) for layer in self.layers):
            return "gradient checkpointing runs each layer twice and without its cache"
        adapters = getattr(self.module, "peft_config", None) or {}
        if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
            return "an activated LoRA counts positions from the end of the prompt that each projection sees"
        attention = self._attention
        if attention not in MASKED and not attention.startswith("flash_attention"):
            return f"popvlm does not know how the attention implementation {attention!r} masks"
        return ""

    def _watched(self) -> bool:
        """Whether a hook in a pruned layer may keep the states that go by.

        transformers' own hooks stay after the first call that asked for hidden states, and keep them in such calls
        only.
        """
        hooks = [*_global_forward_hooks.values(), *_global_forward_pre_hooks.values()]
        for layer in self.layers:
            for module in layer.module.modules():
                hooks += module._forward_hooks.values()
                hooks += module._forward_pre_hooks.values()
        return any(not (getattr(hook, "__module__", None) or "").startswith("transformers.") for hook in hooks)

    def _say(self, sentence: str) -> None:
        if sentence not in self.said:
            self.said.add(sentence)
            warnings.warn(f"popvlm: {sentence}", stacklevel=4)

    def _visual(self, call: dict[str, Any], length: int) -> Tensor | None:
        """The mask `[B, T]` of visual positions; None where there are none or the plan has no use for it."""
        plan = self.plan
        if not self.visual_token_ids or (plan.visual == plan.text and plan.kv == "own"):
            return None
        ids = call.get("input_ids")
        if ids is not None:
            return torch.stack([ids == token for token in self.visual_token_ids]).any(0)
        for name in "mm_token_type_ids", "token_type_ids":
            if call.get(name) is not None:
                types = call[name][:, -length:] > 0
                return F.pad(types, (length - types.shape[1], 0))  # soft prompts in front of it have no type
        embeds = call["inputs_embeds"]
        embed = self.module.get_input_embeddings()
        # As the model itself finds the placeholders that image features replace.
        tokens = torch.tensor(self.visual_token_ids, device=embeds.device)
        return torch.stack([(embeds == embed(token)).all(-1) for token in tokens]).any(0)


class PrunedLayer:
    """Stands in for the forward of one decoder layer.

    The layer itself, as it stands, runs on the active positions. The cache that it is handed splices in, before them
    and between them, the keys and values of the context positions that skip it, so attention sees every position.
    The skipped positions' hidden states pass through.
    """

    def __init__(self, layer: nn.Module, index: int, plan: PruningPlan, family: Family) -> None:
        self.module: Any = layer
        self.plan = plan
        self.previous: Callable[..., Any] | None = None
        self.on = True
        self.index = index
        self.skipping = plan.skips(index)
        self.window: int | None = getattr(self.module.self_attn, "sliding_window", None)
        self.apply_rotary_pos_emb = family.apply_rotary_pos_emb
        self.position_embeddings = family.position_embeddings
        self.fitted: dict[Kind, tuple[Tensor, Tensor]] = {
            kind: (plan.fitted[f"{kind}.{index}.weight"], plan.fitted[f"{kind}.{index}.bias"])
            for kind in self.skipping} if plan.fitted is not None else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions: Positions | None = kwargs.get(POSITIONS)
        if positions is None or positions.plan is not self.plan or not self.on:
            return _untouched(self, *args, **kwargs)
        active = positions.active(self.skipping)
        if active is None:
            return _untouched(self, *args, **kwargs)
        (hidden,) = args
        del kwargs[POSITIONS]
        rotary = self.position_embeddings(self.module, kwargs)
        name = "cache" if "cache" in kwargs else "past_key_values"  # renamed in transformers 5
        start = positions.first_seen(active, self.window) if self._slides(kwargs.get(name)) else 0
        context, cos, sin = (active.context(part)[:, start:] for part in (hidden, *rotary))
        keys, values = self.keys_values(context, (cos, sin), active, positions, positions.kept(hidden), start)
        if start:  # the mask hides what stands in for the others; their number must be right for the cache
            keys, values = (F.pad(part, (0, 0, start, 0)) for part in (keys, values))
        mask = kwargs["attention_mask"]
        causal = mask is None and self.module.self_attn.config._attn_implementation == "sdpa"
        kwargs[name] = SplicedCache(kwargs.get(name), keys, values, active, positions.shape[1] if causal else None)
        if causal or mask is not None:
            kwargs["attention_mask"] = positions.mask_rows(mask, self.skipping, hidden.device)
        for argument, value in kwargs.items():
            if argument.startswith("position_embeddings"):
                kwargs[argument] = tuple(active.take(part) for part in value)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = active.take(kwargs["position_ids"])
        output = _untouched(self, active.take(hidden), **kwargs)
        states = output[0] if isinstance(output, tuple) else output
        hidden = self.put_back(hidden, states, active, positions)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _slides(self, cache: Any) -> bool:
        """Whether nobody can look back behind the layer's window: its cache drops what is there."""
        if self.window is None or cache is None:
            return self.window is not None
        layers = getattr(cache, "layers", ())
        mine = layers[self.index] if self.index < len(layers) else None
        return getattr(mine, "is_sliding", False) and not getattr(mine, "record_past", False)

    def keys_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], active: Suffix | Gather,
                    positions: Positions, kept: Kept, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, G, C, K]` from the states `[B, C, D]` that reach the layer, from position `start` on."""
        attention = self.module.self_attn
        if self.fitted:
            keys, values = self.fit(hidden, active, positions, kept, start).chunk(2, dim=-1)
        else:
            normed = self.module.input_layernorm(hidden)
            keys, values = attention.k_proj(normed), attention.v_proj(normed)
        heads = *hidden.shape[:2], -1, attention.head_dim
        keys, values = keys.view(heads), values.view(heads).transpose(1, 2)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        keys = keys.transpose(1, 2)
        # The family's function rotates queries and keys together: the queries here are none.
        return self.apply_rotary_pos_emb(keys[:, :0], keys, *rotary)[1], values

    def fit(self, hidden: Tensor, active: Suffix | Gather, positions: Positions, kept: Kept, start: int) -> Tensor:
        """Fitted keys and values side by side, `[B, C, 2GK]`, each kind of position by its own projection.

        Positions that skip several layers have one state at all of them: it is scaled once, and `kept`.
        """
        if isinstance(active, Suffix) and positions.visual is None:
            if ("text", start) not in kept:
                kept["text", start] = scaled(hidden)
            return F.linear(kept["text", start], *self._fitted("text", hidden))
        raw = None
        for kind in KINDS:
            if kind in self.skipping:
                index = positions.context(kind, hidden.device, start)
                if (kind, start) not in kept:
                    kept[kind, start] = scaled(hidden[index])
                made = F.linear(kept[kind, start], *self._fitted(kind, hidden))
                if raw is None:
                    raw = made.new_zeros(*hidden.shape[:2], made.shape[-1])
                raw[index] = made
        assert raw is not None
        return raw

    def _fitted(self, kind: Kind, like: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self.fitted[kind]
        if weight.device != like.device or weight.dtype != like.dtype:
            with torch.inference_mode(False):  # kept for later calls, which may want gradients
                weight, bias = (part.to(like.device, like.dtype) for part in (weight, bias))
            self.fitted[kind] = weight, bias
        return weight, bias

    def put_back(self, hidden: Tensor, active_states: Tensor, active: Suffix | Gather, positions: Positions) -> Tensor:
        """The states `[B, T, D]` after the layer: the active positions' new ones, all others as they were.

        The prompt's states are copied once, by the first pruned layer of a run; those after it write in place.
        """
        if hidden is not positions.owned:
            hidden = hidden.clone()
        active.put(hidden, active_states)
        positions.own(hidden, self.skipping)
        return hidden


def scaled(hidden: Tensor) -> Tensor:
    """States divided by their root mean square, as they are for fits."""
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


class SplicedCache:
    """What a pruned layer's attention takes for its cache, for one update.

    Args:
        cache: the real one, or None.
        keys, values: of the context positions (or of all, to be overwritten), `[B, G, C, K]`.
        active: the positions whose keys and values come from the layer itself.
        seen: how many of the real cache's columns the attention may see; None for all.
    """

    def __init__(self, cache: Any, keys: Tensor, values: Tensor, active: Suffix | Gather, seen: int | None) -> None:
        self.cache, self.keys, self.values, self.active, self.seen = cache, keys, values, active, seen

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the active positions' keys and values and returns those that attention reads."""
        keys, values = self.active.splice(self.keys, keys), self.active.splice(self.values, values)
        if self.cache is not None:
            keys, values = self.cache.update(keys, values, *args, **kwargs)
        if self.seen is not None:
            # A static cache gives all its columns; without a mask, only those of this call count.
            keys, values = keys[:, :, :self.seen], values[:, :, :self.seen]
        return keys, values


_MARK = "_popvlm"


def prune(model: nn.Module, plan: PruningPlan, family: Family) -> None:
    """Puts `plan` on `model`, in place of any plan that is on it."""
    before = unprune(model)
    replacement = PrunedModel(model, plan, family)
    if before is not None:
        replacement.full = before.full  # a `full_prefill` that is open stays open
    for index, layer in enumerate(family.text_model(model).layers):
        if plan.skips(index):
            replacement.layers.append(PrunedLayer(layer, index, plan, family))
    for part in replacement.parts():
        _put(part)
    model.__dict__[_MARK] = replacement


def unprune(model: nn.Module) -> PrunedModel | None:
    """Takes the plan off `model`, if one is on it, and returns what stood in for its forward."""
    replacement = pruned(model)
    if replacement is not None:
        for part in replacement.parts():
            _take(part)
        del model.__dict__[_MARK]
    return replacement


def pruned(model: nn.Module) -> PrunedModel | None:
    """What stands in for the forward of `model`, if a plan is on it."""
    replacement = model.__dict__.get(_MARK)
    return replacement if replacement is not None and replacement.module is model else None  # not a shallow copy's


@contextmanager
def under(model: nn.Module, plan: PruningPlan | None, family: Family) -> Iterator[None]:
    """Runs `model` under `plan`, or in full under None, inside the block; then puts back what was on it."""
    before = unprune(model)
    try:
        if plan is not None:
            prune(model, plan, family)
        yield
    finally:
        unprune(model)
        if before is not None:
            prune(model, before.plan, family)
            model.__dict__[_MARK].full = before.full


@contextmanager
def full(replacement: PrunedModel) -> Iterator[None]:
    """Runs the full model in this thread and in threads that start inside the block (a streamed `generate`, say)."""
    others = weakref.WeakSet(threading.enumerate())
    others.discard(threading.current_thread())
    replacement.full.append(others)
    try:
        yield
    finally:
        replacement.full[:] = [entry for entry in replacement.full if entry is not others]


def _put(part: PrunedModel | PrunedLayer) -> None:
    # A module that accelerate has put a hook on (device_map) keeps its own forward here and calls it inside the hook.
    slot = "_old_forward" if "_old_forward" in part.module.__dict__ else "forward"
    part.previous = part.module.__dict__.get(slot)
    part.module.__dict__[slot] = part


def _take(part: PrunedModel | PrunedLayer) -> None:
    part.on = False  # for whoever wrapped it since, and still calls it
    state = part.module.__dict__
    for slot in "forward", "_old_forward":
        found = state.get(slot)
        if found is part:
            if part.previous is not None:
                state[slot] = part.previous
            elif slot == "_old_forward":
                state[slot] = type(part.module).forward.__get__(part.module)
            else:
                del state[slot]
        while isinstance(found, (PrunedModel, PrunedLayer)):  # another model's, where two share the layer
            if found.previous is part:
                found.previous = part.previous
            found = found.previous


def _untouched(part: PrunedModel | PrunedLayer, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward that `part` stands in for."""
    if part.previous is not None:
        return part.previous(*args, **kwargs)
    # Not as a bound method: torch.compile would look it up again on the module by name, and find `part`.
    return type(part.module).forward(part.module, *args, **kwargs)


def _answer_mask(keep: Tensor, batch: int, length: int, tail: int) -> tuple[Tensor, int | None]:
    """The mask `[B, T]` of the positions that `logits_to_keep` names, and the most that a sample can have of them."""
    most: int | None
    if keep.dtype == torch.bool:
        mask, most = (keep if keep.ndim == 2 else keep[None]).expand(batch, -1).clone(), None
    else:
        index = (keep if keep.ndim == 2 else keep.reshape(1, -1)).expand(batch, -1).long() % length
        most = min(index.shape[1] + tail, length)
        mask = torch.zeros(batch, length, dtype=torch.bool, device=keep.device).scatter_(1, index, True)
    mask[:, -tail:] = True
    return mask, most
