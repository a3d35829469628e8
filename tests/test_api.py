"""What a user calls, with good input and bad."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertLMHeadModel, Gemma3TextConfig, T5Config, T5ForConditionalGeneration

import popvlm
from models import IMAGE, LAYERS, build, fitted_for, prompt
from popvlm import PlanError, ProcessorError, PruningPlan, UnsupportedModel


def test_the_calls_of_the_readme(make, tmp_path):
    model = make("qwen3_vl")
    assert popvlm.plan_of(model) is None
    assert popvlm.accelerate(None, model, plan="last-third") is model
    assert popvlm.plan_of(model) == PruningPlan.last(LAYERS, 1 / 3)
    popvlm.accelerate(None, model, ratio=0.5)
    assert popvlm.plan_of(model) == PruningPlan.last(LAYERS, 0.5)
    popvlm.accelerate(None, model, plan="lossless")
    assert popvlm.plan_of(model) == PruningPlan.lossless(LAYERS)
    plan = PruningPlan(LAYERS, visual={2, 3}, text={3}, tail=4)
    popvlm.accelerate(None, model, plan=plan)
    assert popvlm.plan_of(model) == plan
    popvlm.plan_of(model).save(tmp_path / "plan.json")
    for path in tmp_path / "plan.json", str(tmp_path / "plan.json"):
        popvlm.accelerate(None, model, plan="lossless")
        popvlm.accelerate(None, model, plan=path)
        assert popvlm.plan_of(model) == plan
    assert popvlm.restore(model) is model
    assert popvlm.plan_of(model) is None
    with popvlm.full_prefill(model) as same:  # without a plan: nothing to do
        assert same is model


def test_the_plan_in_force_knows_its_model(make, tmp_path):
    model = make("gemma3")
    plan = popvlm.plan_of(popvlm.accelerate(None, model, plan="last-third"))
    assert (plan.fingerprint.family, plan.fingerprint.num_layers, plan.fingerprint.hidden_size) == ("gemma3", 6, 64)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"made for another model .*family gemma3, not llama.; make one"):
        popvlm.accelerate(None, make("llama"), plan=tmp_path / "plan.json")


def processor(image_token_id=None, vocab_size=280):
    tokenizer = SimpleNamespace(vocab_size=vocab_size, decode=str)
    return tokenizer if image_token_id is None else SimpleNamespace(image_token_id=image_token_id, tokenizer=tokenizer)


def test_good_processors(make):
    popvlm.accelerate(processor(IMAGE), make("qwen3_vl"), plan="last-third")
    gemma = make("gemma3")
    popvlm.accelerate(processor(IMAGE), gemma, plan="last-third")
    popvlm.accelerate(processor(gemma.config.boi_token_index), gemma,
                      plan="last-third")  # what transformers 5's Gemma3Processor names
    popvlm.accelerate(processor(), make("llama"), plan="last-third")


BAD = {
    "a plan of another depth": (dict(plan=PruningPlan.last(7, 0.5)), PlanError,
                                "for 7 decoder layers and this model has 6; make one with num_layers=6"),
    "a ratio of 1": (dict(ratio=1), PlanError, "ratio is 1; give"),
    "a ratio below 0": (dict(ratio=-1), PlanError, "ratio is -1; give"),
    "both": (dict(ratio=0.5, plan="lossless"), PlanError, "plan says it all; leave out ratio"),
    "no such file": (dict(plan="nowhere.json"), PlanError, "no plan to read at nowhere.json"),
    "no plan at all": (dict(plan=3), PlanError,
                       "plan is 3; give a PruningPlan, the path of one, 'auto', 'lossless' or"),
    "fits of other widths": (dict(plan=PruningPlan(LAYERS, {5}, fitted={"visual.5.weight": torch.zeros(32, 64),
                                                                        "visual.5.bias": torch.zeros(32)})),
                             PlanError, r"has shape \[32, 64\] and this model needs \[64, 64\]; fit the plan"),
    "another model's processor": (dict(processor=processor(IMAGE + 1)), ProcessorError,
                                  "image token is 291 and the model has 290; load both from the same checkpoint"),
    "a larger vocabulary": (dict(processor=processor(IMAGE, 999)), ProcessorError,
                            "has 999 tokens and the model embeds 300; load both"),
    "a tokenizer alone": (dict(processor=processor()), ProcessorError, "needs its processor, not only a tokenizer"),
    "no processor at all": (dict(processor="Qwen/Qwen3-VL-8B"), ProcessorError, "str is neither a processor nor"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("before", [None, PruningPlan.lossless(LAYERS)])
def test_bad_input_is_told_in_a_sentence_and_the_model_is_as_it_was(make, case, before):
    arguments, error, says = BAD[case]
    model = make("qwen3_vl")
    if before:
        popvlm.accelerate(None, model, plan=before)
    state = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(error, match=says) as told:
        popvlm.accelerate(arguments.get("processor"), model,
                          **{key: value for key, value in arguments.items() if key != "processor"})
    assert "\n" not in str(told.value)
    assert popvlm.plan_of(model) == before
    assert all(module.__dict__ == kept for module, kept in zip(model.modules(), state))


def test_an_image_processor_on_a_text_model(make):
    with pytest.raises(ProcessorError, match="image token is 290 and the model has no image token"):
        popvlm.accelerate(processor(IMAGE), make("llama"))


def small_bert():
    return BertLMHeadModel(BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      intermediate_size=16, is_decoder=True))


def small_t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


@pytest.mark.parametrize(("build_it", "says"), [
    (small_bert, "does not know BertLMHeadModel; it prunes Gemma3ForCausalLM, .*To add a family, add a file"),
    (small_t5, "T5ForConditionalGeneration is an encoder-decoder"),
    (lambda: nn.Linear(2, 2), "does not know Linear"),
    (lambda: build("qwen3_vl").model, "does not know Qwen3VLModel"),
    (lambda: build("llama").model, "does not know LlamaModel")])
def test_models_that_cannot_be_pruned(build_it, says):
    with pytest.raises(UnsupportedModel, match=says):
        popvlm.accelerate(None, build_it())


def test_a_model_that_attends_both_ways():
    model = build("gemma3_text")
    model.config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedModel, match="bidirectional attention"):
        popvlm.accelerate(None, model, plan="last-third")
    assert isinstance(model.config, Gemma3TextConfig)


def test_an_attention_implementation_popvlm_does_not_know_runs_in_full(make, monkeypatch):
    model = make("llama")
    batch = prompt(model, [[20]])
    full = model(**batch, logits_to_keep=1).logits
    popvlm.accelerate(None, model, ratio=0.5)
    assert not torch.equal(model(**batch, logits_to_keep=1).logits, full)
    monkeypatch.setattr(popvlm.prefill, "MASKED", ("eager",))
    with pytest.warns(UserWarning, match="does not know how the attention implementation 'sdpa' masks"):
        assert torch.equal(model(**batch, logits_to_keep=1).logits, full)


def test_generate_still_refuses_arguments_it_does_not_know(make):
    model = make("llama")
    popvlm.accelerate(None, model, plan="last-third")
    with pytest.raises(ValueError, match="no_such_argument"):
        model.generate(input_ids=torch.ones(1, 4, dtype=torch.long), no_such_argument=1, max_new_tokens=1)


def test_fitted_tensors_for_a_kind_that_the_model_has_not(make):
    """A text-only model skips by the text layers; visual ones have nothing to say."""
    model = make("llama")
    batch = prompt(model, [[20]])
    full = model(**batch, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, visual={3, 4}, fitted=fitted_for(model, {3, 4}, set())))
    assert torch.equal(model(**batch, logits_to_keep=1).logits, full)


@pytest.mark.parametrize("wrong", [None, "a name", "inner"])
def test_the_wrong_object_is_told_rather_than_passed_over(make, wrong):
    model = make("qwen3_vl")
    popvlm.accelerate(None, model, plan="last-third")
    thing = model.model if wrong == "inner" else wrong
    for call in popvlm.plan_of, popvlm.restore, lambda thing: popvlm.full_prefill(thing).__enter__():
        with pytest.raises(UnsupportedModel, match="does not know"):
            call(thing)
