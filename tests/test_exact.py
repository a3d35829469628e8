"""One forward call, on every family and attention implementation, against oracles that share no code with popvlm."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

import popvlm
from models import (
    FAMILIES,
    LAYERS,
    VISUAL,
    cache_argument,
    cache_of,
    cached,
    fitted_for,
    is_qwen,
    oracle,
    prompt,
    sample,
    text_model,
)
from popvlm import PruningPlan

ATTENTIONS = ("eager", "sdpa")
MIXED = [[3, (2, 3), 5, (4, 2), 9], [20], [2, (2, 2), 30]]
VIDEOS = [[3, (2, 2, 3), 9, (2, 2), 4], [2, (3, 2, 2), 12]]
TEXT = [[13], [25], [40]]

PLANS = {
    "last third": dict(visual={4, 5}, text={4, 5}),
    "not contiguous": dict(visual={0, 2, 5}, text={0, 2, 5}),
    "visual deeper": dict(visual={1, 3, 4, 5}, text={4, 5}),
    "visual only": dict(visual={2, 3, 4, 5}, text=set()),
    "crossed": dict(visual={1, 4}, text={0, 3, 4}),
    "all": dict(visual=set(range(LAYERS)), text=set(range(LAYERS))),
}


def samples_for(family):
    return MIXED if family in VISUAL else TEXT


def close(got, want, tolerance=2e-5):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def same_call(got, want, mask):
    """Logits, and cached keys and values at every real position, agree."""
    close(got.logits, want.logits)
    for ours, theirs in zip(cached(got), cached(want)):
        real = mask[:, None, -ours.shape[2]:, None].bool()
        close(ours * real, theirs * real)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["own", "fitted"])
@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("name", PLANS)
def test_equals_the_oracle(make, family, attention, name, tail, kv):
    model, layers = make(family, attention), PLANS[name]
    batch = prompt(model, samples_for(family))
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    with oracle(model, **layers, tail=tail, fitted=fitted):
        want = model(**batch, logits_to_keep=1, use_cache=True)
    full = model(**batch, logits_to_keep=1, use_cache=True)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, tail=tail, fitted=fitted))
    got = model(**batch, logits_to_keep=1, use_cache=True)
    same_call(got, want, batch["attention_mask"])
    if layers["text"] or family in VISUAL:
        assert (got.logits - full.logits).abs().max() > 0.1, "the plan changed nothing, so the test shows nothing"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_equals_the_oracle_on_videos(make, family, kv):
    model, layers = make(family), PLANS["visual deeper"]
    batch = prompt(model, VIDEOS)
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    with oracle(model, **layers, fitted=fitted):
        want = model(**batch, logits_to_keep=1, use_cache=True)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, fitted=fitted))
    same_call(model(**batch, logits_to_keep=1, use_cache=True), want, batch["attention_mask"])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_one_pass_equals_all_but_the_last_token_and_then_that_one_in_full(make, family, attention, name, kv):
    model, layers = make(family, attention), PLANS[name]
    batch = prompt(model, samples_for(family)[:1])
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, fitted=fitted))
    want = model(**batch, logits_to_keep=1, use_cache=True)

    # Every position of the first part is context, also its last: the oracle's own masks, without the boundary.
    head = {key: value[:, :-1] if key.endswith(("ids", "mask")) else value for key, value in batch.items()}
    popvlm.restore(model)
    with oracle(model, **layers, tail=0, fitted=fitted):
        first = model(**head, logits_to_keep=1, use_cache=True)
    then = {cache_argument(): cache_of(first), "attention_mask": batch["attention_mask"]}
    if is_qwen(model):  # as `generate` does, and the model alone does not
        then["position_ids"] = (batch["input_ids"].shape[1] - 1 + model.model.rope_deltas).expand(3, 1, 1)
    last = model(input_ids=batch["input_ids"][:, -1:], **then, use_cache=True)
    same_call(want, last, batch["attention_mask"])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_lossless_is_the_full_model(make, family, attention):
    model = make(family, attention)
    batch = prompt(model, samples_for(family))
    want = model(**batch, logits_to_keep=1, use_cache=True)
    tokens = model.generate(**batch, max_new_tokens=32, do_sample=False)
    popvlm.accelerate(None, model, plan="lossless")
    got = model(**batch, logits_to_keep=1, use_cache=True)
    same_call(got, want, batch["attention_mask"])
    assert torch.equal(model.generate(**batch, max_new_tokens=32, do_sample=False), tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["last third", "visual deeper", "crossed"])
def test_a_sample_alone_and_in_a_left_padded_batch(make, family, name):
    model, samples = make(family), samples_for(family)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS[name]))
    batch = prompt(model, samples)
    together = model(**batch, logits_to_keep=1).logits
    for row in range(len(samples)):
        alone = model(**sample(batch, model, samples, row), logits_to_keep=1).logits
        close(alone[0], together[row], 1e-4)


def untouched_calls(model, batch):
    """Calls that have no context positions, with what they return."""
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    base = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask")}
    yield model(**batch).logits
    yield model(**batch, labels=labels).loss
    yield model(**batch, logits_to_keep=0).logits
    yield model(**batch, logits_to_keep=batch["input_ids"].shape[1]).logits
    yield model.model(**batch).last_hidden_state
    yield text_model(model)(**base).last_hidden_state


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_without_context_positions_are_bit_for_bit_the_full_model(make, family, attention):
    model = make(family, attention)
    batch = prompt(model, samples_for(family))
    want = list(untouched_calls(model, batch))
    popvlm.accelerate(None, model, ratio=0.5)
    for got, expected in zip(untouched_calls(model, batch), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_plan_full_prefill_and_restore_are_bit_for_bit_the_full_model(make, family, attention):
    model = make(family, attention)
    batch = prompt(model, samples_for(family))
    want = model(**batch, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS))
    assert torch.equal(model(**batch, logits_to_keep=1).logits, want)
    popvlm.accelerate(None, model, ratio=0.5)
    assert not torch.equal(model(**batch, logits_to_keep=1).logits, want)
    with popvlm.full_prefill(model):
        assert torch.equal(model(**batch, logits_to_keep=1).logits, want)
    assert not torch.equal(model(**batch, logits_to_keep=1).logits, want)
    popvlm.restore(model)
    assert torch.equal(model(**batch, logits_to_keep=1).logits, want)


def test_gradients_with_labels_are_bit_for_bit_the_full_models(make):
    model = make("qwen3_vl")
    batch = prompt(model, MIXED[:1])
    weight = text_model(model).layers[LAYERS - 1].mlp.up_proj.weight
    gradients = []
    for plan in None, PruningPlan.last(LAYERS, 0.5):
        if plan:
            popvlm.accelerate(None, model, plan=plan)
        with torch.enable_grad():
            model.zero_grad()
            model(**batch, labels=batch["input_ids"]).loss.backward()
        gradients.append(weight.grad.clone())
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_gradients_through_a_pruned_call_equal_the_oracles(make, kv):
    model, layers = make("gemma3"), PLANS["visual deeper"]
    batch = prompt(model, MIXED)
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    gradients = []
    for pruned in False, True:
        if pruned:
            popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, fitted=fitted))
        with torch.enable_grad():
            model.zero_grad()
            if pruned:
                model(**batch, logits_to_keep=1).logits.square().sum().backward()
            else:
                with oracle(model, **layers, fitted=fitted):
                    model(**batch, logits_to_keep=1).logits.square().sum().backward()
        gradients.append([torch.zeros(()) if part.grad is None else part.grad.clone()
                          for part in text_model(model).layers.parameters()])
    for ours, theirs in zip(*gradients):
        close(ours, theirs, 1e-3)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
@pytest.mark.parametrize("keep", [3, torch.tensor([4, -1]), torch.tensor([2, 7, 7, 5]), torch.tensor(6),
                                  torch.tensor([3, 8], dtype=torch.int32), torch.tensor([], dtype=torch.long),
                                  "per sample", "boolean"], ids=str)
def test_logits_to_keep_names_the_answer_positions(make, family, name, keep):
    model, layers = make(family), PLANS[name]
    batch = prompt(model, samples_for(family))
    if isinstance(keep, str):
        if cache_argument() != "cache":
            pytest.skip("this transformers takes one index for all samples")
        keep = torch.tensor([[0, 30], [25, 26], [38, 1]])
        if name == "boolean":
            keep = torch.zeros_like(batch["input_ids"], dtype=torch.bool).scatter_(1, keep, True)
    want_keep = keep[None] if isinstance(keep, torch.Tensor) and keep.ndim == 0 else keep
    tail = 2
    with oracle(model, **layers, tail=tail):
        want = model(**batch, logits_to_keep=want_keep, use_cache=True)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, tail=tail))
    got = model(**batch, logits_to_keep=keep, use_cache=True)
    close(got.logits.view_as(want.logits), want.logits)
    for ours, theirs in zip(cached(got), cached(want)):
        close(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
def test_output_hidden_states(make, family, name):
    model, layers = make(family), PLANS[name]
    batch = prompt(model, samples_for(family))
    want = []
    with oracle(model, **layers):  # whose own hooks run before these
        handles = [layer.register_forward_hook(
            lambda module, args, output: want.append(output[0] if isinstance(output, tuple) else output))
            for layer in text_model(model).layers]
        model(**batch, logits_to_keep=1)
        for handle in handles:
            handle.remove()
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers))
    got = model(**batch, logits_to_keep=1, output_hidden_states=True).hidden_states
    assert len(got) == len(want) + 1 == LAYERS + 1
    for ours, theirs in zip(got[1:-1], want[:-1]):  # the last is past the final norm
        close(ours, theirs)


def test_a_users_hooks_see_states_that_do_not_change_later(make):
    model = make("llama")
    batch = prompt(model, TEXT)
    popvlm.accelerate(None, model, ratio=0.9)
    seen, kept = {}, {}

    def watch(index):
        def hook(module, args, output):
            seen[index], kept[index] = output, output.clone()
        return hook

    handles = [layer.register_forward_hook(watch(index)) for index, layer in enumerate(text_model(model).layers)
               if index % 2]
    model(**batch, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    for index, states in seen.items():
        assert torch.equal(states, kept[index])


@pytest.mark.parametrize("where", ["inside a layer", "everywhere"])
def test_hooks_inside_a_layer_or_on_every_module_see_states_that_do_not_change_later(make, where):
    model = make("llama")
    batch = prompt(model, TEXT)
    popvlm.accelerate(None, model, ratio=0.9)
    seen = []

    def watch(module, args, output=None):
        seen.extend((state, state.clone()) for state in (*args, output) if isinstance(state, torch.Tensor))

    if where == "everywhere":
        handles = [torch.nn.modules.module.register_module_forward_hook(watch)]
    else:
        handles = [layer.input_layernorm.register_forward_pre_hook(watch) for layer in text_model(model).layers]
    model(**batch, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    assert seen
    assert all(torch.equal(*pair) for pair in seen)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
@pytest.mark.parametrize("name", ["last third", "visual deeper"])
def test_autocast(make, family, kv, name):
    model, layers = make(family), PLANS[name]
    batch = prompt(model, samples_for(family))
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    with torch.autocast("cpu", torch.bfloat16):
        with oracle(model, **layers, fitted=fitted):
            want = model(**batch, logits_to_keep=1).logits
        popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, fitted=fitted))
        got = model(**batch, logits_to_keep=1).logits
    assert (got - want).abs().max() < 0.1 * want.abs().max()


def test_inputs_are_not_written_to(make):
    model = make("llama")
    embeds = torch.randn(2, 12, 64)
    kept = embeds.clone()
    popvlm.accelerate(None, model, ratio=0.99)
    popvlm.accelerate(None, model, plan=PruningPlan.from_layers(LAYERS, range(LAYERS)))
    model(inputs_embeds=embeds, logits_to_keep=1)
    assert torch.equal(embeds, kept)


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_embeds(make, family):
    model, layers = make(family), PLANS["visual deeper"]
    batch = prompt(model, samples_for(family))
    embeds = model.get_input_embeddings()(batch.pop("input_ids"))
    types = batch.get("mm_token_type_ids", batch.get("token_type_ids"))
    if family in VISUAL and types is None:  # transformers 4.57 on Qwen3-VL: no types, so the placeholders are looked up
        embeds_types = prompt(model, MIXED)["input_ids"]
        types = (embeds_types == 290).long()
    if is_qwen(model):  # without ids there are no multimodal positions to compute
        batch["position_ids"] = torch.arange(embeds.shape[1]).expand(3, len(embeds), -1)
    batch["inputs_embeds"] = embeds
    with oracle(model, **layers, types=types):
        want = model(**batch, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers))
    close(model(**batch, logits_to_keep=1).logits, want)
    batch.pop("mm_token_type_ids", batch.pop("token_type_ids", None))
    if family != "gemma3":  # whose images attend to themselves by their types
        close(model(**batch, logits_to_keep=1).logits, want)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_four_dimensional_mask_of_the_users_own(make, attention):
    model, layers = make("llama", attention), PLANS["last third"]
    ids = torch.randint(2, 280, (2, 12))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[:, 3] = False
    mask[3, 3] = True
    mask = mask.expand(2, 1, 12, 12)
    if attention == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with oracle(model, **layers, tail=3):
        want = model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **layers, tail=3))
    close(model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits, want)


def test_what_cannot_be_pruned_runs_in_full_and_says_so_once(make):
    model = make("llama", "eager")
    batch = prompt(model, TEXT)
    want = model(**batch, logits_to_keep=1, output_attentions=True)
    popvlm.accelerate(None, model, ratio=0.5)
    with pytest.warns(UserWarning, match="output_attentions") as said:
        for _ in range(3):
            got = model(**batch, logits_to_keep=1, output_attentions=True)
    assert len(said) == 1
    assert torch.equal(got.logits, want.logits)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got.attentions, want.attentions, strict=True))


def test_router_logits_run_in_full(make):
    model = make("qwen3_vl_moe")
    batch = prompt(model, MIXED)
    want = model(**batch, logits_to_keep=1, output_router_logits=True)
    popvlm.accelerate(None, model, ratio=0.5)
    with pytest.warns(UserWarning, match="output_router_logits"):
        got = model(**batch, logits_to_keep=1, output_router_logits=True)
    assert torch.equal(got.logits, want.logits)


class Counting(TorchFunctionMode):
    """Counts what a call asks of the host or copies."""

    def __init__(self):
        self.counts = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", str(function))
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


SYNCHRONISING = ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "cpu", "numpy", "unique")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_host_synchronisation_and_one_copy_of_the_prompt(make, family):
    model = make(family)
    batch = prompt(model, samples_for(family))
    counts = []
    for ratio in 0, 0.5:
        popvlm.accelerate(None, model, ratio=ratio)
        with Counting() as counting:
            model(**batch, logits_to_keep=1)
        counts.append(counting.counts)
    full, pruned = counts
    for name in SYNCHRONISING:
        assert pruned.get(name, 0) <= full.get(name, 0), name
    assert pruned.get("clone", 0) == full.get("clone", 0) + 1


@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_visual_deeper_asks_the_host_once_a_call_however_many_layers(make, kv):
    model = make("qwen3_vl")
    batch = prompt(model, MIXED)
    counts = []
    for layers in {4, 5}, {1, 2, 3, 4, 5}:
        fitted = fitted_for(model, layers, set()) if kv == "fitted" else None
        popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, visual=layers, fitted=fitted))
        with Counting() as counting:
            model(**batch, logits_to_keep=1)
        counts.append(counting.counts)
    for name in SYNCHRONISING:
        assert counts[0].get(name, 0) == counts[1].get(name, 0), name


@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_what_the_host_asks_it_asks_before_the_model_runs(make, kv):
    model, layers = make("qwen3_vl"), PLANS["visual deeper"]
    batch = prompt(model, MIXED)
    fitted = fitted_for(model, **layers) if kv == "fitted" else None
    inside = []
    for plan in PruningPlan(LAYERS), PruningPlan(LAYERS, **layers, fitted=fitted):
        popvlm.accelerate(None, model, plan=plan)
        with Counting() as counting:
            handle = model.model.register_forward_pre_hook(lambda *_, counting=counting: counting.counts.clear())
            model(**batch, logits_to_keep=1)
            handle.remove()
        inside.append(counting.counts)
    for name in SYNCHRONISING:
        assert inside[0].get(name, 0) == inside[1].get(name, 0), name


@pytest.mark.parametrize("family", FAMILIES)
def test_no_second_pass_over_the_weights(make, family):
    model = make(family)
    batch = prompt(model, samples_for(family))
    popvlm.accelerate(None, model, ratio=0.5)
    rows = []
    handles = [layer.mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
               for layer in text_model(model).layers]
    model(**batch, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    assert rows == [batch["input_ids"].shape[1]] * 3 + [1] * 3
