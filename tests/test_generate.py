"""`generate` with a plan on: its ways of decoding and its caches, against the oracle run in the same way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.flex_attention
from torch.nn.attention.flex_attention import flex_attention
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import popvlm
from models import (
    FAMILIES,
    LAYERS,
    VISUAL,
    WINDOW,
    build,
    cache_argument,
    cache_of,
    fitted_for,
    is_qwen,
    oracle,
    prompt,
    sample,
)
from popvlm import PruningPlan
from test_exact import MIXED, PLANS, TEXT, VIDEOS, samples_for

NEW = cache_argument() == "cache"  # transformers 5


def generated(model, batch, **how):
    """The tokens and the scores of each step."""
    how = dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_scores=True) | how
    torch.manual_seed(3)
    return model.generate(**batch, **how)


def agree(got, want):
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def compare(model, layers, run, **plan):
    """`run(model)` with the plan on and under the oracle."""
    fitted = fitted_for(model, **layers) if plan.pop("kv", "own") == "fitted" else None
    with oracle(model, **layers, fitted=fitted, **plan):
        want = run(model)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, fitted=fitted, **plan))
    agree(run(model), want)


WAYS = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=2.0),
    "beams": dict(num_beams=3),
    "beams and returns": dict(num_beams=4, num_return_sequences=2),
    "several samples": dict(do_sample=True, num_return_sequences=3),
    "no cache": dict(use_cache=False, max_new_tokens=4),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_decoding(make, family, name, way):
    if way == "no cache" and family == "gemma3" and not NEW:
        pytest.skip("transformers 4.57 drops the pixels after the first step, with or without a plan")
    model = make(family)
    batch = prompt(model, samples_for(family))
    compare(model, PLANS[name], lambda model: generated(model, batch, **WAYS[way]))


@pytest.mark.parametrize("family", FAMILIES)
def test_fitted_projections_and_a_wide_tail(make, family):
    model = make(family, "eager")
    batch = prompt(model, samples_for(family))
    compare(model, PLANS["visual deeper"], lambda model: generated(model, batch), kv="fitted", tail=5)


def test_videos(make):
    model = make("qwen3_vl")
    batch = prompt(model, VIDEOS)
    compare(model, PLANS["visual deeper"], lambda model: generated(model, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_alone_and_in_a_batch(make, family):
    model, samples = make(family), samples_for(family)
    batch = prompt(model, samples)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS["visual deeper"]))
    together = generated(model, batch)
    length = batch["input_ids"].shape[1]
    for row in range(len(samples)):
        one = sample(batch, model, samples, row)
        alone = generated(model, one)
        assert torch.equal(alone.sequences[0, one["input_ids"].shape[1]:], together.sequences[row, length:])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_vl"])
@pytest.mark.parametrize("sampled", [False, True])
def test_assisted_decoding(make, family, sampled):
    model = make(family)
    assistant = make(family, seed=1)
    batch = prompt(model, samples_for(family)[:1])
    extra = dict(num_beams=1, do_sample=sampled, max_new_tokens=12)
    compare(model, PLANS["last third"],
            lambda model: generated(model, batch, assistant_model=assistant, **extra), tail=3)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma3", "qwen3_vl"])
def test_prompt_lookup_decoding(make, family):
    model = make(family)
    batch = prompt(model, samples_for(family)[:1])
    batch["input_ids"][0, -8:] = torch.tensor([5, 6, 7, 5, 6, 7, 5, 6])
    compare(model, PLANS["last third"],
            lambda model: generated(model, batch, prompt_lookup_num_tokens=3, max_new_tokens=12, eos_token_id=299))


def test_drafted_tokens_leave_the_answer_as_it_is_without_them(make):
    """Drafts are answer positions, so what is written does not depend on whether any were."""
    model = make("llama")
    batch = prompt(model, TEXT[1:2])
    popvlm.accelerate(None, model, ratio=0.5)
    want = generated(model, batch, max_new_tokens=16).sequences
    got = generated(model, batch, max_new_tokens=16, assistant_model=make("qwen3", seed=1)).sequences
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "qwen3_vl", "gemma3"])
def test_three_turns_on_one_cache(make, family):
    model = make(family)
    first = prompt(model, samples_for(family)[:1])
    turns = [prompt(model, [[9]], seed=7)["input_ids"], prompt(model, [[30]], seed=8)["input_ids"]]

    def talk(model):
        cache, ids, out = DynamicCache(config=model.config.get_text_config()), first["input_ids"], None
        extra = {key: value for key, value in first.items() if key not in ("input_ids", "attention_mask")}
        for turn in [None, *turns]:
            if turn is not None:
                ids = torch.cat((out.sequences, turn), 1)
                extra = {key: torch.nn.functional.pad(value, (0, ids.shape[1] - value.shape[1]))
                         if key.endswith("type_ids") else value for key, value in extra.items()}
                if not NEW or family == "gemma3":
                    extra = {key: value for key, value in extra.items() if not key.startswith("pixel")}
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **extra}
            if turn is not None and not is_qwen(model):
                batch.pop("token_type_ids", None)
            elif turn is not None:
                batch = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask")}
            out = generated(model, batch, max_new_tokens=5, **{cache_argument(): cache})
            cache = cache_of(out)
        return out

    compare(model, PLANS["visual deeper"], talk, tail=2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_chunked_prefill(make, family, attention):
    model = make(family, attention)
    batch = prompt(model, TEXT[2:])
    compare(model, PLANS["last third"], lambda model: generated(model, batch, prefill_chunk_size=7))


def test_chunk_by_chunk_by_hand_equals_the_oracle(make):
    model, layers = make("gemma3_text"), PLANS["not contiguous"]
    ids = prompt(model, TEXT[2:])["input_ids"]

    def run(model):
        cache = DynamicCache(config=model.config)
        for chunk in ids.split(11, dim=1):
            out = model(input_ids=chunk, logits_to_keep=1, use_cache=True, **{cache_argument(): cache})
        return out.logits

    with oracle(model, **layers, tail=3):
        want = run(model)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, tail=3))
    torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_inputs_embeds(make, family):
    model = make(family)
    batch = prompt(model, TEXT)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    compare(model, PLANS["last third"], lambda model: generated(model, batch))


def static(model, batch, **extra):
    return generated(model, batch, cache_implementation="static", **extra)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
@pytest.mark.parametrize("padded", [False, True])
def test_static_cache(make, family, attention, name, padded):
    model = make(family, attention)
    batch = prompt(model, samples_for(family)[:None if padded else 1])
    compare(model, PLANS[name], lambda model: static(model, batch))
    agree(static(model, batch), generated(model, batch))  # and as on a dynamic cache


@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_static_cache_with_room_to_spare_and_no_mask(make, family, tail):
    """sdpa gets no mask then, and must not see the columns that nothing was written to."""
    model = make(family)
    ids = prompt(model, TEXT[:1])["input_ids"]

    def run(model):
        caches = StaticCache(config=model.config, max_cache_len=64)
        return model(input_ids=ids, logits_to_keep=1, use_cache=True, **{cache_argument(): caches}).logits

    with oracle(model, **PLANS["last third"], tail=tail):
        want = run(model)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS["last third"], tail=tail))
    torch.testing.assert_close(run(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_static_cache_with_generates_own_compile(family):
    model = build(family)
    batch = prompt(model, MIXED)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS["visual deeper"]))
    want = generated(model, batch)
    settings = CompileConfig(mode="default")
    settings._compile_all_devices = True
    torch._dynamo.reset()
    got = static(model, batch, compile_config=settings)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.scores[-1], want.scores[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_decode_step_has_no_more_graphs_than_the_full_models():
    """Nothing in a decode step breaks the graph."""
    graphs = []
    for ratio in 0, 0.5:
        model = build("llama")
        popvlm.accelerate(None, model, ratio=ratio)
        cache = StaticCache(config=model.config, max_cache_len=32)
        ids = prompt(model, TEXT[:1])["input_ids"]
        model(input_ids=ids, logits_to_keep=1, use_cache=True, **{cache_argument(): cache})
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        step = torch.compile(model, backend="eager", fullgraph=NEW)
        position = {} if NEW else {"cache_position": torch.tensor([ids.shape[1]])}
        step(input_ids=ids[:, :1], logits_to_keep=1, use_cache=True, **position, **{cache_argument(): cache})
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
def test_a_compiled_prefill(name):
    model = build("qwen3_vl")
    batch = prompt(model, MIXED)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS[name]))
    want = model(**batch, logits_to_keep=1).logits
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager")(**batch, logits_to_keep=1).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_vl", "llama", "qwen3"])
def test_quantized_cache(make, monkeypatch, family):
    extension = pytest.importorskip("optimum.quanto.library.extensions.cpp").ext
    # In place of the C++ that quanto compiles on first use, for a minute.
    monkeypatch.setattr(extension, "_lib", SimpleNamespace(unpack=lambda packed, bits: torch.cat(
        [(packed >> shift) & (2 ** bits - 1) for shift in range(0, 8, bits)])))
    model = make(family)
    batch = prompt(model, samples_for(family))
    settings = dict(backend="quanto", nbits=4, q_group_size=16, residual_length=8)
    compare(model, PLANS["visual deeper"],
            lambda model: generated(model, batch, cache_implementation="quantized", cache_config=settings))


class Stream:
    """A CUDA stream, to a machine without one."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_text"])
def test_offloaded_cache(make, monkeypatch, family):
    for owner, name in (torch, "Stream"), (torch.cuda, "Stream"):
        monkeypatch.setattr(owner, name, Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    model = make(family)
    batch = prompt(model, samples_for(family))
    compare(model, PLANS["visual deeper"],
            lambda model: generated(model, batch, cache_implementation="offloaded"))


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_prompt_several_windows_long(make, family, attention):
    model = make(family, attention)
    samples = [[6 * WINDOW, (2, 2), 3 * WINDOW], [2 * WINDOW]] if family in VISUAL else [[7 * WINDOW], [3 * WINDOW]]
    batch = prompt(model, samples)
    for name in "last third", "crossed":
        for tail in 1, 2 * WINDOW:
            popvlm.restore(model)
            compare(model, PLANS[name], lambda model: generated(model, batch, max_new_tokens=2 * WINDOW), tail=tail)


@pytest.mark.parametrize("tail", [1, 3])
def test_sliding_layers_with_a_mask_between_global_ones_without(make, tail):
    model = make("gemma3_text")
    batch = prompt(model, [[7 * WINDOW]])
    compare(model, PLANS["all"], lambda model: generated(model, batch), tail=tail)


@pytest.mark.parametrize(("family", "name"), [("gemma3", "visual deeper"), ("llama", "last third"),
                                              ("qwen3", "not contiguous")])
def test_flex_attention(make, monkeypatch, family, name):
    """Uncompiled: what is compared is the mask."""
    monkeypatch.setattr(transformers.integrations.flex_attention, "compile_friendly_flex_attention", uncompiled_flex)
    model = make(family, "flex_attention")
    batch = prompt(model, samples_for(family))
    for tail in 1, 5:
        popvlm.restore(model)
        compare(model, PLANS[name], lambda model: generated(model, batch, max_new_tokens=3), tail=tail)


def uncompiled_flex(query, key, value, training=False, **settings):
    return flex_attention(query, key, value, **settings)


def flash(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
    """Flash attention's contract in plain torch: causal from the lower right corner, a window, padding in two
    dimensions; no mask of any other shape."""
    assert attention_mask is None or attention_mask.ndim == 2
    last = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    columns = torch.arange(key.shape[2])[None]
    seen = columns <= last
    if sliding_window is not None:
        seen = seen & (columns > last - sliding_window)
    seen = seen[None, None]
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, -key.shape[2]:].bool()
    groups = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), attn_mask=seen, scale=scaling)
    return out.nan_to_num().transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_model(make):
    """Models whose text decoder calls `flash` where it would call the kernel."""
    models, kernel = [], ALL_ATTENTION_FUNCTIONS["flash_attention_2"]

    def made(family):
        models.append(make(family))
        models[-1].config.get_text_config()._attn_implementation = "flash_attention_2"
        return models[-1]

    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", flash)
    yield made
    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", kernel)
    for model in models:
        model.config.get_text_config()._attn_implementation = "sdpa"


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3_text", "llama", "qwen3"])
@pytest.mark.parametrize("tail", [1, 5])
def test_flash_attention_as_its_contract_says(flash_model, family, tail):
    model = flash_model(family)
    batch = prompt(model, samples_for(family))
    compare(model, PLANS["not contiguous"], lambda model: generated(model, batch), tail=tail)
    popvlm.restore(model)
    turns = [batch["input_ids"], prompt(model, [[9], [12], [5]], seed=4)["input_ids"]]
    if family != "qwen3_vl":
        compare(model, PLANS["last third"], lambda model: further_turn(model, *turns), tail=tail)


def further_turn(model, first, then):
    cache = DynamicCache(config=model.config)
    first = generated(model, {"input_ids": first, "attention_mask": first > 0}, **{cache_argument(): cache})
    ids = torch.cat((first.sequences, then.clamp(min=1)), 1)
    return generated(model, {"input_ids": ids, "attention_mask": ids > 0}, **{cache_argument(): cache_of(first)})


def test_flash_attention_on_a_plan_that_it_cannot_serve(flash_model):
    model = flash_model("qwen3_vl")
    batch = prompt(model, MIXED)
    full = model(**batch, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS["visual deeper"]))
    with pytest.warns(UserWarning, match="flash_attention_2 cannot serve a plan in which .*attn_implementation='sdpa'"):
        assert torch.equal(model(**batch, logits_to_keep=1).logits, full)


@pytest.mark.slow
def test_compiled_flex_attention():
    want_model, model = build("gemma3"), build("gemma3", "flex_attention")
    batch = prompt(model, MIXED)
    plan = PruningPlan(LAYERS, **PLANS["visual deeper"])
    want = popvlm.accelerate(None, want_model, plan=plan)(**batch, logits_to_keep=1).logits
    torch._dynamo.reset()
    # torch's CPU kernel does not compile for a query length that varies, with or without a plan.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        got = popvlm.accelerate(None, model, plan=plan)(**batch, logits_to_keep=1).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
