"""Quality of a plan against what `generate` itself gives, full and pruned."""

from __future__ import annotations

import pytest
import torch

import popvlm
from models import FAMILIES, LAYERS, VISUAL, prompt
from popvlm.plan import PlanError, PruningPlan
from popvlm.quality import QualityError, continued, measure, references

TOKENS = 5


def prompts(model, family):
    parts = [[3, (2, 2), 4], [7], [2, (2, 2), 6]] if family in VISUAL else [[6], [9], [4]]
    return [prompt(model, [one], seed=seed) for seed, one in enumerate(parts)]


def generated(model, batch):
    output = model.generate(**batch, max_new_tokens=TOKENS, do_sample=False, output_logits=True,
                            return_dict_in_generate=True)
    return output.sequences[0, batch["input_ids"].shape[1]:], torch.stack(output.logits)[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_is_what_generate_gives(make, family):
    model = make(family)
    samples = prompts(model, family)
    known = references(model, samples, answer_tokens=TOKENS)
    plan = PruningPlan(LAYERS, visual=range(1, LAYERS), text=range(3, LAYERS))
    quality = measure(model, plan, samples, known)
    assert popvlm.plan_of(model) is None
    assert len(quality) == len(samples)
    agree = 0
    for row, batch in enumerate(samples):
        answer, full = generated(model, batch)
        assert known[row].answer.tolist() == answer.tolist()
        popvlm.accelerate(None, model, plan=plan)
        pruned_answer, pruned = generated(model, batch)
        popvlm.restore(model)
        ours, theirs = (logits[0].double().softmax(-1) for logits in (full, pruned))
        divergence = (ours * (ours / theirs).log()).sum().item()
        assert quality.first_kl[row].item() == pytest.approx(divergence, rel=1e-3, abs=1e-5)
        assert quality.first_agrees[row] == (answer[0] == pruned_answer[0])
        assert quality.answer_agrees[row] == torch.equal(answer, pruned_answer)
        agree += int(answer[0] == pruned_answer[0])
        if torch.equal(answer, pruned_answer):  # all tokens were seen under the same past
            ours, theirs = (logits.double().softmax(-1) for logits in (full, pruned))
            apart = (ours * (ours / theirs).log()).sum(-1).mean().item()
            assert quality.answer_kl[row].item() == pytest.approx(apart, rel=1e-3, abs=1e-5)
    figures = quality.figures()
    assert figures["agreement"] == pytest.approx(agree / len(samples))
    assert figures["mean_kl"] == pytest.approx(quality.first_kl.mean().item())
    assert quality.first_kl.max() > 1e-3, "the plan must change something for this test to tell anything"


def test_lossless_is_at_no_distance(make):
    model = make("qwen3_vl")
    samples = prompts(model, "qwen3_vl")
    quality = measure(model, PruningPlan.lossless(LAYERS), samples, references(model, samples, answer_tokens=TOKENS))
    assert quality.first_kl.abs().max() < 1e-6
    assert quality.answer_kl.abs().max() < 1e-6
    assert quality.answer_agrees.all()


def test_leaves_the_plan_that_is_on_the_model(make):
    model = make("llama")
    mine = PruningPlan.last(LAYERS, 0.5)
    popvlm.accelerate(None, model, plan=mine)
    samples = prompts(model, "llama")
    known = references(model, samples, answer_tokens=2)
    popvlm.restore(model)
    assert torch.equal(known[0].log_probs, references(model, samples, answer_tokens=2)[0].log_probs)
    popvlm.accelerate(None, model, plan=mine)
    measure(model, PruningPlan.lossless(LAYERS), samples, known)
    assert popvlm.plan_of(model) == mine


def test_continued_asks_for_every_token_of_the_answer(make):
    model = make("gemma3")
    batch = prompts(model, "gemma3")[0]
    answer, full = generated(model, batch)
    logits = model(**continued(batch, answer), logits_to_keep=len(answer)).logits[0]
    assert torch.allclose(logits, full, atol=1e-4)


def test_refusals(make):
    model = make("llama")
    samples = prompts(model, "llama")
    with pytest.raises(QualityError, match="no prompts"):
        references(model, [])
    known = references(model, samples, answer_tokens=2)
    with pytest.raises(QualityError, match="3 prompts and 2 references"):
        measure(model, PruningPlan.lossless(LAYERS), samples, known[:2])
    with pytest.raises(PlanError, match="for 4 decoder layers"):
        measure(model, PruningPlan.lossless(4), samples, known)
