"""PruningPlan: what it takes, its file, and what it says of bad ones."""

from __future__ import annotations

import json

import pytest
import torch

from models import LAYERS, build, fitted_for
from popvlm import PlanError, PruningPlan
from popvlm.plan import Fingerprint


@pytest.mark.parametrize(("layers", "ratio", "skipped"), [
    (28, 1 / 3, 9), (36, 1 / 3, 12), (32, 0.25, 8), (18, 0.33, 6), (18, 0.5, 9), (18, 0.61, 11), (30, 0.2, 6),
    (12, 0, 0), (12, 0.01, 0), (12, 0.99, 11), (1, 0.9, 0)])
def test_last(layers, ratio, skipped):
    plan = PruningPlan.last(layers, ratio)
    assert plan.visual == plan.text == frozenset(range(layers - skipped, layers))


def test_equal_hashed_and_frozen():
    plan = PruningPlan(8, visual={5, 6, 7}, text={7})
    assert plan == PruningPlan(8, [7, 6, 5], (7,), fingerprint=Fingerprint("llama", 8, 1, 1, 1), source="elsewhere")
    assert hash(plan) == hash(PruningPlan(8, range(5, 8), {7}))
    assert plan != PruningPlan(8, {5, 6, 7}, {7}, tail=2)
    assert plan != PruningPlan(8, {5, 6, 7}, {6, 7})
    assert plan != "a plan"
    assert PruningPlan.from_layers(8, [3, 1]) == PruningPlan(8, {1, 3}, {1, 3})
    assert PruningPlan.lossless(8) == PruningPlan(8, {7}, {7})
    with pytest.raises(AttributeError):
        plan.tail = 3
    assert plan.skips(7) == {"visual", "text"}
    assert plan.skips(5) == {"visual"}
    assert plan.skips(0) == frozenset()


@pytest.mark.parametrize(("plan", "text"), [
    (PruningPlan.last(36, 1 / 3), "PruningPlan(36 layers: context skips 24-35 (33 %); own KV; tail 1)"),
    (PruningPlan(28, {9, 11, 12}, set(), 64),
     "PruningPlan(28 layers: visual skips 9,11-12 (11 %), text skips none; own KV; tail 64)"),
    (PruningPlan(4), "PruningPlan(4 layers: context skips none; own KV; tail 1)")])
def test_a_person_can_read_it(plan, text):
    assert repr(plan) == text


@pytest.mark.parametrize(("make", "says"), [
    (lambda: PruningPlan.last(12, 1), "ratio is 1; give the share"),
    (lambda: PruningPlan.last(12, -0.1), "ratio is -0.1"),
    (lambda: PruningPlan.last(12, float("nan")), "ratio is nan"),
    (lambda: PruningPlan.last(12, True), "ratio is True"),
    (lambda: PruningPlan.last(12, "a third"), "ratio is 'a third'"),
    (lambda: PruningPlan(0), "num_layers is 0"),
    (lambda: PruningPlan(12.5), "num_layers is 12.5"),
    (lambda: PruningPlan(12, visual={12}), r"visual names layers \[12\], and the model has layers 0 to 11"),
    (lambda: PruningPlan(12, text={-1}), r"text names layers \[-1\]"),
    (lambda: PruningPlan(12, text={1.5}), "text has 1.5, which is no layer index"),
    (lambda: PruningPlan(12, fingerprint="x"), "fingerprint is 'x'; give a Fingerprint"),
    (lambda: PruningPlan(12, fitted=3), "fitted is a int; give a mapping"),
    (lambda: PruningPlan(12, {3}, fitted={"visual.3.weight": "x", "visual.3.bias": "y"}), "must be tensors"),
    (lambda: PruningPlan(12, {3}, fitted={"visual.3.weight": torch.full((4, 8), torch.nan),
                                          "visual.3.bias": torch.zeros(4)}), "no finite numbers; fit it again"),
    (lambda: PruningPlan(12, {3}, fitted={"visual.3.weight": torch.zeros(5, 8), "visual.3.bias": torch.zeros(5)}),
     r"must be \[2GK, D\]"),
    (lambda: PruningPlan(12, fitted={"text.1.bias": torch.zeros(4)}), "have text.1.bias, and no such position skips"),
    (lambda: PruningPlan(12, text={True}), "no layer index"),
    (lambda: PruningPlan(12, visual=3), "visual is 3; give a set"),
    (lambda: PruningPlan.from_layers(12, [40]), r"layers names layers \[40\]"),
    (lambda: PruningPlan(12, tail=0), "tail is 0"),
    (lambda: PruningPlan(12, tail=2.0), "tail is 2.0"),
    (lambda: PruningPlan(12, {3}, fitted={}), "no visual.3.weight; fit that layer too"),
    (lambda: PruningPlan(12, {3}, fitted={"visual.3.weight": torch.zeros(4, 8), "visual.3.bias": torch.zeros(5)}),
     r"they must be \[2GK, D\] and \[2GK\]")])
def test_a_bad_plan_is_told_in_a_sentence(make, says):
    with pytest.raises(PlanError, match=says) as told:
        make()
    assert "\n" not in str(told.value)


def plans():
    model = build("llama")
    return {"own": PruningPlan(LAYERS, {3, 4, 5}, {5}, 16, fingerprint=Fingerprint("llama", 6, 64, 2, 16, "a/b"),
                               source="tests"),
            "fitted": PruningPlan(LAYERS, {3, 5}, {5}, fitted=fitted_for(model, {3, 5}, {5}))}


@pytest.mark.parametrize("kv", ["own", "fitted"])
def test_saved_and_loaded(tmp_path, kv):
    plan = plans()[kv]
    plan.save(tmp_path / "deep" / "plan.json")
    again = PruningPlan.load(str(tmp_path / "deep" / "plan.json"))
    assert again == plan
    assert (again.fingerprint, again.source, again.kv) == (plan.fingerprint, plan.source, kv)
    names = {path.name for path in (tmp_path / "deep").iterdir()}
    assert names == ({"plan.json"} if kv == "own" else {"plan.json", "plan.json.safetensors"})
    other = PruningPlan(LAYERS, {3, 5}, {5}, fitted=fitted_for(None, {3, 5}, {5}, seed=6))
    assert plan != other


def test_saving_half_way_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plans()["own"].save(path)
    kept = path.read_bytes()
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        PruningPlan.last(4, 0.5).save(path)
    assert path.read_bytes() == kept
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]


def damaged(path, record):
    yield "no plan to read", path.unlink
    yield "damaged or not JSON", lambda: path.write_text(path.read_text()[:40])
    yield "damaged or not JSON", lambda: path.write_bytes(b"\xff\xfe\x00")
    yield "no format version", lambda: path.write_text("[1, 2]")
    yield "no format version", lambda: path.write_text('{"layers": 3}')
    yield "plan format 99 and this popvlm reads up to 1; upgrade", lambda: path.write_text(
        json.dumps(record | {"format": 99}))
    yield "damaged plan", lambda: path.write_text(json.dumps({"format": 1, "num_layers": 4}))
    yield "damaged plan", lambda: path.write_text(json.dumps(record | {"fingerprint": {"family": "llama"}}))
    yield "damaged plan", lambda: path.write_text(json.dumps(record | {"fingerprint": 3}))
    yield "names layers", lambda: path.write_text(json.dumps(record | {"visual": [99]}))
    yield "give a set", lambda: path.write_text(json.dumps(record | {"visual": 7}))
    yield "kv is 'other'", lambda: path.write_text(json.dumps(record | {"kv": "other"}))
    tensors = path.with_name("plan.json.safetensors")
    yield "not beside it", tensors.unlink
    yield "damaged or another plan's", lambda: tensors.write_bytes(tensors.read_bytes()[:-8])
    yield "not beside it", lambda: path.write_text(json.dumps(record | {"fitted_file": "../../elsewhere"}))


@pytest.mark.parametrize("case", range(15))
def test_a_bad_file_is_told_in_a_sentence(tmp_path, case):
    path = tmp_path / "plan.json"
    plans()["fitted"].save(path)
    says, damage = list(damaged(path, json.loads(path.read_text())))[case]
    damage()
    with pytest.raises(PlanError, match=says) as told:
        PruningPlan.load(path)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


def test_plans_beside_one_another_keep_their_own_tensors(tmp_path):
    first, second = (PruningPlan(LAYERS, {5}, fitted=fitted_for(None, {5}, set(), seed=seed)) for seed in (1, 2))
    for name in "plan.a", "plan.b", "plan", "plan.safetensors":
        first.save(tmp_path / name)
        second.save(tmp_path / f"{name}2")
        assert PruningPlan.load(tmp_path / name) == first
    first.save(tmp_path / "over.json")
    PruningPlan(LAYERS).save(tmp_path / "over.json")
    assert not (tmp_path / "over.json.safetensors").exists()


def test_a_folder_where_a_file_is_wanted(tmp_path):
    with pytest.raises(PlanError, match=r"is a folder; give the path of a file, such as .*plan\.json"):
        PruningPlan(4).save(tmp_path)
    assert not list(tmp_path.iterdir())
