"""A plan on models that other libraries hold, move, change or save."""

from __future__ import annotations

import copy
import pickle
import threading

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

import popvlm
from models import FAMILIES, LAYERS, WINDOW, build, fitted_for, oracle, prompt, text_model
from popvlm import PruningPlan
from popvlm.prefill import PrunedLayer, PrunedModel
from test_exact import MIXED, PLANS, close, samples_for

PLAN = PruningPlan(LAYERS, **PLANS["visual deeper"])


def logits(model, batch):
    return model(**batch, logits_to_keep=1).logits


def traces(model):
    """Every place in the model where something of popvlm is."""
    return [name for name, module in model.named_modules() for value in module.__dict__.values()
            if isinstance(value, (PrunedModel, PrunedLayer))]


def auto(family):
    return AutoModelForImageTextToText if family in ("qwen3_vl", "qwen3_vl_moe", "gemma3") else AutoModelForCausalLM


@pytest.mark.parametrize("family", FAMILIES)
def test_restore_leaves_no_trace(family):
    model = build(family)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    popvlm.accelerate(None, model, ratio=0.5)
    assert traces(model)
    popvlm.accelerate(None, model, plan=PLAN)
    popvlm.restore(model)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        assert all(value is before[name][key] for key, value in module.__dict__.items()), name
    assert popvlm.plan_of(model) is None
    popvlm.restore(model)  # and twice does no harm


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_without_a_trace(family, tmp_path):
    model = build(family)
    model.save_pretrained(tmp_path / "before")
    popvlm.accelerate(None, model, plan=PLAN)
    model.save_pretrained(tmp_path / "after")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes(), name
    again = auto(family).from_pretrained(tmp_path / "after")
    assert popvlm.plan_of(again) is None
    assert not traces(again)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_copies_have_the_plan_and_are_free_of_the_first(family, way, kv):
    model = build(family)
    batch = prompt(model, samples_for(family))
    full = logits(model, batch)
    plan = PruningPlan(LAYERS, {4, 5}, {4, 5}, fitted=fitted_for(model, {4, 5}, {4, 5}) if kv == "fitted" else None)
    popvlm.accelerate(None, model, plan=plan)
    want = logits(model, batch)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert popvlm.plan_of(twin) == plan
    popvlm.restore(model)
    assert torch.equal(logits(model, batch), full)
    assert torch.equal(logits(twin, batch), want)
    with torch.no_grad():  # the copy runs its own weights
        text_model(model).layers[5].mlp.down_proj.weight.zero_()
    assert torch.equal(logits(twin, batch), want)
    popvlm.restore(twin)
    assert torch.equal(logits(twin, batch), full)
    assert not traces(twin)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_offload(family, where, when, kv, tmp_path):
    model = build(family)
    batch = prompt(model, samples_for(family))
    fitted = fitted_for(model, {1, 3, 4, 5}, {4, 5}) if kv == "fitted" else None
    plan = PruningPlan(LAYERS, **PLANS["visual deeper"], fitted=fitted)
    want = logits(popvlm.accelerate(None, model, plan=plan), batch)
    popvlm.restore(model)
    if when == "before":
        popvlm.accelerate(None, model, plan=plan)
    # Vision towers cannot be offloaded module by module: some of their modules read another one's weights.
    part = model if family == "llama" else text_model(model)
    if where == "disk":
        accelerate.disk_offload(part, tmp_path, execution_device=torch.device("cpu"))
    else:
        accelerate.cpu_offload(part, execution_device=torch.device("cpu"))
    if when == "after":
        full = logits(model, batch)
        popvlm.accelerate(None, model, plan=plan)
    torch.testing.assert_close(logits(model, batch), want)
    popvlm.restore(model)
    assert not traces(model)
    if when == "after":
        assert torch.equal(logits(model, batch), full)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_device_map_with_cpu_and_disk(family, tmp_path):
    """As `from_pretrained` puts it there: layers on the processor and on disk."""
    model = build(family)
    batch = prompt(model, samples_for(family))
    want = logits(popvlm.accelerate(None, model, plan=PLAN), batch)
    popvlm.restore(model).save_pretrained(tmp_path / "model")
    inner = "model.language_model"
    places = {"model.visual" if family == "qwen3_vl" else "model.vision_tower": "cpu", f"{inner}.embed_tokens": "cpu",
              f"{inner}.norm": "cpu", f"{inner}.rotary_emb": "cpu", f"{inner}.rotary_emb_local": "cpu",
              "model.multi_modal_projector": "cpu", "lm_head": "cpu"}
    places |= {f"{inner}.layers.{index}": "disk" if index % 2 else "cpu" for index in range(LAYERS)}
    known = {name for name, _ in model.named_modules()}
    loaded = auto(family).from_pretrained(tmp_path / "model", device_map={key: value for key, value in places.items()
                                                                          if key in known},
                                          offload_folder=tmp_path / "offload", attn_implementation="sdpa")
    popvlm.accelerate(None, loaded, plan=PLAN)
    torch.testing.assert_close(logits(loaded, batch), want)
    popvlm.restore(loaded)
    assert not traces(loaded)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_lora(family, when, call):
    peft = pytest.importorskip("peft")
    model = build(family)
    batch = prompt(model, samples_for(family))
    settings = peft.LoraConfig(target_modules=r".*layers.*(q_proj|k_proj|v_proj|down_proj)", init_lora_weights=False)
    if when == "before":
        popvlm.accelerate(None, model, plan=PLAN)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, settings).eval()
    if when == "after":
        assert popvlm.accelerate(None, wrapped, plan=PLAN) is wrapped
    assert popvlm.plan_of(wrapped) == PLAN
    run = logits if call == "forward" else lambda model, batch: model.generate(**batch, max_new_tokens=6,
                                                                               do_sample=False)
    got = run(wrapped, batch)
    with popvlm.full_prefill(wrapped):
        full = run(wrapped, batch)
    popvlm.restore(wrapped)
    assert torch.equal(run(wrapped, batch), full)
    with oracle(wrapped.get_base_model(), **PLANS["visual deeper"]):
        want = run(wrapped, batch)
    close(got, want, 1e-4)
    assert call == "generate" or not torch.equal(got, full)
    assert not traces(wrapped)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
def test_weights_quantized_by_torchao(family):
    quantization = pytest.importorskip("torchao.quantization")
    model = build(family)
    batch = prompt(model, samples_for(family))
    quantization.quantize_(text_model(model).layers, quantization.Int8WeightOnlyConfig())
    with oracle(model, **PLANS["visual deeper"]):
        want = logits(model, batch)
    popvlm.accelerate(None, model, plan=PLAN)
    close(logits(model, batch), want, 1e-3)
    popvlm.accelerate(None, model, plan="lossless")
    got = logits(model, batch)
    popvlm.restore(model)
    close(got, logits(model, batch), 1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_half_precision(family, dtype, kv):
    model = build(family)
    batch = prompt(model, samples_for(family))
    fitted = fitted_for(model, {1, 3, 4, 5}, {4, 5}) if kv == "fitted" else None
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, **PLANS["visual deeper"], fitted=fitted))
    model = model.to(dtype)  # also after a plan is on
    batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    got = logits(model, batch)
    assert got.dtype == dtype
    popvlm.restore(model)
    with oracle(model, **PLANS["visual deeper"], fitted=fitted and {name: part.to(dtype)
                                                                    for name, part in fitted.items()}):
        want = logits(model, batch)
    error = (got - want).float().abs().max() / want.float().abs().max()
    assert error < (0.15 if dtype == torch.bfloat16 else 0.03), error


def test_several_threads_with_plans_of_their_own():
    models = [popvlm.accelerate(None, build("qwen3_vl"), plan=plan)
              for plan in (PruningPlan(LAYERS), PLAN, PruningPlan.last(LAYERS, 0.5), PruningPlan.last(LAYERS, 0.8))]
    batch = prompt(models[0], MIXED)
    wants = [logits(model, batch) for model in models]
    wrong = []

    def run(model, want):
        with torch.no_grad():
            wrong.extend(1 for _ in range(20) if not torch.equal(logits(model, batch), want))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(models, wants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_model_in_two_threads_one_of_them_in_full():
    model = build("llama")
    batch = prompt(model, [[20]])
    full = logits(model, batch)
    popvlm.accelerate(None, model, ratio=0.5)
    pruned = logits(model, batch)
    opened, checked = threading.Event(), threading.Event()
    seen = {}

    def other():
        opened.wait()
        with torch.no_grad():
            seen["other"] = logits(model, batch)
        checked.set()

    def started_inside():
        with torch.no_grad():
            seen["inside"] = logits(model, batch)

    before = threading.Thread(target=other)
    before.start()
    with popvlm.full_prefill(model):
        opened.set()
        checked.wait()
        inside = threading.Thread(target=started_inside)
        inside.start()
        inside.join()
        with popvlm.full_prefill(model):
            pass
        assert torch.equal(logits(model, batch), full)
    before.join()
    assert torch.equal(seen["other"], pruned), "a thread that ran before keeps the plan"
    assert torch.equal(seen["inside"], full), "a thread started inside, as one that streams is, does not"
    assert torch.equal(logits(model, batch), pruned)


def test_full_prefill_ends_with_an_exception():
    model = build("llama")
    popvlm.accelerate(None, model, ratio=0.5)
    pruned = logits(model, prompt(model, [[20]]))
    with pytest.raises(KeyError), popvlm.full_prefill(model):
        raise KeyError
    assert torch.equal(logits(model, prompt(model, [[20]])), pruned)


def test_a_failed_call_leaves_the_next_one_right():
    model = build("llama")
    batch = prompt(model, [[20]])
    popvlm.accelerate(None, model, ratio=0.5)
    want = logits(model, batch)
    handle = text_model(model).layers[4].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, batch)
    handle.remove()
    assert torch.equal(logits(model, batch), want)


@pytest.mark.parametrize("wrap", ["compile", "function"])
def test_a_plan_taken_off_is_off_also_where_the_forward_was_wrapped_since(wrap):
    model = build("llama")
    batch = prompt(model, [[20]])
    full = logits(model, batch)
    popvlm.accelerate(None, model, ratio=0.5)
    inner = model.forward

    def outer(*args, **call):
        return inner(*args, **call)

    model.forward = torch.compile(inner, backend="eager") if wrap == "compile" else outer
    popvlm.restore(model)
    torch.testing.assert_close(logits(model, batch), full)
    for ratio in 0.3, 0.6:
        want = logits(popvlm.accelerate(None, build("llama"), ratio=ratio), batch)
        popvlm.accelerate(None, model, ratio=ratio)
        torch.testing.assert_close(logits(model, batch), want)
        with popvlm.full_prefill(model):
            torch.testing.assert_close(logits(model, batch), full)


def test_through_what_compiles_or_parallelises_the_model():
    model = build("llama")
    batch = prompt(model, [[20]])
    full = logits(model, batch)
    for outer in torch.compile(model, backend="eager"), torch.nn.DataParallel(model):
        assert popvlm.accelerate(None, outer, ratio=0.5) is outer
        assert popvlm.plan_of(outer) == popvlm.plan_of(model) == PruningPlan.last(LAYERS, 0.5)
        with popvlm.full_prefill(outer):
            torch.testing.assert_close(logits(outer, batch), full)
        popvlm.restore(outer)
        assert popvlm.plan_of(model) is None


def test_two_models_that_share_their_layers():
    first = build("llama")
    second = type(first)(first.config).eval()
    second.model, second.lm_head = first.model, first.lm_head
    batch = prompt(first, [[20]])
    full = logits(first, batch)
    plans = PruningPlan.from_layers(LAYERS, {4, 5}), PruningPlan.from_layers(LAYERS, {1, 4})
    wants = []
    for plan in plans:
        wants.append(logits(popvlm.accelerate(None, first, plan=plan), batch))
        popvlm.restore(first)
    for plan, model in zip(plans, (first, second)):
        popvlm.accelerate(None, model, plan=plan)
    assert torch.equal(logits(first, batch), wants[0])
    assert torch.equal(logits(second, batch), wants[1])
    popvlm.restore(first)
    assert torch.equal(logits(first, batch), full)
    assert torch.equal(logits(second, batch), wants[1])
    popvlm.restore(second)
    assert torch.equal(logits(second, batch), full)
    assert not traces(first)


def test_a_plan_replaced_inside_full_prefill_waits_for_its_end():
    model = build("llama")
    batch = prompt(model, [[20]])
    full = logits(model, batch)
    popvlm.accelerate(None, model, ratio=0.5)
    with popvlm.full_prefill(model):
        popvlm.accelerate(None, model, ratio=0.3)
        assert torch.equal(logits(model, batch), full)
    assert not torch.equal(logits(model, batch), full)


def test_fitted_projections_first_used_in_inference_mode():
    model = build("llama")
    batch = prompt(model, [[20]])
    fitted = fitted_for(model, set(), {4, 5})
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, set(), {4, 5}, fitted=fitted))
    model.bfloat16()
    with torch.inference_mode():
        want = logits(model, batch)
    with torch.enable_grad():
        got = logits(model, batch)
        got.sum().backward()
    assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_gradient_checkpointing_runs_in_full(family):
    model = build(family)
    batch = prompt(model, samples_for(family))
    full = logits(model, batch)
    popvlm.accelerate(None, model, ratio=0.5)
    model.gradient_checkpointing_enable()
    model.train()
    with torch.enable_grad(), pytest.warns(UserWarning, match="gradient checkpointing runs each layer twice"):
        got = logits(model, batch)
        got.sum().backward()
    torch.testing.assert_close(got, full)
    pruned = logits(model, batch)  # without gradients there is nothing to checkpoint
    assert not torch.allclose(pruned, full)


def test_an_activated_lora_runs_in_full():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False,
        alora_invocation_tokens=[5, 6])).eval()
    ids = prompt(model.get_base_model(), [[20]])["input_ids"]
    ids[0, -4:-2] = torch.tensor([5, 6])
    full = model(input_ids=ids, logits_to_keep=1).logits
    popvlm.accelerate(None, model, plan="lossless")
    with pytest.warns(UserWarning, match="activated LoRA"):
        assert torch.equal(model(input_ids=ids, logits_to_keep=1).logits, full)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_soft_prompts(family):
    peft = pytest.importorskip("peft")
    inner = build(family)
    batch = prompt(inner, [[20]])
    inner.config.vocab_size = inner.config.get_text_config().vocab_size
    inner.config.hidden_size = inner.config.get_text_config().hidden_size
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, num_layers=LAYERS, token_dim=64,
                                       num_attention_heads=4)
    model = peft.get_peft_model(inner, settings).eval()
    types = torch.zeros(1, 5 + batch["input_ids"].shape[1])
    with oracle(inner, {2, 3, 4, 5}, {5}, types=types):
        want = logits(model, batch)
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, {2, 3, 4, 5}, {5}))
    close(logits(model, batch), want, 1e-4)


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_sliding_layers_make_keys_of_their_window_only(make, family, kv):
    """What no query sees and no cache keeps is not computed; a cache that keeps all gets all."""
    model = make(family)
    batch = prompt(model, [[(2, 2), 3 * WINDOW]] if family == "gemma3" else [[4 * WINDOW]])
    length = batch["input_ids"].shape[1]
    half = frozenset(range(LAYERS // 2, LAYERS))
    fits = fitted_for(model, half, half) if kv == "fitted" else None
    popvlm.accelerate(None, model, plan=PruningPlan(LAYERS, half, half, fitted=fits))
    made = {}
    update = popvlm.prefill.SplicedCache.__init__

    def seen(self, cache, keys, values, active, seen):
        made.setdefault(len(made) + LAYERS // 2, int((keys != 0).any(-1).any(1)[0].sum()))
        update(self, cache, keys, values, active, seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(popvlm.prefill.SplicedCache, "__init__", seen)
        model(**batch, logits_to_keep=1, past_key_values=DynamicCache(config=model.config.get_text_config()))
        kinds = model.config.get_text_config().layer_types
        assert made == {layer: WINDOW - 1 if kinds[layer] == "sliding_attention" else length - 1 for layer in half}
        made.clear()
        model(**batch, logits_to_keep=1, past_key_values=DynamicCache())
        assert set(made.values()) == {length - 1}
