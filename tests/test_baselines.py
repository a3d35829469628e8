"""ShortGPT's choice of layers and DART's choice of visual tokens, against their rules written out plainly."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from baselines import block_influence, removed
from dart import dart, kept, matching

from models import IMAGE, prompt, sample, text_model
from popvlm import cost
from popvlm.plan import PruningPlan

pytest.importorskip("transformers", minversion="5.0")  # dart.py hooks into how it hands masks and positions down
FAMILIES = ["qwen3_vl", "gemma3"]
SAMPLES = [[3, (3, 4), 9], [5, (2, 3), 4, (2, 2), 6], [12]]


def answer(model, batch, **options):
    """The tokens `[B, A]` and the logits of each `[B, A, V]`: a random model may write one token for ever."""
    made = model.generate(**batch, max_new_tokens=5, do_sample=False, return_dict_in_generate=True,
                          output_logits=True, **options)
    return made.sequences[:, batch["input_ids"].shape[1]:], torch.stack(made.logits, 1)


def same(ours, theirs):
    return (ours[0] == theirs[0]).all() and torch.allclose(ours[1], theirs[1], atol=1e-3)


def see(states, index, module, args, output):
    states[index] = args[0], output


@pytest.mark.parametrize("family", FAMILIES)
def test_block_influence(family, make):
    model = make(family)
    alone = [sample(prompt(model, SAMPLES), model, SAMPLES, row) for row in range(len(SAMPLES))]
    cosines = [[] for _ in text_model(model).layers]
    for call in alone:
        states = {}
        hooks = [layer.register_forward_hook(partial(see, states, index))
                 for index, layer in enumerate(text_model(model).layers)]
        model(**call)
        for hook in hooks:
            hook.remove()
        for layer, (before, after) in states.items():
            for old, new in zip(before[0], (after[0] if isinstance(after, tuple) else after)[0]):
                cosines[layer].append(float(old @ new / old.norm() / new.norm()))
    want = torch.tensor([1 - sum(each) / len(each) for each in cosines])
    assert torch.allclose(block_influence(model, alone).float(), want, atol=1e-5)
    layer = text_model(model).layers[2]
    layer.forward = lambda hidden, **kwargs: hidden  # a layer that does nothing is the first to go
    try:
        assert block_influence(model, alone).argmin() == 2
    finally:
        del layer.forward


def test_the_rule():
    draw = torch.Generator().manual_seed(0)
    visual, text = torch.randn(40, 8, generator=draw), torch.randn(7, 8, generator=draw)
    for count in 1, 3, 8, 20, 39, 40:
        stays = kept(visual, text, count)
        assert stays.sum() == count
        norms = visual.abs().sum(-1)
        assert stays[norms.topk(min(4, count)).indices].all()
    # Sixteen of forty: 4 pivots, and 12 over 8 pivots: 2, 2, 2, 2, then 1, 1, 1, 1.
    chosen = visual.abs().sum(-1).topk(4).indices.tolist()
    pivots = [visual[index] for index in chosen] + [text[index] for index in text.abs().sum(-1).topk(4).indices]
    for pivot, many in zip(pivots, (2, 2, 2, 2, 1, 1, 1, 1)):
        like = {index: float(torch.cosine_similarity(visual[index], pivot, 0)) for index in range(40)
                if index not in chosen}
        chosen += sorted(like, key=like.get)[:many]
    assert kept(visual, text, 16).nonzero()[:, 0].tolist() == sorted(chosen)
    assert kept(visual, text[:0], 9).sum() == 9


def test_duplicates_go_first():
    one, other = torch.tensor([3.0, 0, 0]), torch.tensor([0, 2.0, 0])
    visual = torch.stack([one] * 10 + [other, torch.tensor([0, 0, 1.0])])
    assert kept(visual, torch.empty(0, 3), 6)[10:].all()


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_all_is_the_full_model(family, make):
    model = make(family)
    batch = prompt(model, SAMPLES)
    full = answer(model, batch)
    with dart(model, 1):
        assert same(answer(model, batch), full)
    with dart(model, 0.4):
        assert not same(answer(model, batch), full)
    assert same(answer(model, batch), full)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_others_are_as_if_masked_out(family, make):
    """The slow way to the same: the whole prompt, with the tokens that go hidden from everyone in every layer."""
    model = make(family)
    batch = prompt(model, SAMPLES)
    seen, states = {}, {}
    text = text_model(model)
    hook = text.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(embeds=kwargs["inputs_embeds"]), with_kwargs=True)
    model(**batch, logits_to_keep=1)
    hook.remove()
    visual = batch["input_ids"] == IMAGE
    hidden = torch.zeros_like(visual)
    for row, where in enumerate(visual):
        if where.any():
            after = torch.arange(len(where)) > where.nonzero().max()
            hidden[row, where] = ~kept(seen["embeds"][row, where], seen["embeds"][row, after],
                                       max(1, round(0.5 * int(where.sum()))))

    def mask(module, args, kwargs):
        states["mask"] = kwargs["attention_mask"]
        if kwargs["attention_mask"] is None:
            length = hidden.shape[1]
            kwargs["attention_mask"] = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        keep = ~hidden[:, None, None, :] | torch.eye(hidden.shape[1], dtype=torch.bool)
        return args, kwargs | {"attention_mask": kwargs["attention_mask"].expand(len(hidden), -1, -1, -1) & keep}

    hooks = [layer.register_forward_pre_hook(mask, with_kwargs=True) for layer in text.layers]
    want = model(**batch, logits_to_keep=1).logits[:, -1]
    for hook in hooks:
        hook.remove()
    assert hidden.any()
    with dart(model, 0.5):
        got = model(**batch, logits_to_keep=1).logits[:, -1]
    assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_answers_as_its_samples_do(family, make):
    model = make(family)
    batch = prompt(model, SAMPLES)
    with dart(model, 0.5):
        together = answer(model, batch)
        for row in range(len(SAMPLES)):
            alone = answer(model, sample(batch, model, SAMPLES, row))
            assert same([part[row:row + 1] for part in together], alone)


def test_matched_speed(make):
    config = make("qwen3_vl").config
    plan = PruningPlan.last(config.text_config.num_hidden_layers, 1 / 3)
    share = matching(config, plan, 200, 30)

    def flops(plan, visual):
        found = cost.prefill_flops(config, plan, visual, 30)
        return found.total - found.vision

    wanted, one = flops(plan, 200), flops(None, 1) - flops(None, 0)
    assert 0 <= wanted - flops(None, round(share * 200)) <= 2 * one
    assert matching(config, PruningPlan(plan.num_layers), 200, 30) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_its_first_layers_decodes_as_it_reads(family, make):
    """The first layer of each kind is the one whose cache transformers asks for lengths."""
    model = make(family)
    batch = prompt(model, SAMPLES)
    with removed(model, [0, 2, 3]):
        cached, read = (answer(model, batch, use_cache=use, suppress_tokens=[IMAGE]) for use in (True, False))
    assert same(cached, read)
