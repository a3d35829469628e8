"""The cost model against torch's FLOP counter on the path that runs, against masks, loops and hand-counted figures."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import popvlm
from models import FAMILIES, IMAGE, LAYERS, VIDEO, VISUAL, WIDTHS, WINDOW, config, fitted_for, prompt, text_model
from popvlm import PlanError, PruningPlan, UnsupportedModel, shapes
from popvlm.cost import Flops, fitted_bytes, limit, prefill_flops

D, H, G, K = (WIDTHS[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
KV = 2 * D * 2 * G * K  # FLOPs of one position's keys and values in the models of tests/models.py
PAIR = 4 * H * K  # of one query with one key

# What torch's counter leaves out: it counts none of the two.
FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v),
}
if hasattr(torch.ops.aten, "_grouped_mm"):
    FORMULAS[torch.ops.aten._grouped_mm] = lambda a, b, *args, out_shape=None, **kwargs: 2 * a[0] * a[1] * b[-1]

BOTH = range(3, LAYERS)
PLANS: dict[str, tuple[Any, Any, int, bool]] = {  # visual, text, tail, fitted
    "full": ((), (), 1, False),
    "suffix": (BOTH, BOTH, 1, False),
    "suffix fitted": (BOTH, BOTH, 1, True),
    "tail": ((0, 3), (0, 3), 16, False),
    "visual deeper": (range(1, LAYERS), (4, 5), 1, False),
    "visual deeper fitted": (range(1, LAYERS), (4, 5), 16, True),
    "text deeper": ((5,), (1, 5), 1, False),
}


def plan_for(model: Any, name: str) -> PruningPlan:
    visual, text, tail, fitted = PLANS[name]
    return PruningPlan(LAYERS, visual, text, tail, fitted_for(model, set(visual), set(text)) if fitted else None)


def counted(model: Any, inputs: dict[str, Tensor]) -> Flops:
    """What torch's counter sees in one prefill."""
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        model(**inputs, logits_to_keep=1)
    seen = {name: sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    names = {module: f"{type(model).__name__}.{name}" for name, module in model.named_modules()}

    def of(*modules: Any) -> int:
        return sum(seen.get(names[module], 0) for module in modules)

    vision = [getattr(model.model, name) for name in ("visual", "vision_tower", "multi_modal_projector")
              if hasattr(model.model, name)]
    # SigLIP's pooling head, whose output Gemma-3 throws away; the published configs are without it.
    unused = [module for name, module in model.named_modules() if "vision_tower." in name and name.endswith(".head")]
    return Flops(of(*text_model(model).layers), of(model.lm_head), of(*vision) - of(*unused))


def as_it_runs(settings: Any) -> Any:
    """The config with which the cost model counts what this transformers computes: 4.57 runs every expert."""
    settings = deepcopy(settings)
    if settings.model_type == "qwen3_vl_moe" and transformers.__version__.startswith("4."):
        text = settings.get_text_config()
        text.num_experts_per_tok = text.num_experts
    return settings


def visual_count(inputs: dict[str, Tensor]) -> int:
    return sum(token in (IMAGE, VIDEO) for token in inputs["input_ids"][0].tolist())


class Loops:
    """One layer's needs, position by position, the visual ones first: what is active, and which keys it sees."""

    def __init__(self, settings: Any, plan: PruningPlan, layer: int, visual: int, text: int) -> None:
        decoder, self.length = settings.get_text_config(), visual + text
        kinds = ["visual"] * visual + ["text"] * text
        sliding = getattr(decoder, "layer_types", [""] * LAYERS)[layer] == "sliding_attention"
        window = WINDOW if sliding else self.length
        self.active = [at for at in range(self.length)
                       if kinds[at] not in plan.skips(layer) or at >= self.length - plan.tail]
        self.seen = [[key for key in range(query + 1) if query - key < window] for query in self.active]
        later = [key for key in range(self.length) if self.length - key < window]  # by the first token of the answer
        self.keys = {key for keys in [*self.seen, later] for key in keys}
        self.gather = len(self.active) < self.length and len(plan.skips(layer)) == 1


def wasted(settings: Any, plan: PruningPlan, visual: int, text: int) -> int:
    """What popvlm's prefill computes of one prompt beyond what it needs.

    A gather with own projections makes the active positions' keys and values twice, and in a sliding-window layer also
    those that no query will see. A sliding-window layer compares its queries with all.
    """
    tells_apart = settings.model_type in VISUAL and (plan.visual != plan.text or plan.kv == "fitted")
    waste = 0
    for layer in range(LAYERS):
        needs = Loops(settings, plan, layer, visual, text)
        made = KV if needs.gather and tells_apart else 0  # a suffix makes those of its window only
        waste += (needs.length - len(needs.keys)) * (made + PAIR * len(needs.active))
        if needs.gather and tells_apart and plan.kv == "own":
            waste += len(needs.active) * KV
    return waste


@pytest.mark.parametrize(("family", "attention", "name"), [
    *itertools.product(sorted(VISUAL), ["sdpa"], PLANS),
    *itertools.product(sorted({*FAMILIES} - VISUAL), ["sdpa"], ["full", "suffix", "tail", "visual deeper fitted"]),
    *itertools.product(["qwen3_vl", "gemma3", "llama"], ["eager"], ["full", "tail", "visual deeper"])])
def test_counts_what_torch_counts(make: Any, family: str, attention: str, name: str) -> None:
    model = make(family, attention)
    plan = plan_for(model, name)
    popvlm.accelerate(None, model, plan=plan)
    prompts = [[[3, (2, 2), 20]] * 2, [[27]]] if family in VISUAL else [[[27]] * 2]
    for samples in prompts:
        inputs = prompt(model, samples)
        batch, length = inputs["input_ids"].shape
        visual = visual_count(inputs)
        found = counted(model, inputs)
        settings = as_it_runs(model.config)
        expected = prefill_flops(settings, plan, visual, length - visual, batch=batch, causal=False)
        assert found.decoder == expected.decoder + batch * wasted(settings, plan, visual, length - visual)
        assert (found.head, found.vision) == (expected.head, expected.vision)
        if name == "full":
            assert expected == prefill_flops(settings, None, visual, length - visual, batch=batch, causal=False)


@pytest.mark.parametrize("name", ["full", "suffix", "tail"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_vl", "gemma3"])
def test_causal_counts_what_the_masks_let_through(make: Any, family: str, name: str) -> None:
    model = make(family, "eager")
    plan = plan_for(model, name)
    popvlm.accelerate(None, model, plan=plan)
    inputs = prompt(model, [[3, (2, 2), 20]] if family in VISUAL else [[27]])
    length, visual = inputs["input_ids"].shape[1], visual_count(inputs)
    masked = 0

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal masked
        masked += int((kwargs["attention_mask"][0, 0] != 0).sum())

    handles = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
               for layer in text_model(model).layers]
    found = counted(model, inputs).decoder - PAIR * masked
    for handle in handles:
        handle.remove()
    if family == "gemma3":  # an image's four tokens look ahead at each other: counted as causal
        found -= PAIR * 6 * (LAYERS - len(plan.visual))
    assert prefill_flops(model.config, plan, visual, length - visual).decoder == found


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl_moe"])
def test_agrees_with_loops_over_positions(family: str) -> None:
    settings = config(family)
    mlp = {"gemma3": lambda layer: 3 * D * 96,
           "qwen3_vl_moe": lambda layer: 3 * D * 96 if layer == 1 else D * 4 + 2 * 3 * D * 32}[family]
    layers = (), (1, 2), (0, 2, 5)
    for visual, text, skipped, unread, tail in itertools.product((0, 4, 21), (0, 3, 12), layers, layers, (1, 5, 40)):
        if visual + text == 0:
            continue
        plan = PruningPlan(LAYERS, skipped, unread, tail)
        for causal in True, False:
            flops = 0
            for layer in range(LAYERS):
                needs = Loops(settings, plan, layer, visual, text)
                pairs = (sum(len(keys) for keys in needs.seen) if causal else len(needs.active) * len(needs.keys))
                flops += (len(needs.keys) * KV + len(needs.active) * 2 * (2 * D * H * K + mlp(layer)) + pairs * PAIR)
            assert prefill_flops(settings, plan, visual, text, causal=causal).decoder == flops


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "qwen3-vl-30b-a3b", "gemma-3-12b"])
def test_counts_what_torch_counts_at_real_widths(name: str) -> None:
    settings = shapes.config(name, 2)
    if name.startswith("gemma"):
        settings = settings.text_config  # SigLIP's initialisation looks at values, and here are only shapes
    vlm = hasattr(settings, "vision_config")
    with FakeTensorMode():
        model: Any = (AutoModelForImageTextToText if vlm else AutoModelForCausalLM).from_config(
            settings, attn_implementation="eager", dtype=torch.bfloat16).eval()
        inputs = {"input_ids": torch.zeros(1, 512, dtype=torch.long)}
        if vlm:
            inputs["position_ids"] = torch.arange(512).expand(3, 1, -1)
        for plan in PruningPlan(2), PruningPlan(2, {1}, {1}, tail=16):
            popvlm.accelerate(None, model, plan=plan)
            assert counted(model, inputs) == prefill_flops(as_it_runs(settings), plan, 0, 512, causal=False)


def test_vision_attends_within_each_image(make: Any) -> None:
    for family in sorted(VISUAL):
        model = make(family)
        inputs = prompt(model, [[3, (2, 2), 2, (2, 2), (2, 2), 4]])
        visual = visual_count(inputs)
        assert counted(model, inputs).vision == prefill_flops(model.config, None, visual, 9, images=3).vision
    model = make("qwen3_vl")
    inputs = prompt(model, [[3, (3, 2, 4), 4]])  # a video: three pairs of frames, each for itself
    assert counted(model, inputs).vision == prefill_flops(model.config, None, 24, 9, images=3).vision
    gemma = config("gemma3")
    assert prefill_flops(gemma, None, 5, 9).vision == prefill_flops(gemma, None, 8, 9).vision


def test_hand_counted() -> None:
    # Qwen3-VL-2B: q and o 2048 x 2048, k and v 2048 x 1024, MLP 3 x 2048 x 6144; 16 heads of 128.
    kv, rest, tokens = 2 * 2 * 2048 * 1024, 2 * (2 * 2048 * 2048 + 3 * 2048 * 6144), 1024
    settings = shapes.config("qwen3-vl-2b")
    layer = tokens * (kv + rest) + 4 * 16 * 128 * tokens * (tokens + 1) // 2
    full = prefill_flops(settings, None, 0, tokens)
    assert (full.decoder, full.head, full.vision, full.total) == (
        28 * layer, 2 * 2048 * 151936, 0, 28 * layer + 2 * 2048 * 151936)
    skipped = tokens * kv + rest + 4 * 16 * 128 * tokens
    plan = PruningPlan.from_layers(28, range(11, 28))
    assert prefill_flops(settings, plan, 0, tokens).decoder == 11 * layer + 17 * skipped


@pytest.mark.parametrize(("name", "layers", "expected"), [
    ("qwen3-vl-2b", 9, 1.42), ("qwen3-vl-2b", 17, 2.26), ("qwen3-vl-8b", 22, 2.41)])
def test_limits_of_the_design_page(name: str, layers: int, expected: float) -> None:
    settings = shapes.config(name)
    depth = settings.text_config.num_hidden_layers
    plan = PruningPlan.from_layers(depth, range(depth - layers, depth))
    assert round(limit(settings, plan, 0, 1024), 2) == expected
    assert round(limit(settings, plan, 960, 64), 2) == expected  # whatever the context is
    assert 0 < limit(settings, plan, 0, 1024, causal=False) - limit(settings, plan, 0, 1024) < 0.02
    visual_only = PruningPlan(depth, visual=plan.visual)
    assert 1 < limit(settings, visual_only, 960, 64) < expected
    assert limit(settings, visual_only, 0, 1024) == 1  # nothing to skip
    assert limit(settings, PruningPlan.from_layers(depth, plan.text, tail=1024), 0, 1024) == 1
    full, pruned = (prefill_flops(settings, each, 960, 64) for each in (None, plan))
    assert full.vision == pruned.vision > 0
    assert 1 < full.total / pruned.total < expected
    batch = prefill_flops(settings, plan, 960, 64, batch=3)
    assert (batch.decoder, batch.head, batch.vision) == (3 * pruned.decoder, 3 * pruned.head, 3 * pruned.vision)


def test_bytes_of_a_fit() -> None:
    tensors = fitted_for(None, {1, 2, 4}, {4})
    plan = PruningPlan(LAYERS, {1, 2, 4}, {4}, fitted=tensors)
    assert fitted_bytes(config("gemma3"), plan, itemsize=4) == sum(tensor.nbytes for tensor in tensors.values())


def test_refuses_in_a_sentence() -> None:
    settings = config("qwen3_vl")
    with pytest.raises(PlanError, match="num_layers=6"):
        limit(settings, PruningPlan(5), 4, 9)
    with pytest.raises(UnsupportedModel, match=r"Qwen3VLTextConfig costs; give the whole config"):
        prefill_flops(settings.text_config, None, 4, 9)
    with pytest.raises(ValueError, match=r"LlamaConfig has no vision encoder.*give visual=0"):
        prefill_flops(config("llama"), None, 4, 9)
    for wrong in dict(visual=0, text=0), dict(visual=-1, text=9), dict(visual=4, text=9, batch=0), dict(
            visual=4, text=9, images=0):
        with pytest.raises(ValueError, match="give at least one token, one image and one sample"):
            prefill_flops(settings, None, **wrong)
