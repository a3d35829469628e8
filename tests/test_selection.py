"""The search for a plan against trying every plan."""

from __future__ import annotations

import pytest
import torch

import popvlm
from models import LAYERS, prompt
from popvlm import cost
from popvlm.importance import ProfileError, profile
from popvlm.plan import PruningPlan
from popvlm.quality import Quality, measure, references
from popvlm.selection import Budget, SelectionError, choose, described, split


def prompts(model, images, count=12):
    parts = [[3, (2, 2), (2, 3), 4] if images else [6] for _ in range(count)]
    return [prompt(model, [one], seed=seed) for seed, one in enumerate(parts)]


def pair(plan):
    """The first layers that visual and text positions skip."""
    return min(plan.visual or plan.text), min(plan.text)


def every(model, samples):
    """The divergence and agreement of every plan, measured one by one."""
    held, _ = split(samples)
    known = references(model, held, answer_tokens=2)
    found = {}
    for visual in range(1, LAYERS):
        for text in range(visual, LAYERS):
            plan = PruningPlan(LAYERS, range(visual, LAYERS), range(text, LAYERS))
            found[visual, text] = measure(model, plan, held, known).figures()
    return found


def test_the_fastest_within_a_divergence(make):
    model = make("qwen3_vl")
    samples = prompts(model, images=True)
    table = every(model, samples)
    budget = sorted(figures["mean_kl"] for figures in table.values())[len(table) // 2]
    choice = choose(model, samples, Budget(divergence=budget, agreement=0), kv="own", tails=(1,), answer_tokens=2)
    assert choice.met
    assert choice.best.quality.figures()["mean_kl"] <= budget
    for trial in choice.trials:
        measured = trial.quality.figures()["mean_kl"]
        assert measured == pytest.approx(table[pair(trial.plan)]["mean_kl"], rel=1e-4, abs=1e-6)
        if measured <= budget:
            assert trial.speedup <= choice.best.speedup
    # As deep as visual positions alone may go, found by halving: the one before is too dear, or there is none.
    deepest = min(pair(trial.plan)[0] for trial in choice.trials if trial.quality.figures()["mean_kl"] <= budget)
    assert deepest == 1 or table[deepest - 1, LAYERS - 1]["mean_kl"] > budget
    assert popvlm.plan_of(model) is None


def test_no_loss_allowed_leaves_the_last_layer(make):
    model = make("llama")
    choice = choose(model, prompts(model, images=False), Budget(divergence=1e-9, agreement=1), kv="own", tails=(1,),
                    answer_tokens=2)
    assert choice.met
    assert pair(choice.best.plan) == (LAYERS - 1, LAYERS - 1)


@pytest.mark.parametrize("family", ["qwen3_vl", "llama"])
def test_the_nearest_of_a_speed(make, family):
    model = make(family)
    samples = prompts(model, images=family == "qwen3_vl")
    visual = 10 if family == "qwen3_vl" else 0
    text = samples[0]["input_ids"].shape[1] - visual
    choice = choose(model, samples, Budget(speedup=1.3), kv="own", tails=(1,), answer_tokens=2)
    assert choice.met
    assert len(choice.trials) > (family == "qwen3_vl")
    for trial in choice.trials:
        assert trial.speedup == cost.limit(model.config, trial.plan, visual, text) >= 1.3
        assert trial.quality.figures()["mean_kl"] >= choice.best.quality.figures()["mean_kl"]
    out_of_reach = choose(model, samples, Budget(speedup=50), kv="own", tails=(1,), answer_tokens=2)
    assert not out_of_reach.met
    assert pair(out_of_reach.best.plan) == (1, 1)


def test_fitted_plans_carry_their_figures(make, tmp_path):
    model = make("qwen3_vl")
    samples = prompts(model, images=True, count=24)
    seen = []
    choice = choose(model, samples, Budget(speedup=1.5), tails=(1, 3), answer_tokens=2, state=tmp_path, say=seen.append)
    assert seen == choice.trials
    assert choice.best.plan.kv == "fitted"
    plan = described(choice.best, model)
    assert f"KL {choice.best.quality.figures()['mean_kl']:.4f}" in plan.source
    plan.save(tmp_path / "plan.json")
    popvlm.accelerate(None, model, plan=tmp_path / "plan.json")


def test_a_search_says_how_far_it_is(make):
    model = make("llama")
    told = []
    choice = choose(model, prompts(model, images=False), Budget(), kv="own", answer_tokens=2,
                    track=lambda loop, what: (told.append(what), loop)[1])
    assert told[0] == "answering in full"
    counts = [(int(what.split()[1]), int(what.split()[4].rstrip(":"))) for what in told[1:]]
    assert [number for number, _ in counts] == list(range(1, len(choice.trials) + 1))
    assert all(number <= of for number, of in counts)


def test_longer_tails_are_tried_and_share_a_fit(make):
    model = make("qwen3_vl")
    samples = prompts(model, images=True, count=24)
    choice = choose(model, samples, Budget(divergence=0.002, agreement=0), tails=(1, 4), answer_tokens=2)
    assert {trial.plan.tail for trial in choice.trials} == {1, 4}
    by_layers = {}
    for trial in choice.trials:
        by_layers.setdefault((trial.plan.visual, trial.plan.text), []).append(trial.plan)
    shared = [plans for plans in by_layers.values() if len(plans) > 1]
    assert shared
    for one, other in shared:
        assert one.fitted.keys() == other.fitted.keys()
        assert all(one.fitted[name] is other.fitted[name] for name in one.fitted)


def test_free_sets_by_the_profile(make):
    """With a profile the search also tries the cheapest sets, found here by trying every set of that size."""
    model = make("qwen3_vl")
    samples = prompts(model, images=True)
    scores = profile(model, samples, max_new_tokens=2)
    choice = choose(model, samples, Budget(ratio=0.5), kv="own", tails=(1,), profile=scores, answer_tokens=2)
    suffix, free = choice.trials
    assert suffix.plan.visual == suffix.plan.text == frozenset(range(LAYERS // 2, LAYERS))
    assert len(free.plan.visual) == len(free.plan.text) == LAYERS // 2
    one = min(range(1, LAYERS), key=lambda layer: scores.removal_cost(text={layer}))
    assert one in free.plan.text, "the cheapest layer is in the set that is found one by one"
    assert choice.best.kl == min(suffix.kl, free.kl)
    fast = choose(model, samples, Budget(divergence=1.0, agreement=0), kv="own", tails=(1,), profile=scores,
                  answer_tokens=2)
    for trial in fast.trials:
        assert trial.speedup <= fast.best.speedup or trial.kl > 1.0
        assert trial.speedup == cost.limit(model.config, trial.plan, 10, samples[0]["input_ids"].shape[1] - 10)


def test_refusals(make):
    model = make("llama")
    samples = prompts(model, images=False)
    with pytest.raises(SelectionError, match="not two"):
        Budget(divergence=0.1, speedup=2)
    with pytest.raises(SelectionError, match="not two"):
        Budget(ratio=0.3, speedup=2)
    for impossible in {"speedup": 0.5}, {"ratio": 1.0}, {"divergence": -1}, {"speedup": float("nan")}, {"agreement": 2}:
        with pytest.raises(SelectionError, match="no budget"):
            Budget(**impossible)
    with pytest.raises(SelectionError, match="at least 8"):
        choose(model, samples[:5], Budget())
    with pytest.raises(SelectionError, match="is 0"):
        choose(model, samples, Budget(ratio=0.01), kv="own")
    with pytest.raises(ProfileError, match="another model"):
        other = make("qwen3_vl")
        choose(model, samples, Budget(), profile=profile(other, prompts(other, images=True, count=1), max_new_tokens=1))


def test_the_prompts_held_out():
    """Of every kind as large a share, whatever rhythm the list has; and none whose images were fitted on."""
    def sample(index, image):
        some = {"input_ids": torch.tensor([[index]])}
        return some if image is None else some | {"pixel_values": torch.tensor([float(image)])}

    def sides(images):
        samples = [sample(index, image) for index, image in enumerate(images)]
        found = [[images[int(one["input_ids"])] for one in part] for part in split(samples)]
        assert sum(map(len, found)) == len(images)
        return found

    for rhythm in ([None, 0], [0, None], [None, None, None, 0], [0, None, None, None]):
        held, fitted = sides([None if image is None else index for index, image in enumerate(rhythm * 16)])
        count = 16 * rhythm.count(0) if len(rhythm) == 4 else 16
        assert sum(image is not None for image in held) == count // 4
        assert len(held) == 4 * len(rhythm)
    held, fitted = sides([index // 5 for index in range(60)])  # five questions an image
    assert not set(held) & set(fitted)
    assert len(held) == 15
    assert all(sides([None] * 8 + [0]))
    assert 0 in sides([None] * 8 + [0])[1]
    assert sides([None] * 8 + [0, 1])[0].count(None) == 2


def test_prompts_without_images_leave_visual_positions_alone(make):
    model = make("qwen3_vl")
    choice = choose(model, prompts(model, images=False), Budget(divergence=9, agreement=0), tails=(1,), answer_tokens=2)
    assert choice.met
    assert all(not trial.plan.visual for trial in choice.trials)
    assert len(choice.best.plan.text) == LAYERS - 1


def test_agreement_is_asked_for_to_the_nearest_prompt(make, monkeypatch):
    model = make("llama")
    samples = prompts(model, images=False, count=128)
    made = Quality(*(torch.zeros(32) for _ in range(2)), torch.arange(32) >= 1, torch.arange(32) >= 1)
    monkeypatch.setattr("popvlm.selection.measure", lambda *args, **options: made)
    for agreement, met in (0.98, True), (0.99, False), (1.0, False), (0.95, True):
        choice = choose(model, samples, Budget(divergence=0.01, agreement=agreement), kv="own", tails=(1,),
                        answer_tokens=1)
        assert choice.met is met
