"""Importance profiles against finite differences, exact Fisher information and the model's own sampling."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import save_file
from test_gates import SHORT, double, float64, parts_for, scaled_branches
from transformers import GenerationConfig

import popvlm
from models import FAMILIES, IMAGE, LAYERS, VIDEO, VISUAL, build, is_qwen, prompt, text_model
from popvlm.decoders import family_of
from popvlm.importance import ImportanceProfile, ProfileError, plot, profile
from popvlm.plan import Fingerprint, PruningPlan

TENSORS = "gradients", "indices", "positions", "losses"


@contextmanager
def watched(model):
    """Records each answer that the model writes, and the logits that it wrote it by."""
    answers, generate = [], model.generate

    def watching(**call):
        output = generate(**call, return_dict_in_generate=True, output_logits=True, output_scores=True)
        wanted = torch.cat(output.logits).clone()
        wanted[:, list(family_of(model).visual_token_ids(model.config))] = -torch.inf  # nothing stands behind them
        assert torch.equal(torch.cat(output.scores), wanted), "it samples from something else"
        answers.append((output.sequences[:, call["input_ids"].shape[1]:], torch.cat(output.logits)))
        return output.sequences

    model.generate = watching
    try:
        yield answers
    finally:
        del model.generate


def answer_loss(model, batch, answer):
    """The answer's negative log-likelihood from all logits of prompt and whole answer."""
    call = batch | {"input_ids": torch.cat([batch["input_ids"], answer], 1)}
    for name, fill in ("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0):
        if name in call:
            call[name] = torch.cat([call[name], torch.full_like(answer, fill)], 1)
    logits = model(**call, use_cache=False).logits[0, -answer.shape[1] - 1:-1]
    return -logits.log_softmax(-1)[torch.arange(answer.shape[1]), answer[0]].sum()


def groups_of(batch, written):
    """`[3, P + written]`: the visual, text and answer positions, told apart one by one."""
    ids = batch["input_ids"][0].tolist()
    groups = torch.zeros(3, len(ids) + written, dtype=torch.float64)
    for position in range(len(ids) + written):
        if position >= len(ids) - 1:
            groups[2, position] = 1
        else:
            groups[0 if ids[position] in (IMAGE, VIDEO) else 1, position] = 1
    return groups


def equal(ours, theirs):
    return all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in TENSORS)


def drawn(count=4, layers=LAYERS, seed=0, first=0, **fingerprint):
    """A profile of random numbers."""
    draw = torch.Generator().manual_seed(first)
    mark = Fingerprint(**(dict(family="llama", num_layers=layers, hidden_size=64, num_key_value_heads=2, head_dim=16)
                          | fingerprint))
    return ImportanceProfile(mark, seed, 8, torch.randn(count, 3, layers, 2, generator=draw, dtype=torch.float64),
                             torch.arange(first, first + count), torch.tensor([[3, 5, 8]] * count),
                             torch.rand(count, generator=draw, dtype=torch.float64))


@pytest.mark.parametrize(("family", "images"), [(family, images) for family in FAMILIES for images in (True, False)
                                                if family in VISUAL or not images])
def test_finite_differences_of_the_loss(family, images):
    with float64():
        check_finite_differences(family, images)


def check_finite_differences(family, images):
    model = double(family)
    batch = prompt(model, [parts_for(family) if images else [12]])
    with watched(model) as answers:
        got = profile(model, [batch], max_new_tokens=4)
    (answer, _), = answers
    groups = groups_of(batch, 4)
    assert got.positions.tolist() == [[*groups[:2].sum(1).tolist(), 4]]
    assert (got.gradients[0, :2, -1] == 0).all()
    assert (got.gradients[0, 0] == 0).all() == (not images)
    assert got.gradients[0, 1:, :-1].abs().min() > 1e-5
    torch.testing.assert_close(got.losses[0], answer_loss(model, batch, answer))
    step = 1e-4
    for group in range(3):
        for layer in 1, LAYERS - 1:
            for branch in range(2):
                losses = []
                for sign in 1, -1:
                    factors = torch.ones(LAYERS, 2, *groups[:1].shape, dtype=torch.float64)
                    factors[layer, branch] += sign * step * groups[group]
                    with scaled_branches(model, factors):
                        losses.append(answer_loss(model, batch, answer))
                want = (losses[0] - losses[1]) / (2 * step)
                torch.testing.assert_close(got.gradients[0, group, layer, branch], want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_what_generate_wrote_by(family):
    """With a cache, step by step: images of two sizes, none, a video, and after each other in one model."""
    model = build(family)
    kinds = [parts_for(family), [7]] + ([[2, (2, 2, 3), 3, (2, 2), 4]] if is_qwen(model) else [])
    samples = [prompt(model, [parts], seed=seed) for seed, parts in enumerate([*kinds, *kinds])]
    with watched(model) as answers:
        got = profile(model, samples, max_new_tokens=6)
    assert len({tuple(answer[0].tolist()) for answer, _ in answers}) == len(samples)
    for loss, (answer, logits) in zip(got.losses, answers):
        want = -logits.double().log_softmax(-1)[torch.arange(6), answer[0]].sum()
        torch.testing.assert_close(loss, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", SHORT)
def test_the_model_is_run_as_it_is_whatever_is_set_on_it(family):
    model = build(family)
    samples = [prompt(model, [parts_for(family)], seed=seed) for seed in range(3)]
    want = profile(model, samples, max_new_tokens=5)
    popvlm.accelerate(None, model, ratio=0.5)
    for layer in text_model(model).layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    text_model(model).layers[2].eval()
    settings = GenerationConfig(do_sample=False, temperature=0.1, top_k=1, repetition_penalty=5.0, pad_token_id=0,
                                no_repeat_ngram_size=1, suppress_tokens=list(range(20, 299)), num_beams=2,
                                cache_implementation="static")
    model.generation_config = settings
    modes = [module.training for module in model.modules()]
    torch.manual_seed(123)
    random_state = torch.get_rng_state()
    with torch.inference_mode():
        got = profile(model, samples, max_new_tokens=5)
    assert equal(got, want)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.generation_config is settings
    assert modes == [module.training for module in model.modules()]
    assert popvlm.plan_of(model) is not None


def test_an_answer_ends_at_its_end_token():
    model = build("llama")
    model.generation_config.eos_token_id = list(range(100, 250))
    samples = [prompt(model, [[9]], seed=seed) for seed in range(6)]
    with watched(model) as answers:
        got = profile(model, samples, max_new_tokens=6)
    lengths = [answer.shape[1] for answer, _ in answers]
    assert 1 in lengths
    assert len(set(lengths)) > 1
    assert got.positions[:, 2].tolist() == lengths
    for batch, loss, (answer, _) in zip(samples, got.losses, answers):
        torch.testing.assert_close(loss, answer_loss(model, batch, answer).double(), rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def one_token():
    """A prompt whose answers are one token long, and so can be counted: the model's distribution of them `[V]`, and the
    gradient vector of each, `[V, 3, L, 2]`, by finite differences.
    """
    model = double("qwen3_vl")
    batch = prompt(model, [[3, (2, 2), 4]])
    groups, step = groups_of(batch, 0), 1e-4

    def logs(change):
        with torch.no_grad(), scaled_branches(model, 1 + change), float64():
            return model(**batch, use_cache=False).logits[0, -1].log_softmax(-1)

    def slope(group, layer, branch):
        change = torch.zeros(LAYERS, 2, *batch["input_ids"].shape, dtype=torch.float64)
        change[layer, branch] = step * groups[group]
        return (logs(-change) - logs(change)) / (2 * step)

    vectors = torch.stack([slope(group, layer, branch) for group in range(3) for layer in range(LAYERS)
                           for branch in range(2)], 1).unflatten(1, (3, LAYERS, 2))
    return model, batch, logs, logs(torch.zeros(LAYERS, 2, 1, 1)), vectors


def test_the_mean_square_is_the_fisher_information(one_token):
    model, batch, _, full, vectors = one_token
    with float64():
        got = profile(model, [batch] * 40, max_new_tokens=1)
    assert torch.cdist(got.gradients.flatten(1), vectors.flatten(1)).min(1).values.max() < 1e-5
    # Each sample's vector is one of these, so their means are the truth to within their own error.
    exact = torch.einsum("v,vgl->gl", full.exp(), vectors.sum(3).square())
    for group, stage in enumerate(("visual", "text", "decode")):
        error = got.gradients[:, group].sum(2).square().std(0) / len(got) ** 0.5
        assert ((got.importance(stage) - exact[group]).abs() <= 5 * error).all(), stage
    error = got.gradients.std(0) / len(got) ** 0.5
    assert (got.gradients.mean(0).abs() <= 5 * error).all(), "the expected score of a model's own answers is zero"
    entropy = -(full.exp() * full).sum()
    assert abs(got.losses.mean() - entropy) < 4 * got.losses.std() / len(got) ** 0.5


@pytest.mark.parametrize(("visual", "text"), [({0}, set()), ({0, 1, 2, 3, 4}, {2, 3}), (set(), {1, 3, 4})])
def test_the_removal_cost_is_the_divergence_to_second_order(one_token, visual, text):
    _, batch, logs, full, vectors = one_token
    # As if samples had every answer there is, as often as the model writes it.
    weights = (full.exp() * len(full)).sqrt()[:, None, None, None]
    got = replace(drawn(), gradients=weights * vectors)
    step, change = 1e-3, torch.zeros(LAYERS, 2, *batch["input_ids"].shape, dtype=torch.float64)
    for group, layers in enumerate((visual, text)):
        for layer in layers:
            change[layer] -= step * groups_of(batch, 0)[group]
    want = (full.exp() * (full - logs(change))).sum() / step ** 2
    assert got.removal_cost(visual, text) == pytest.approx(want.item(), rel=0.01)


def test_scores_equal_loops():
    got = drawn()
    groups = {"visual": [0], "text": [1], "prefill": [0, 1], "decode": [2]}
    for stage, members in groups.items():
        fisher = torch.zeros(LAYERS, LAYERS, dtype=torch.float64)
        for sample in got.gradients:
            for row in range(LAYERS):
                for column in range(LAYERS):
                    fisher[row, column] += sample[members, row].sum() * sample[members, column].sum() / len(got)
        torch.testing.assert_close(got.fisher(stage), fisher)
        torch.testing.assert_close(got.importance(stage), fisher.diagonal())
    cost = sum((sample[0, 1].sum() + sample[0, 5].sum() + sample[1, 5].sum()) ** 2 for sample in got.gradients) / 8
    assert got.removal_cost({1, 5}, {5}) == pytest.approx(cost.item())
    assert got.removal_cost(range(2), range(2)) == pytest.approx(got.fisher("prefill")[:2, :2].sum().item() / 2)
    assert got.removal_cost() == 0
    plan = PruningPlan(LAYERS, {1, 5}, {5})
    assert got.removal_cost(plan.visual, plan.text) == got.removal_cost({1, 5}, {5})
    with pytest.raises(ProfileError, match="no layer 6"):
        got.removal_cost({6})


def test_broken_off_and_gone_on_with_equals_unbroken(tmp_path):
    model = build("llama")
    batches = [prompt(model, [[9]], seed=seed) for seed in range(5)]
    seen, calls = [], []

    class Samples(list):
        def __getitem__(self, index):
            seen.append(index)
            if index == 3 and len(seen) == 4:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    whole, parts = tmp_path / "whole.safetensors", tmp_path / "new" / "parts.safetensors"
    want = profile(model, batches, path=whole, max_new_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        profile(model, Samples(batches), path=parts, max_new_tokens=3)
    assert len(ImportanceProfile.load(parts)) == 3
    got = profile(model, Samples(batches), path=parts, max_new_tokens=3,
                  progress=lambda loop: calls.append(loop) or loop)
    assert seen == [0, 1, 2, 3, 3, 4], "what was done is not read again"
    assert calls == [range(5)]
    assert equal(got, want)
    assert whole.read_bytes() == parts.read_bytes()
    assert [path.name for path in parts.parent.iterdir()] == ["parts.safetensors"]
    assert equal(profile(model, batches, path=parts, max_new_tokens=3), want)
    assert equal(profile(model, batches, max_new_tokens=3), want)
    assert not equal(profile(model, batches, max_new_tokens=3, seed=1), want)


def test_processes_that_share_the_work(tmp_path):
    model = build("llama")
    samples = [prompt(model, [[9]], seed=seed) for seed in range(5)]
    want = profile(model, samples, max_new_tokens=3)
    shares = [profile(model, samples, max_new_tokens=3, indices=range(rank, 5, 2)) for rank in range(2)]
    for order in shares, shares[::-1]:
        ImportanceProfile.merge(order).save(tmp_path / "merged.safetensors")
        merged = ImportanceProfile.load(tmp_path / "merged.safetensors")
        assert equal(merged, want)
        assert (merged.fingerprint, merged.seed, merged.max_new_tokens) == (want.fingerprint, 0, 3)
        assert repr(merged) == repr(want)
    with pytest.raises(ProfileError, match="sample 0 is in more than one profile"):
        ImportanceProfile.merge([*shares, shares[0]])
    with pytest.raises(ProfileError, match="no profile to merge"):
        ImportanceProfile.merge([])
    with pytest.raises(ProfileError, match="seed=0, not 1"):
        ImportanceProfile.merge([drawn(), drawn(seed=1, first=4)])
    with pytest.raises(ProfileError, match="max_new_tokens=8, not 9"):
        ImportanceProfile.merge([drawn(), replace(drawn(first=4), max_new_tokens=9)])
    with pytest.raises(ProfileError, match="hidden_size 64, not 65"):
        ImportanceProfile.merge([drawn(), drawn(first=4, hidden_size=65)])
    named = [drawn(first=first, checkpoint=name) for first, name in ((0, "b"), (4, "a"))]
    assert {ImportanceProfile.merge(order).fingerprint.checkpoint for order in (named, named[::-1])} == {"a"}


def test_what_cannot_be_read_is_told(tmp_path):
    path = tmp_path / "profile.safetensors"
    with pytest.raises(ProfileError, match="there is no profile at"):
        ImportanceProfile.load(path)
    drawn().save(path)
    good = path.read_bytes()
    assert equal(ImportanceProfile.load(path), drawn())
    for bad in good[:-9], good[:20], b"", good[:-1] + bytes([good[-1] ^ 1]):
        path.write_bytes(bad)
        with pytest.raises(ProfileError, match="is damaged"):
            ImportanceProfile.load(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ProfileError, match="no importance profile"):
        ImportanceProfile.load(path)
    path.write_bytes(good)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = json.loads(file.metadata()["popvlm_importance"])
    save_file(tensors, path, {"popvlm_importance": json.dumps(record | {"format": 2})})
    with pytest.raises(ProfileError, match="upgrade popvlm"):
        ImportanceProfile.load(path)
    with pytest.raises(ProfileError, match="is a folder"):
        drawn().save(tmp_path)


def test_a_profile_of_something_else_is_not_gone_on_with(tmp_path):
    model, path = build("llama"), tmp_path / "profile.safetensors"
    samples = [prompt(model, [[9]])]
    profile(model, samples, path=path, max_new_tokens=2)
    kept = path.read_bytes()
    with pytest.raises(ProfileError, match="another model"):
        profile(build("qwen3"), samples, path=path, max_new_tokens=2)
    with pytest.raises(ProfileError, match="seed=0, not 1"):
        profile(model, samples, path=path, max_new_tokens=2, seed=1)
    with pytest.raises(ProfileError, match="max_new_tokens=2, not 3"):
        profile(model, samples, path=path, max_new_tokens=3)
    assert path.read_bytes() == kept


def test_bad_samples_are_told(tmp_path):
    model, path = build("qwen3_vl"), tmp_path / "profile.safetensors"
    good = prompt(model, [[5]])

    def run(*samples, **options):
        return profile(model, samples, max_new_tokens=2, **options)

    with pytest.raises(ProfileError, match="no samples"):
        run()
    with pytest.raises(ProfileError, match="no samples"):
        run(good, indices=[])
    with pytest.raises(ProfileError, match="no sample 1"):
        run(good, indices=[1])
    with pytest.raises(ProfileError, match=r"sample 1 has input_ids \[2, 10\], not one prompt"):
        run(good, prompt(model, [[9], [9]]), path=path)
    assert ImportanceProfile.load(path).indices.tolist() == [0]
    with pytest.raises(ProfileError, match="sample 0 has input_ids NoneType"):
        run({"inputs_embeds": torch.ones(1, 2, 64)})
    with pytest.raises(ProfileError, match="sample 0 is padded"):
        run({name: value[:1] for name, value in prompt(model, [[5], [9]]).items()})
    with pytest.raises(ProfileError, match="sample 0 has position_ids"):
        run(good | {"position_ids": torch.arange(6)[None]})
    assert len(run(good, good, indices=[1])) == 1


@pytest.mark.parametrize("where", ["head", "answer"])
def test_what_is_no_number_names_the_sample(where, tmp_path):
    """In the prompt's own logits, or in the loss alone."""
    model, path = build("llama"), tmp_path / "profile.safetensors"
    samples = [prompt(model, [[5]], seed=seed) for seed in range(3)]
    samples[1]["input_ids"][0, 3] = 299
    if where == "head":
        model.model.embed_tokens.weight[299] = torch.nan
    else:
        forward = model.forward

        def broken(**call):
            output = forward(**call)
            if 299 in call["input_ids"] and not call.get("use_cache", True):
                output.logits = output.logits * torch.inf
            return output

        model.forward = broken
    with pytest.raises(ProfileError, match="sample 1's logits are not all finite numbers"):
        profile(model, samples, max_new_tokens=2, path=path)
    assert ImportanceProfile.load(path).indices.tolist() == [0]
    if where == "head":
        assert profile(model, samples, max_new_tokens=2, path=path, indices=[0, 2]).indices.tolist() == [0, 2]


@pytest.mark.parametrize("wrapper", ["lora", "parallel"])
def test_what_wraps_a_model_is_looked_through(wrapper):
    model = build("llama")
    samples = [prompt(model, [[9]])]
    want = profile(model, samples, max_new_tokens=2)
    if wrapper == "lora":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # which starts as nothing
    else:
        model = torch.nn.DataParallel(model)
    torch.testing.assert_close(profile(model, samples, max_new_tokens=2).gradients, want.gradients)
    with pytest.raises(popvlm.UnsupportedModel, match="does not know Linear"):
        profile(torch.nn.Linear(2, 2), samples)


@pytest.mark.parametrize("images", [True, False])
def test_the_plot_shows_the_scores(images, tmp_path):
    got = drawn()
    got.gradients[:, :2, -1] = 0
    if not images:
        got.positions[:, 0] = 0
        got.gradients[:, 0] = 0
    figure = plot(got)
    assert isinstance(figure, Figure)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    lines = {line.get_label(): torch.tensor(line.get_ydata()) for line in axes.lines}
    assert len(lines) == (4 if images else 2)
    torch.testing.assert_close(lines["decode: answer"], got.importance("decode"))
    assert lines["prefill: context"].isnan().tolist() == [False] * (LAYERS - 1) + [True]
    torch.testing.assert_close(lines["prefill: context"][:-1], got.importance("prefill")[:-1])
    if images:
        torch.testing.assert_close(lines["visual context"][:-1], got.importance("visual")[:-1])
        torch.testing.assert_close(lines["text context"][:-1], got.importance("text")[:-1])
    figure.savefig(tmp_path / "plot.png")
