"""The benchmark: what it times, in which order and beside which limit; never how long anything took."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from models import FAMILIES, IMAGE, LAYERS, VISUAL, config, is_qwen
from popvlm import PruningPlan, benchmark, benchmark_report, cost, embedded, prefill, prompts, shapes
from popvlm.benchmark import BenchmarkError, Run, Setting, _clock, candidates, pairs, peak_bytes, ratio, run, timed
from popvlm.cli import app

PLAN = "50 %, all, own"
SETTING = Setting("llama", None, "float32", None, "cpu", 24, 4, 1, PLAN, False, "", 3, 2, "here")
PIECES = ("preprocessing_s", "vision_s", "prefill_s", "other_s")
TINY = str(embedded.HERE / "tiny-qwen3-vl")


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small random models in place of the published shapes."""
    monkeypatch.setattr(shapes, "config", lambda name, layers: config(name))


def asked(model: Any, *, pixels: bool = True, batch: int = 1) -> prompts.Prompt:
    return prompts.synthetic(model, 25, 9, batch, pixels=pixels)


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["benchmark", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# ---- prompts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_synthetic_prompts_are_what_the_model_takes(make: Any, family: str, pixels: bool, batch: int) -> None:
    model = make(family)
    made = asked(model, pixels=pixels, batch=batch)
    inputs = made.make()
    ids = inputs["input_ids"]
    assert ids.shape == (batch, made.visual + made.text) == (batch, 25)
    assert made.visual == (16 if family in VISUAL else 0) == int((ids[0] == IMAGE).sum())
    assert ("pixel_values" in inputs) is (pixels and family in VISUAL)
    assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape == (batch, 27)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_lengths_that_no_image_has(make: Any, family: str) -> None:
    """Whole images with pixels, the very number without."""
    model = make(family)
    whole, tokens = (prompts.synthetic(model, 13 + 23, 13, 1, pixels=pixels) for pixels in (True, False))
    assert tokens.visual == 23
    assert whole.visual == (24 if family == "gemma3" else 21)
    assert whole.images == (6 if family == "gemma3" else 1)
    model.generate(**whole.make(), max_new_tokens=1)


def test_images_are_not_narrow() -> None:
    for visual in (448, 960, 1984, 8128, 997):
        height, width = prompts._nearest(visual)
        assert height <= width <= 2.1 * height
        assert 0.99 * visual <= height * width <= visual
    assert [prompts._nearest(visual) for visual in (1, 7)] == [(1, 1), (1, 7)]


def test_real_prompts_have_about_the_length_that_was_asked_for() -> None:
    from popvlm import answer

    processor, model = answer.load(answer.find(TINY), device="cpu")
    made = prompts.real(processor, model, prompts.photograph(), 120, 40, 2)
    inputs = made.make()
    assert inputs["input_ids"].shape == (2, made.visual + made.text)
    assert inputs["image_grid_thw"].shape == (2, 3)
    assert made.visual == 80 == int((inputs["input_ids"][0] == model.config.image_token_id).sum())
    assert abs(made.text - 40) <= 2
    model.generate(**inputs, max_new_tokens=1)


# ---- times


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
def test_the_pieces_add_up(make: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that ticks once a look: each piece is the looks between its marks, and all are the whole."""
    model, ticks = make(family), itertools.count()
    monkeypatch.setattr(benchmark, "_clock", lambda device: lambda: float(next(ticks)))
    found = timed(model, asked(model).make, 4)
    vision = 1 if family in VISUAL else 0
    inside = vision and not hasattr(model, "_supports_mm_encoder_outputs")  # transformers 4: in the forward call
    assert (found.preprocessing_s, found.vision_s, found.prefill_s) == (1, vision, 2 if inside else 1)
    first = 3 if family not in VISUAL else 5  # looks between the inputs' and the first token's
    assert found.other_s == first - found.vision_s - found.prefill_s
    assert found.first_token_s == sum(getattr(found, name) for name in PIECES) == 1 + first
    assert (found.first_decode_s, found.tokens_per_s) == (1, 1)


def test_vision_inside_the_forward_call_is_not_prefill(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 4 runs it; 5 runs it before, unless the model cannot be asked to."""
    model, ticks = make("gemma3"), itertools.count()
    if hasattr(model, "_supports_mm_encoder_outputs"):
        monkeypatch.setattr(type(model), "_supports_mm_encoder_outputs", lambda self: False)
    monkeypatch.setattr(benchmark, "_clock", lambda device: lambda: float(next(ticks)))
    found = timed(model, asked(model).make, 2)
    assert (found.vision_s, found.prefill_s, found.first_token_s) == (1, 2, 6)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
def test_real_times_are_times(make: Any, family: str) -> None:
    model = make(family)
    found = timed(model, asked(model, batch=2).make, 3)
    assert all(getattr(found, name) >= 0 for name in (*PIECES, "first_decode_s"))
    assert (found.vision_s > 0) is (family in VISUAL)
    assert found.tokens_per_s > 0
    assert not model._forward_hooks
    assert "get_image_features" not in vars(model.model)


def test_it_writes_as_many_tokens_as_it_says(make: Any) -> None:
    """Also where the model would end sooner."""
    model = make("llama")
    inputs = asked(model).make()
    model.generation_config.eos_token_id = model.generate(**inputs, max_new_tokens=1)[0, -1].item()
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        timed(model, asked(model).make, 5)
    finally:
        handle.remove()
        model.generation_config.eos_token_id = None
    assert len(calls) == 5


def test_cuda_is_waited_for_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"wait for {device}"))
    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: events.append("look")))
    now = _clock(torch.device("cuda:1"))
    now()
    now()
    assert events == ["wait for cuda:1", "look"] * 2
    with pytest.raises(BenchmarkError, match="give --device cpu or cuda"):
        _clock(torch.device("mps"))


def test_full_and_pruned_take_turns_and_the_full_model_is_untouched(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, seen = make("llama"), PruningPlan.last(LAYERS, 0.5), []

    def fake(model: Any, make: Any, new_tokens: int) -> Run:
        on = prefill.pruned(model)
        assert on is not None or "forward" not in vars(model) | vars(model.model.layers[-1])
        seen.append("full" if on is None else "pruned")
        assert on is None or on.plan is plan
        return Run(0, 0, len(seen), 0, 1, 1)

    monkeypatch.setattr(benchmark, "timed", fake)
    runs = pairs(model, plan, dict, rounds=4, new_tokens=2)
    pair = list(zip(seen[::2], seen[1::2]))
    assert pair == [("pruned", "full"), ("full", "pruned")] * 2 + [("pruned", "full")]
    for index, (full, pruned) in enumerate(zip(runs["full"], runs["pruned"], strict=True)):
        assert {full.prefill_s, pruned.prefill_s} == {2 * index + 3, 2 * index + 4}, "the first pair is for warming up"
    assert prefill.pruned(model) is None


def test_ratio_is_of_pairs() -> None:
    """A machine that slows down by half each round changes no pair."""
    assert ratio([2, 4, 8, 16], [1, 2, 4, 8]) == {"median": 2, "low": 2, "high": 2}
    found = ratio([2, 3, 4, 5, 6], [1, 1, 1, 1, 1])
    assert found["low"] < found["median"] == 4 < found["high"]
    assert found == ratio([2, 3, 4, 5, 6], [1, 1, 1, 1, 1])


def test_peak_memory_is_of_the_call(make: Any) -> None:
    model = make("llama")
    held = torch.ones(50_000_000)  # 200 MB that were there before

    def inputs() -> dict[str, Any]:
        for _ in range(2):
            torch.ones(10_000_000)  # 40 MB, twice in turn
        return asked(model).make()

    found = peak_bytes(model, inputs, 2)
    if found is None:
        pytest.skip("not on this system")
    assert 38e6 < found < 70e6
    assert held.sum()


# ---- rows


def load(made: Any) -> Any:
    return lambda dtype, attention: (None, made)


def test_limits_are_the_cost_models(make: Any) -> None:
    model = make("gemma3")
    plans = candidates([0.5], ["visual"], ["fitted"], 8)
    (name,) = plans
    whole = replace(SETTING, length=25, text=9, plan=name, whole=True, batch=2)
    rows = run(load(model), [whole, replace(whole, whole=False)], plans)
    plan = PruningPlan(LAYERS, visual={3, 4, 5})
    for row in rows:
        visual, text, images = (row["prompt"][part] for part in ("visual", "text", "images"))
        assert (visual, text, images) == (16, 9, 4)
        assert row["plan"] == {"visual": [3, 4, 5], "text": [], "tail": 1, "kv": "fitted"}
        assert row["limit"]["prefill"] == cost.limit(model.config, plan, visual, text)
        assert row["reached"] == row["ratio"]["prefill"]["median"] / row["limit"]["prefill"]
        assert row["fitted_bytes"] == cost.fitted_bytes(model.config, plan, 4)
        flops = [cost.prefill_flops(model.config, one, visual, text, batch=2, images=images) for one in (None, plan)]
        assert [row["flops"][side] for side in ("full", "pruned")] == [asdict(one) for one in flops]
    assert rows[0]["limit"]["first_token"] == flops[0].total / flops[1].total
    assert rows[1]["limit"]["first_token"] == rows[1]["limit"]["prefill"]
    assert {row["median"]["full"]["vision_s"] > 0 for row in rows} == {True, False}
    assert [len(row["runs"][side]) for row in rows for side in ("full", "pruned")] == [2] * 4


def test_plans_to_time(make: Any) -> None:
    model, text_only = make("qwen3_vl"), make("llama")
    plans = candidates([0.5, 1 / 3], ["all", "visual", "question"], ["own", "fitted"], 7)
    assert len(plans) == 12
    assert plans["50 %, all, own"](model) == PruningPlan.last(LAYERS, 0.5)
    assert plans["50 %, visual, own"](model) == PruningPlan(LAYERS, visual={3, 4, 5})
    assert plans["33 %, question, own"](model) == PruningPlan.last(LAYERS, 1 / 3, tail=7)
    assert plans["33 %, all, own"](text_only) == PruningPlan(LAYERS, text={4, 5})
    fitted = plans["33 %, all, fitted"](model)
    assert fitted.fitted is not None
    assert len(fitted.fitted) == 8


def test_an_interrupted_run_goes_on(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = make("llama"), tmp_path / "rows" / "kept.jsonl"
    plans = candidates([0.5], ["all"], ["own"], 4)
    settings = [replace(SETTING, length=length) for length in (12, 16, 20)]
    measured: list[int] = []
    real = benchmark._row

    def broken(setting: Setting, *rest: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(setting.length)
        return real(setting, *rest)

    monkeypatch.setattr(benchmark, "_row", broken)
    with pytest.raises(KeyboardInterrupt):
        run(load(model), settings, plans, kept=kept)
    before = kept.read_text()
    assert [json.loads(line)["setting"]["length"] for line in before.splitlines()] == [12, 16]
    monkeypatch.setattr(benchmark, "_row", real)
    rows = run(load(model), settings, plans, kept=kept)
    assert kept.read_text().startswith(before)
    assert [row["setting"]["length"] for row in rows] == [12, 16, 20]
    assert rows == [json.loads(line) for line in kept.read_text().splitlines()]
    # All is there: the model is not even loaded. On another machine nothing is.
    assert run(None, settings, plans, kept=kept) == rows  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        run(None, [replace(settings[0], machine="there")], plans, kept=kept)  # type: ignore[arg-type]
    kept.write_text(before + before[:40])
    with pytest.raises(BenchmarkError, match=r"line 3 of .* is no row of a benchmark; delete that line"):
        run(load(model), settings, plans, kept=kept)


def test_a_model_is_loaded_once_for_each_dtype_and_attention(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def loading(dtype: str, attention: str | None) -> tuple[None, Any]:
        loaded.append((dtype, attention))
        return None, make("llama")

    monkeypatch.setattr(benchmark, "_row", lambda setting, *rest: {"setting": asdict(setting)})
    plans = candidates([0.5, 0.2], ["all"], ["own"], 4)
    settings = [replace(SETTING, dtype=dtype, attention=attention, plan=plan, length=length)
                for dtype in ("float32", "bfloat16") for attention in ("sdpa", "eager") for plan in plans
                for length in (12, 16)]
    assert len(run(loading, settings, plans)) == 16
    assert loaded == list(itertools.product(("float32", "bfloat16"), ("sdpa", "eager")))


def test_what_does_not_fit_is_left_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plans = make("llama"), candidates([0.5], ["all"], ["own"], 4)
    real = benchmark._row

    def short(setting: Setting, *rest: Any) -> Any:
        if setting.length > 12:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(setting, *rest)

    monkeypatch.setattr(benchmark, "_row", short)
    settings = [replace(SETTING, length=length) for length in (16, 12)]
    with pytest.warns(UserWarning, match=f"popvlm: {PLAN}: 16 tokens at batch 1 do not fit into memory; left out"):
        assert [row["setting"]["length"] for row in run(load(model), settings, plans)] == [12]
    with pytest.warns(UserWarning), pytest.raises(BenchmarkError, match="nothing could be measured; take shorter"):  # noqa: PT030
        run(load(model), settings[:1], plans)


def test_a_call_that_would_run_in_full_is_no_row(make: Any) -> None:
    """Where it would say 1.00x: a tail as long as the prompt, flash attention on a plan that it cannot serve."""
    model, plans = make("llama"), candidates([0.5], ["question"], ["own"], 30)
    with pytest.warns(UserWarning, match="runs in full; left out"), pytest.raises(BenchmarkError):
        run(load(model), [replace(SETTING, plan=next(iter(plans)))], plans)


# ---- the command


def test_the_command(small_shapes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--shape", "gemma3", "--length", 25, "--length", 41, "--text", 9, "--ratio", 0.5, "--positions", "all",
                 "--positions", "visual", "--rounds", 2, "--new-tokens", 2, "--dtype", "float32", "--device", "cpu",
                 "--out", tmp_path / "rows.jsonl"]
    result = command(*arguments, "--json", "--plot", tmp_path / "plots" / "speed.svg")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = json.loads(result.stdout)
    assert [(row["setting"]["plan"], row["setting"]["length"]) for row in rows] == [
        (f"50 %, {who}, own", length) for who in ("all", "visual") for length in (25, 41)]
    assert "<svg" in (tmp_path / "plots" / "speed.svg").read_text()
    result = command(*arguments)  # from what was kept
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{rows[0]['limit']['prefill']:.2f}x" in result.stdout
    assert f"{rows[0]['reached']:.0%}" in result.stdout
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 4


def test_the_command_on_a_model_with_its_processor() -> None:
    result = command("--model", TINY, "--length", 100, "--text", 40, "--ratio", 0.5, "--rounds", 2, "--new-tokens", 2,
                     "--device", "cpu", "--image", embedded.HERE / "images" / "easy-1.png", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    (row,) = json.loads(result.stdout)
    assert row["prompt"]["visual"] > 0
    assert row["median"]["full"]["preprocessing_s"] > 0
    assert row["limit"]["first_token"] < row["limit"]["prefill"], "the vision encoder is not pruned"


def test_a_plan_from_a_file(small_shapes: None, tmp_path: Path) -> None:
    PruningPlan.from_layers(LAYERS, {1, 5}).save(tmp_path / "plan.json")
    options = ["--shape", "llama", "--length", 20, "--text", 8, "--rounds", 2, "--new-tokens", 2, "--device", "cpu"]
    (row,) = json.loads(command(*options, "--plan", tmp_path / "plan.json", "--json").stdout)
    assert row["plan"]["text"] == [1, 5]
    PruningPlan.last(36, 0.5).save(tmp_path / "plan.json")
    result = command(*options, "--plan", tmp_path / "plan.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the plan is for 36 decoder layers and this model has 6" in result.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    ([], "give either --model, for a model with its weights, or --shape"),
    (["--shape", "llama-3.1-8b", "--model", "x"], "give either --model"),
    (["--model", "x", "--layers", 3], "--layers cuts a --shape"),
    (["--shape", "nonsense"], "there is no shape 'nonsense'; give one of qwen3-vl-2b"),
    (["--shape", "qwen3-vl-2b", "--layers", 99], "qwen3-vl-2b has 28; give 1 to 28"),
    (["--shape", "qwen3-vl-2b", "--length", 64], "a prompt of 64 tokens has no room for an image beside 64 tokens"),
    (["--shape", "qwen3-vl-2b", "--dtype", "auto"], "a --shape has no weights whose type --dtype auto could take"),
    (["--shape", "qwen3-vl-2b", "--dtype", "int8"], "--dtype is int8; give one of auto, bfloat16"),
    (["--shape", "qwen3-vl-2b", "--positions", "text"], "--positions is text; give one of all, visual, question"),
    (["--shape", "qwen3-vl-2b", "--ratio", 1.5], "ratio is 1.5; give the share of layers"),
    (["--shape", "qwen3-vl-2b", "--plot", "speed.xyz"], "speed.xyz names no format that a plot can be written in"),
    (["--shape", "qwen3-vl-2b", "--plot", "."], ". is a folder"),
    (["--shape", "qwen3-vl-2b", "--image", "x.png"], "--image is for a --model"),
    (["--shape", "qwen3-vl-2b", "--plan", "nowhere.json"], "there is no plan to read at nowhere.json"),
    (["--shape", "qwen3-vl-2b", "--plan", "p.json", "--ratio", 0.5], "--plan says what to prune"),
    (["--model", "nonsense"], "there is no model nonsense"),
])
def test_it_refuses_in_a_sentence(arguments: list[object], says: str) -> None:
    result = command(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("popvlm: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_plot_has_a_panel_for_each_batch_and_a_limit_for_each_plan(make: Any) -> None:
    plans = candidates([0.5], ["all"], ["own"], 4)
    (row,) = run(load(make("llama")), [SETTING], plans)
    figure = benchmark_report.plot([
        row | {"setting": row["setting"] | {"plan": plan, "batch": batch}, "prompt": row["prompt"] | {"text": length}}
        for plan in ("one", "another") for batch in (1, 2) for length in (12, 16)])
    assert [axes.get_title() for axes in figure.axes] == [f"llama, float32, batch {batch}" for batch in (1, 2)]
    for axes in figure.axes:
        assert sum(line.get_linestyle() == "--" and len(line.get_xdata()) == 2 for line in axes.lines) == 2
        names = {text.get_text() for text in axes.get_legend().get_texts()}
        assert names == {"one", "another", "what its FLOPs allow"}


def test_is_qwen_is_what_the_prompts_take_for_one(make: Any) -> None:
    """Prompts tell the families apart by their configs."""
    for family in VISUAL:
        model = make(family)
        assert is_qwen(model) is (prompts._tokens_an_image(model.config) is None)


def test_speed_measures_a_set_and_goes_on(small_shapes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of eval/: each part of a set, at another length if asked for, with both tables and the plot."""
    import speed

    parts = [speed.Part("qwen3_vl", (900,), rounds=2), speed.Part("llama", (900,), (2,), whole=True, rounds=2)]
    monkeypatch.setattr(speed, "SETS", {"few": parts})
    speed.main("few", length=[80], device="cpu", out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "speed_few.jsonl").read_text().splitlines()]
    assert [(row["setting"]["model"], row["setting"]["batch"]) for row in rows] == [
        *[("qwen3_vl", 1)] * 4, *[("llama", 2)] * 4]
    assert {row["setting"]["length"] for row in rows} == {80}
    assert (tmp_path / "speed_few.png").stat().st_size > 5_000
    monkeypatch.setattr(benchmark, "_row", lambda *_: pytest.fail("it was measured"))
    speed.main("few", length=[80], device="cpu", out=tmp_path)
    with pytest.raises(typer.Exit):
        speed.main("many", out=tmp_path)
