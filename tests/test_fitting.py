"""Fitted KV projections, against least squares written plainly, the oracle's slow passes, and models made linear."""

from __future__ import annotations

import math
import multiprocessing
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import popvlm
from models import IMAGE, LAYERS, VIDEO, VISUAL, WIDTHS, build, cached, fitted_for, oracle, prompt, text_model
from popvlm import PlanError, PruningPlan, cost, fitting
from popvlm.decoders import fingerprint
from popvlm.fitting import FittingError, Moments, fit
from popvlm.prefill import PrunedLayer

WIDTH = WIDTHS["hidden_size"]
HALF = WIDTHS["num_key_value_heads"] * WIDTHS["head_dim"]
PLANS = {
    "last third": dict(visual={4, 5}, text={4, 5}),
    "visual deeper": dict(visual={1, 3, 4, 5}, text={4, 5}),
    "visual only": dict(visual={3, 4}, text=set()),
    "crossed": dict(visual={1, 4}, text={0, 3, 4}),
    "all": dict(visual=set(range(LAYERS)), text=set(range(LAYERS))),  # image features come between the first of them
}


def prompts(family, count, first=0, batch=1):
    """Samples of `batch` prompts each, all different, of several lengths."""
    def parts(i):
        return [3 + i % 5, (2, 2 + i % 3), 5 + i % 7] if family in VISUAL else [24 + i % 9]
    return [prompt(_model(family), [parts(i * batch + row) for row in range(batch)], seed=first + i)
            for i in range(count)]


def batches(family):
    """Padded ones."""
    parts = [[9, (2, 3), 5, (4, 2), 9], [20], [12, (2, 2), 30]] if family in VISUAL else [[13], [25], [40]]
    return [prompt(_model(family), parts, seed=seed) for seed in range(2)]


_models = {}


def _model(family):
    return _models.setdefault(family, build(family))


@pytest.fixture
def model(request):
    model = _model(request.param)
    yield model
    popvlm.restore(model)


def on(*families):
    return pytest.mark.parametrize(("model", "family"), [(family, family) for family in families], indirect=["model"])


# The closed form


def data(prompts=5, layers=(7, 8, 9), seed=0):
    draw = torch.Generator().manual_seed(seed)
    mix, map = torch.randn(12, 12, generator=draw), torch.randn(12, len(layers) * 6, generator=draw)
    for index in range(prompts):
        x = (torch.randn(300 + 400 * index, 12, generator=draw) + 2) @ mix
        y = x @ map + 3 + torch.randn(len(x), map.shape[1], generator=draw)
        yield x, y


def gathered(pairs, layers=(7, 8, 9)):
    moments = Moments.zeros(layers, 12, 6)
    for x, y in pairs:
        moments.update(x, y)
    return moments


def least_squares(x, y, ridge):
    """Rows of the penalty below those of the data, as ridge regression is."""
    x, y = x.double(), y.double()
    strength = ridge * x.square().sum(0).mean()
    penalty = strength.sqrt() * torch.eye(x.shape[1], dtype=x.dtype)
    rows = torch.cat((nn.functional.pad(x, (0, 1), value=1), nn.functional.pad(penalty, (0, 1))))
    return torch.linalg.lstsq(rows, torch.cat((y, y.new_zeros(x.shape[1], y.shape[1])))).solution


@pytest.mark.parametrize("ridge", [0, 1e-4, 0.1])
def test_the_closed_form_is_least_squares(ridge):
    pairs = list(data())
    x, y = (torch.cat(each) for each in zip(*pairs))
    moments = gathered(pairs)
    assert (moments.count, moments.prompts) == (len(x), 5)
    weights = moments.solve(ridge)
    torch.testing.assert_close(weights, least_squares(x, y, ridge))
    near = torch.randn(13, 18, dtype=torch.double)
    left = y.double() - x.double() @ near[:-1] - near[-1]
    torch.testing.assert_close(moments.solve(ridge, near), near + least_squares(x, left, ridge))
    x, y = (torch.cat(each).double() for each in zip(*data(seed=1)))
    missed = (y - x @ weights[:-1] - weights[-1]).square().sum(0).view(3, 2, 3).sum(-1)
    spread = (y - y.mean(0)).square().sum(0).view(3, 2, 3).sum(-1)
    torch.testing.assert_close(gathered(data(seed=1)).error(weights), missed / spread)


def test_moments_add_up_and_part():
    pairs = list(data())
    whole, half = gathered(pairs), gathered(pairs[:2]) + gathered(pairs[2:])
    for name in "xtx", "xty", "yty":
        torch.testing.assert_close(getattr(half, name), getattr(whole, name), rtol=1e-12, atol=1e-12)
    assert (half.prompts, half.count) == (5, whole.count)
    part = whole.only([9, 7])
    first, _, last = whole.solve(0.01).chunk(3, dim=1)
    torch.testing.assert_close(part.solve(0.01), torch.cat((last, first), 1))
    with pytest.raises(FittingError, match=r"layers \[7, 8, 9\] and of \[9, 7\] have no sum"):
        whole + part
    with pytest.raises(FittingError, match="4 positions do not determine a fit with ridge=0; give more"):
        gathered([(torch.zeros(4, 12), torch.zeros(4, 18))]).solve(0)


# What is gathered, and in what order


def slow(model, batches, visual, text, tail, ridge):
    """Each layer and kind by itself, first to last: the oracle with the fits so far, positions token by token."""
    fits = {}
    for layer in range(LAYERS):
        for kind, layers in ("visual", visual), ("text", text):
            if layer not in layers:
                continue
            xs, ys = [], []
            for batch in batches:
                states, made = [], []
                module = text_model(model).layers[layer]
                handle = module.register_forward_pre_hook(lambda _, args, states=states: states.append(args[0]))
                before = dict(visual={each for each in visual if each < layer},
                              text={each for each in text if each < layer})
                with oracle(model, **before, tail=tail, fitted=fits):
                    model(**batch, logits_to_keep=1)
                handle.remove()
                handles = [projection.register_forward_hook(lambda _, args, output, made=made: made.append(output))
                           for projection in (module.self_attn.k_proj, module.self_attn.v_proj)]
                model(**batch)
                for handle in handles:
                    handle.remove()
                for row, (ids, real) in enumerate(zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist())):
                    columns = [column for column in range(len(ids) - tail)
                               if real[column] and (ids[column] in (IMAGE, VIDEO)) == (kind == "visual")]
                    state = states[0][row, columns]
                    xs.append(state / (state.square().mean(-1, keepdim=True) + 1e-6).sqrt())
                    ys.append(torch.cat([part[row, columns] for part in made], -1))
            x, y, own = torch.cat(xs).double(), torch.cat(ys).double(), own_weights(module)
            weights = least_squares(x, y - x @ own, ridge)  # of what the layer's own projections leave
            weights[:-1] += own
            weights = weights.float()
            fits[f"{kind}.{layer}.weight"], fits[f"{kind}.{layer}.bias"] = weights[:-1].T, weights[-1]
    return fits


def own_weights(layer):
    """Of a scaled state, `[D, 2GK]`: what the layer's own modules make of each axis."""
    axes = torch.eye(WIDTH) * WIDTH ** 0.5  # of root mean square 1
    normed = layer.input_layernorm(axes)
    made = [part(normed) for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    return torch.cat(made, -1).double() / WIDTH ** 0.5


def same(got, want, tolerance=1e-3):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].float(), want[name].float(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("model", "family", "name"), [
    *(("qwen3_vl", "qwen3_vl", name) for name in PLANS), ("gemma3", "gemma3", "visual deeper"),
    ("gemma3", "gemma3", "crossed"), ("llama", "llama", "last third"), ("llama", "llama", "crossed"),
    ("qwen3_vl_moe", "qwen3_vl_moe", "visual deeper")], indirect=["model"])
def test_equals_the_slow_way(model, family, name):
    tail, layers = 3 if name == "last third" else 1, PLANS[name]
    plan, report = fit(model, PruningPlan(LAYERS, **layers, tail=tail), batches(family), ridge=0.03)
    if family not in VISUAL:
        layers = dict(visual=set(), text=layers["text"])
    same(plan.fitted, slow(model, batches(family), **layers, tail=tail, ridge=0.03))
    assert plan == PruningPlan(LAYERS, **layers, tail=tail, fitted=plan.fitted)
    assert plan.fingerprint == fingerprint(model)
    assert plan.source == "given layers, KV fitted on 2 samples"
    assert [(line.kind, line.layer) for line in report] == sorted(
        (kind, layer) for kind in layers for layer in layers[kind])


@on("qwen3_vl")
def test_as_few_passes_as_the_states_allow(model, family):
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        for layers, wanted in ((PLANS["last third"], 2 + 3), (dict(visual={1, 4}, text={1, 4}), 2 + 2 * 3),
                               (dict(visual={2, 3, 4, 5}, text={5}), 2 + 3 + 2 * 3)):
            passes.clear()
            fit(model, PruningPlan(LAYERS, **layers), prompts(family, 3), ridge=0.1)
            assert len(passes) == wanted, layers  # to see the kinds; then one of the full, or both, for each turn
    finally:
        handle.remove()


# What it is good for


def turn(model, layers):
    """Makes the layers change the states by a rotation only: what follows is linear in the scaled state, and only so.

    Attention gives nothing, and the MLP what a rotation adds.
    """
    for layer in (text_model(model).layers[index] for index in layers):
        layer.self_attn.o_proj.weight.zero_()
        if hasattr(layer.self_attn.o_proj, "bias") and layer.self_attn.o_proj.bias is not None:
            layer.self_attn.o_proj.bias.zero_()
        rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q
        layer.mlp = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.mlp.weight.copy_(rotation - torch.eye(WIDTH))
        if hasattr(layer, "pre_feedforward_layernorm"):
            layer.pre_feedforward_layernorm = layer.post_feedforward_layernorm = nn.Identity()
        else:
            layer.post_attention_layernorm = nn.Identity()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
def test_linear_layers_are_recovered(family):
    model = build(family)
    turn(model, (3, 4))
    plan = PruningPlan.from_layers(LAYERS, {3, 4, 5})
    samples, unseen = prompts(family, 5, batch=8), prompts(family, 1, first=99)[0]
    fitted, report = fit(model, plan, samples, ridge=1e-8)
    want = model(**unseen, logits_to_keep=1, use_cache=True)
    popvlm.accelerate(None, model, plan=plan)
    own = model(**unseen, logits_to_keep=1, use_cache=True)
    popvlm.accelerate(None, model, plan=fitted)
    got = model(**unseen, logits_to_keep=1, use_cache=True)
    assert (own.logits - want.logits).abs().max() > 0.1
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(cached(got), cached(want)):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)
    assert all(max(line.fitted_keys, line.fitted_values) < 1e-6 for line in report)
    for line in report:  # at the first layer the own projections are the full model's
        low, high = (-1, 1e-4) if line.layer == 3 else (0.5, 9)
        assert low < line.own_keys < high
        assert low < line.own_values < high


@on("qwen3_vl", "gemma3")
def test_the_report_says_what_each_projection_misses_on_unseen_prompts(model, family):
    plan, samples = PruningPlan.from_layers(LAYERS, {3, 4, 5}), prompts(family, 12)
    _, report = fit(model, plan, samples)
    held = [samples[index] for turn in range(3) if (index := 5 * turn + random.Random(turn).randrange(5)) < 12]
    seen = [sample for sample in samples if not any(sample is each for each in held)]
    layers, states, made = text_model(model).layers, [], []
    chosen = {ridge: fit(model, plan, seen, ridge=ridge)[0].fitted for ridge in {line.ridge for line in report}}
    for line in report:
        made.clear(), states.clear()
        projection = layers[line.layer].self_attn.k_proj
        handles = [layers[3].register_forward_pre_hook(lambda _, args: states.append(args[0])),
                   projection.register_forward_hook(lambda _, args, output: made.append(output))]
        for sample in held:
            model(**sample)
        for handle in handles:
            handle.remove()
        masks = [(sample["input_ids"] == IMAGE) == (line.kind == "visual") for sample in held]
        for mask in masks:
            mask[:, -1] = False
        x, want = (torch.cat([part[mask] for part, mask in zip(parts, masks)]) for parts in (states, made))
        weight, bias = (chosen[line.ridge][f"{line.kind}.{line.layer}.{name}"] for name in ("weight", "bias"))
        fitted = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ weight.T + bias
        own = projection(layers[line.layer].input_layernorm(x))
        spread = (want - want.mean(0)).square().sum()
        for error, got in (line.own_keys, own), (line.fitted_keys, fitted[:, :HALF]):
            assert error == pytest.approx(((got - want).square().sum() / spread).item(), rel=1e-3, abs=1e-4)
        assert line.ridge in fitting.RIDGES
        assert line.positions == sum(int(((sample["input_ids"] == IMAGE) == (line.kind == "visual")).sum())
                                     - (line.kind == "text") for sample in samples)


def divergence(model, plan, full, samples):
    popvlm.accelerate(None, model, plan=plan)
    got = [model(**sample, logits_to_keep=1).logits[:, -1].log_softmax(-1) for sample in samples]
    popvlm.restore(model)
    return sum((want.exp() * (want - log)).sum(-1).mean().item() for want, log in zip(full, got)) / len(samples)


@on("qwen3_vl", "gemma3", "llama")
def test_fitted_is_nearer_to_the_full_model_and_more_data_does_not_hurt(model, family):
    plan, samples = PruningPlan.from_layers(LAYERS, {3, 4, 5}), prompts(family, 20, batch=4)
    unseen = prompts(family, 3, first=900, batch=10)
    full = [model(**sample, logits_to_keep=1).logits[:, -1].log_softmax(-1) for sample in unseen]
    few, many = (fit(model, plan, samples[:count])[0] for count in (5, 20))
    own, of_few, of_many = (divergence(model, each, full, unseen) for each in (plan, few, many))
    assert of_many < own
    assert of_many < 1.05 * of_few


# Kept, continued, spread


class Stop(Exception):
    pass


def stopping(at):
    def progress(indices):
        for index in indices:
            if index == at:
                raise Stop
            yield index
    return progress


def noting(looked):
    return lambda indices: looked.append(indices) or indices


DEEPER = PruningPlan(LAYERS, {2, 3, 4, 5}, {4, 5})


@on("qwen3_vl")
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(model, family, monkeypatch, tmp_path):
    samples = prompts(family, 8)
    whole, report = fit(model, DEEPER, samples)
    monkeypatch.setattr(fitting, "SAVE_SECONDS", 0.0)
    for stop in 2, 5:
        with pytest.raises(Stop):
            fit(model, DEEPER, samples, state=tmp_path, progress=stopping(stop))
    looked = []
    plan, lines = fit(model, DEEPER, samples, state=tmp_path, progress=noting(looked))
    assert plan == whole, "bit for bit"
    assert [line[:4] for line in lines] == [line[:4] for line in report]
    assert [line[4:] for line in lines] == [pytest.approx(line[4:], abs=1e-9) for line in report]
    assert looked == [range(5, 8), range(8)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@on("qwen3_vl")
def test_what_was_gathered_serves_again(model, family, tmp_path):
    samples = prompts(family, 8)
    fit(model, DEEPER, samples[:6], state=tmp_path)
    looked = []

    def fitted(plan, samples, ridge=None):
        looked.clear()
        got = fit(model, plan, samples, ridge=ridge, state=tmp_path, progress=noting(looked))[0]
        assert got == fit(model, plan, samples, ridge=ridge)[0]

    fitted(DEEPER, samples[:6])
    assert looked == [range(6, 6), range(6, 6)]
    # More samples: the images' states are the same, the text's, that reads the fitted keys, are not.
    fitted(DEEPER, samples)
    assert looked == [range(6, 8), range(8)]
    fitted(PruningPlan(LAYERS, {2, 3}), samples, ridge=0.07)
    assert looked == [range(8, 8)]
    fitted(PruningPlan(LAYERS, {2, 3}, {2, 3}), samples)  # text anew, and the images not twice
    assert looked == [range(8)]
    # Another tail or other samples: from the start.
    fitted(replace(DEEPER, tail=3), samples[:5])
    assert looked[0] == range(5)
    fitted(PruningPlan(LAYERS, {2, 3}), samples[1:])
    assert looked[0] == range(7)


@on("llama")
def test_a_damaged_file_is_told(model, family, tmp_path):
    plan, samples = PruningPlan.last(LAYERS, 1 / 3), prompts(family, 6)
    fit(model, plan, samples, state=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    says = r"the moments in .*text\.4\.\w+\.safetensors are damaged .*; delete that file"
    with pytest.raises(FittingError, match=says):
        fit(model, plan, samples, state=tmp_path)
    path.unlink()
    fit(model, plan, samples, state=tmp_path)
    kept = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "save_file", lambda tensors, path, about: path.write_bytes(b"half") and 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit(model, plan, samples + samples, state=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == kept


def _share(rank, folder, plan, samples, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with torch.no_grad():
        results.put((rank, {name: tensor.tolist() for name, tensor in
                            fit(_model("qwen3_vl"), plan, samples[rank::2], ridge=0.03)[0].fitted.items()}))
    torch.distributed.destroy_process_group()


@on("qwen3_vl")
def test_two_processes_find_what_one_finds(model, family, tmp_path):
    samples, context = prompts(family, 6), multiprocessing.get_context("spawn")
    want = fit(model, DEEPER, samples, ridge=0.03)[0].fitted
    results = context.Queue()
    processes = [context.Process(target=_share, args=(rank, tmp_path, DEEPER, samples, results)) for rank in range(2)]
    for process in processes:
        process.start()
    got = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert got[0] == got[1]
    same({name: torch.tensor(value) for name, value in got[0].items()}, want, 1e-4)


@pytest.mark.parametrize("plan", [PruningPlan.last(LAYERS, 0.5), DEEPER, PruningPlan.from_layers(LAYERS, {1, 4})])
def test_the_moments_size_is_stated(make, plan):
    gathered = [each for kind in ("visual", "text") for each in fitting._groups(
        make("qwen3_vl"), popvlm.decoders.family_of(make("qwen3_vl")), replace(plan, fingerprint=fingerprint(
            make("qwen3_vl"))), prompts("qwen3_vl", 1)) if each.kind == kind]
    sizes = [tensor.nbytes for group in gathered for tensor in
             vars(Moments.zeros(group.layers, WIDTH, 2 * HALF)).values() if isinstance(tensor, torch.Tensor)]
    assert cost.moments_bytes(make("qwen3_vl").config, plan) == 2 * sum(sizes)


# Models as they come


@on("llama")
def test_the_model_is_left_as_it_was(model, family):
    samples = prompts(family, 6)
    before = PruningPlan(LAYERS, text={1, 2}, fitted=fitted_for(None, set(), {1, 2}))
    popvlm.accelerate(None, model, plan=before)
    want = model(**samples[0], logits_to_keep=1).logits

    def untouched():
        assert popvlm.plan_of(model) == before
        assert torch.equal(model(**samples[0], logits_to_keep=1).logits, want)
        assert sum(isinstance(value, PrunedLayer) for module in model.modules()
                   for value in vars(module).values()) == 2
        assert not any(module._forward_hooks or module._forward_pre_hooks
                       for layer in model.model.layers for module in layer.modules())

    with_plan = fit(model, PruningPlan.last(LAYERS, 0.5), samples, ridge=0.1)[0]
    untouched()
    with pytest.raises(Stop):
        fit(model, PruningPlan.last(LAYERS, 0.5), samples, ridge=0.1, progress=stopping(2))
    untouched()
    with pytest.raises(FittingError, match="skips no layer of this model"):
        fit(model, PruningPlan(LAYERS, visual={3}), samples)
    untouched()
    with popvlm.full_prefill(model):
        assert fit(model, with_plan, samples, ridge=0.1)[0] == with_plan
        full = model(**samples[0], logits_to_keep=1).logits
    untouched()
    popvlm.restore(model)
    assert torch.equal(model(**samples[0], logits_to_keep=1).logits, full)


@pytest.mark.parametrize("how", ["adapted", "quantized", "offloaded"])
@pytest.mark.parametrize("family", ["qwen3_vl", "llama"])
def test_weights_are_not_read(family, how):
    model, layers = build(family), PLANS["visual deeper"] if family in VISUAL else dict(visual=set(), text={3, 4})
    want = None
    if how == "adapted":
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(target_modules=r".*layers.*(k_proj|v_proj|down_proj)", init_lora_weights=False)
        peft.get_peft_model(model, settings).eval()
    elif how == "quantized":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(text_model(model).layers, quantization.Int8WeightOnlyConfig())
    else:
        want = slow(model, batches(family), **layers, tail=1, ridge=0.03)
        accelerate = pytest.importorskip("accelerate")
        accelerate.cpu_offload(model if family == "llama" else text_model(model),
                               execution_device=torch.device("cpu"))
    if want is None:
        want = slow(model, batches(family), **layers, tail=1, ridge=0.03)
    plan, _ = fit(model, PruningPlan(LAYERS, **layers), batches(family) * 3, ridge=0.03)
    same(plan.fitted, want)
    _, report = fit(model, plan, prompts(family, 5), ridge=0.03)
    first = min(report, key=lambda line: line.layer)
    assert max(first.own_keys, first.own_values) < 1e-3, "the first layer's state is the full model's"


def test_the_projections_have_the_models_dtype():
    model = build("llama").to(torch.bfloat16)
    plan, report = fit(model, PruningPlan.last(LAYERS, 0.5), prompts("llama", 25))
    assert {tensor.dtype for tensor in plan.fitted.values()} == {torch.bfloat16}
    assert line_of(report, "text", 5).own_keys > line_of(report, "text", 5).fitted_keys
    popvlm.accelerate(None, model, plan=plan)
    assert model(**prompts("llama", 1)[0], logits_to_keep=1).logits.isfinite().all()


def line_of(report, kind, layer):
    return next(line for line in report if (line.kind, line.layer) == (kind, layer))


@on("qwen3_vl")
def test_few_prompts_take_a_ridge_of_their_own(model, family):
    plan, samples = PruningPlan.last(LAYERS, 1 / 3), prompts(family, 3)
    few, report = fit(model, plan, samples)
    assert few == fit(model, plan, samples, ridge=fitting.FEW)[0]
    assert {line.ridge for line in report} == {fitting.FEW}
    assert all(math.isnan(line.fitted_keys) for line in report)


@on("qwen3_vl")
def test_prompts_with_the_same_images_are_held_out_together(model, family, tmp_path):
    """What is fitted on an image must not be measured on it: its states do not depend on the question behind it."""
    samples = [prompt(model, [[3, (2, 3), 4]], seed=index // 3) for index in range(30)]
    for sample in samples[1::3] + samples[2::3]:
        sample["input_ids"][0, -1] += 1  # another question
    for count in 14, 30:  # and so where a run goes on
        fit(model, PruningPlan.last(LAYERS, 1 / 3), samples[:count], state=tmp_path)
    fitted, held = fitting.kept_moments(next(tmp_path.glob("visual.*")))
    assert (fitted.prompts, held.prompts) == (24, 6)


@on("qwen3_vl")
def test_moments_of_other_samples_and_weights_do_not_serve(model, family, tmp_path):
    samples, plan = prompts(family, 8), PruningPlan.last(LAYERS, 1 / 3)
    fit(model, plan, samples, state=tmp_path)
    for others in samples[:3], [samples[0], *prompts(family, 7, first=50)]:
        assert fit(model, plan, others, state=tmp_path, ridge=0.1)[0] == fit(model, plan, others, ridge=0.1)[0]
    other = build(family, seed=1)
    assert fit(other, plan, samples, state=tmp_path)[0] == fit(other, plan, samples)[0]


# What cannot be fitted


@pytest.mark.parametrize(("case", "says"), [
    (dict(samples=[]), "there are no samples; give at least"),
    (dict(samples=iter([])), "samples is a list_iterator, and .* more than once; give a list"),
    (dict(plan=PruningPlan(LAYERS)), "the plan skips no layer of this model"),
    (dict(ridge=-1.0), "ridge is -1.0; give a number from 0 on"),
    (dict(ridge=float("nan")), "ridge is nan"),
    (dict(samples="text"), r"visual positions skip layers \[4, 5\] and no sample has .*; give some with images, or"),
    (dict(plan=PruningPlan.last(LAYERS, 1 / 3, tail=99)), "no sample has visual context positions"),
    (dict(samples="labelled"), "cannot serve these samples pruned .* give samples without labels"),
    (dict(plan=PruningPlan.last(12, 1 / 3)), "for 12 decoder layers and this model has 6"),
    (dict(plan=replace(PruningPlan.last(LAYERS, 0.5), fingerprint=fingerprint(build("llama")))),
     "made for another model")])
def test_what_cannot_be_fitted_is_told_in_a_sentence(make, case, says):
    model, samples = make("qwen3_vl"), prompts("qwen3_vl", 6)
    named = {"text": [prompt(model, [[20]])],
             "labelled": [sample | {"labels": sample["input_ids"]} for sample in samples]}
    case = dict(plan=PruningPlan.last(LAYERS, 1 / 3), samples=samples) | case
    if isinstance(case["samples"], str):
        case["samples"] = named[case["samples"]]
    with pytest.raises((FittingError, PlanError), match=says) as told:
        fit(model, **case)
    assert "\n" not in str(told.value)


def test_numbers_that_overflow_are_told():
    model, samples = build("llama"), prompts("llama", 4)
    model.model.embed_tokens.weight[7] = torch.inf
    samples[2]["input_ids"][0, 5] = 7
    with pytest.raises(FittingError, match=r"sample 2 has states, keys or values .* text positions of layers \[4, 5\]"):
        fit(model, PruningPlan.last(LAYERS, 1 / 3), samples, ridge=0.1)
    with pytest.raises(FittingError, match=r"training mode, .* call model.eval\(\) first"):
        fit(build("llama").train(), PruningPlan.last(LAYERS, 1 / 3), samples)
