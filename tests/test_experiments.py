"""The experiments on calibration, at their smallest: that each runs, and that what it finds can be true."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from popvlm import PruningPlan, embedded
from popvlm.fitting import Moments

sys.path.insert(0, str(Path(__file__).parents[1] / "calibration"))

import experiments

MODEL = "tiny-qwen3-vl"


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "RESULTS", tmp_path)
    return tmp_path


def depth():
    return json.loads((embedded.HERE / MODEL / "config.json").read_text())["text_config"]["num_hidden_layers"]


def record(results, name):
    return json.loads((results / f"{name}_{MODEL}.json").read_text())


@pytest.mark.slow
def test_predicted(results):
    experiments.predicted(MODEL, plans=8, prompts=6, held=3, fits=2)
    found = record(results, "predicted")
    assert len(found["plans"]) == 8
    assert sum("fitted_kl" in row for row in found["plans"]) == 2
    assert all(len(row) == 2 and all(-1 <= one <= 1 for one in row) for row in found["spearman"].values())
    assert all(row["joint"] > 0 and row["own_kl"] >= 0 for row in found["plans"])
    assert {path.suffix for path in results.iterdir()} == {".json", ".png", ".safetensors"}


@pytest.mark.slow
def test_frontier(results):
    experiments.frontier(MODEL, prompts=6, held=4, tails="1,16", ratios="0.5")
    full, *rows = record(results, "frontier")["rows"]
    assert full["setting"] == "full"
    assert [(row["setting"], row["tail"]) for row in rows] == [
        ("all, own", 1), ("all, own", 16), ("all, fitted", 1), ("all, fitted", 16), ("visual only, own", 1),
        ("visual only, fitted", 1)]
    assert rows[0]["speedup_limit"] > rows[1]["speedup_limit"] > 1


@pytest.mark.slow
def test_travel(results):
    experiments.travel(MODEL, prompts=10, held=3, kinds="easy,text")
    rows = record(results, "travel")["rows"]
    assert list(rows) == ["own", "easy", "text (text positions only)", "mix", "mix, ridge 0.01", "mix, ridge 0.1"]
    assert all(set(row) == {"easy", "text"} for row in rows.values())


@pytest.mark.slow
def test_enough(results):
    experiments.enough(MODEL, most=16, held=3)
    found = record(results, "enough")
    assert [row["prompts"] for row in found["rows"]] == [8, 16]
    assert {len(row["gates"]["layers"]) for row in found["rows"]} == {len(PruningPlan.last(depth(), 1 / 3).text)}


@pytest.mark.slow
def test_expense(capsys):
    experiments.expense(MODEL, prompts=5, part="fit")
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


@pytest.mark.slow
def test_smaller(results):
    experiments.smaller(MODEL, prompts=6, held=3, ranks="2,1000")
    rows = record(results, "smaller")["rows"]
    assert list(rows) == ["own", "own, scaled and shifted", "own, corrected with rank 2", "fitted"]
    numbers = [row["numbers"] for row in rows.values()]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0


def test_lighter_fits_are_the_best_of_their_kind():
    """They find what the keys and values were made of, and no other of their size comes nearer."""
    torch.manual_seed(0)
    width, outputs = 20, 12
    states = torch.randn(4000, width, dtype=torch.float64) @ torch.randn(width, width, dtype=torch.float64)
    ahead = torch.nn.functional.pad(states, (0, 1), value=1.0)
    own = torch.randn(width + 1, outputs, dtype=torch.float64)
    low = torch.randn(width + 1, 3, dtype=torch.float64) @ torch.randn(3, outputs, dtype=torch.float64)
    for true, label, worse in ((own * torch.linspace(0.5, 2, outputs), "own, scaled and shifted",
                                "own, corrected with rank 3"),
                               (own + low, "own, corrected with rank 3", "own, corrected with rank 2")):
        moments = Moments.zeros((0,), width, outputs)
        moments.update(states, ahead @ true)
        full = moments.solve(1e-12)
        made = experiments.lighter(own, full, moments, (2, 3))
        assert moments.error(made[label][0]).max() < 1e-8
        assert moments.error(made[worse][0]).min() > 1e-3
        best = moments.error(made["own, corrected with rank 2"][0]).sum()
        for _ in range(20):
            other = torch.linalg.qr(torch.randn(outputs, 2, dtype=torch.float64)).Q
            assert moments.error(own + (full - own) @ other @ other.T).sum() > best
