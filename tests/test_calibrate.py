"""A plan for a model: calibrated, cached, published, resumed, shared by processes, and by the command."""

from __future__ import annotations

import copy
import json
import multiprocessing

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from PIL import Image
from test_samples import tokenizer as spelling
from typer.testing import CliRunner

import popvlm
import random_qwen3_vl
from models import LAYERS, build
from popvlm import PlanError, PruningPlan, calibrate, fitting
from popvlm.calibrate import automatic, known
from popvlm.decoders import identity
from popvlm.importance import ImportanceProfile
from popvlm.samples import SampleError
from popvlm.selection import Budget

TEXTS = [f"a line of text, number {number} of {number * 7}" for number in range(16)]
LOOSE = Budget(divergence=0.05, agreement=0)


def tokenizer():
    """A token a byte, and what a text-only model takes: transformers 4 would add token types."""
    made = spelling(None, {})
    made.model_input_names = ["input_ids", "attention_mask"]
    return made


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("POPVLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "ANSWER", 3)
    return tmp_path / "cache"


@pytest.fixture
def count(monkeypatch):
    """How often a fit was asked for."""
    calls = []
    real = fitting.fit
    monkeypatch.setattr("popvlm.selection.fit", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    return calls


def test_the_plan_of_a_calibration_carries_its_figures(make):
    model = make("llama")
    found = calibrate.calibrate(tokenizer(), model, TEXTS, budget=LOOSE, gates=True)
    assert found.choice.met
    assert found.plan.fingerprint.family == "llama"
    assert f"KL {found.choice.best.kl:.4f}" in found.plan.source
    assert len(found.profile) == len(TEXTS)
    record = json.loads(json.dumps(found.record()))
    assert record["met"]
    assert record["best"] in record["trials"]
    assert record["samples"]["all"]["prompts"] == 16
    assert record["samples"]["all"]["visual_share"] == 0
    assert popvlm.plan_of(model) is None


def test_the_first_call_calibrates_and_the_next_finds_it(make, count, cache, capsys):
    model, words = make("llama"), tokenizer()
    popvlm.accelerate(words, model, divergence=0.05, calibration=TEXTS)
    made = popvlm.plan_of(model)
    assert "calibrated now and kept in" in capsys.readouterr().err
    assert made.kv == "fitted"
    fits = len(count)
    assert fits
    popvlm.accelerate(words, model, divergence=0.05, calibration=TEXTS)
    assert len(count) == fits
    assert f"cached in {cache}" in capsys.readouterr().err
    assert popvlm.plan_of(model) == made
    popvlm.accelerate(words, model, divergence=0.05, calibration=TEXTS[::-1])  # other samples
    assert len(count) > fits
    fits = len(count)
    popvlm.accelerate(words, model, divergence=0.06, calibration=TEXTS)  # another budget
    assert len(count) > fits
    fits = len(count)
    for file in cache.rglob("plan.json"):
        file.write_text("{")
    popvlm.accelerate(words, model, divergence=0.05, calibration=TEXTS)
    assert len(count) > fits, "a damaged plan is made again"
    assert popvlm.plan_of(model) == made


def test_auto_without_a_processor(make, monkeypatch, tmp_path):
    model = make("llama")
    with pytest.raises(PlanError, match="takes its processor; give it, or plan='last-third'"):
        popvlm.accelerate(None, model)
    assert popvlm.plan_of(model) is None
    plan = PruningPlan.last(LAYERS, 0.5)
    monkeypatch.setattr(calibrate, "PUBLISHED", tmp_path)
    plan.save(tmp_path / f"some-llama.{identity(model)}.json")
    assert known(model) == (plan, "published with popvlm for some-llama")
    popvlm.accelerate(None, model)
    assert popvlm.plan_of(model) == plan
    assert known(model, LOOSE) is None, "it was published for the default budget"


def test_the_built_in_mix_is_the_default(make, monkeypatch):
    monkeypatch.setattr(calibrate, "PROMPTS", 8)
    model = make("llama")
    plan, said = automatic(tokenizer(), model, budget=Budget(ratio=0.5), kv="own")
    assert plan == PruningPlan(LAYERS, text=PruningPlan.last(LAYERS, 0.5).text)
    assert "calibrated now" in said


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_identity_of_an_offloaded_model(family, tmp_path):
    model = build(family)
    name = identity(model)
    assert identity(cpu_offload(copy.deepcopy(model), "cpu")) == name
    assert identity(disk_offload(model, tmp_path, "cpu")) == name
    assert all(weight.device.type == "meta" for weight in model.parameters())


def test_identity_tells_models_apart_and_not_their_dtype():
    model = build("llama")
    name = identity(model)
    assert name == identity(build("llama")) == identity(build("llama").to(torch.bfloat16))
    assert name != identity(build("llama", seed=1))
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.02)
    assert name != identity(model)


def test_an_interrupted_calibration_goes_on(make, count, monkeypatch):
    """The second call fits nothing anew that the first had fitted, and ends with the same plan."""
    model, words = make("llama"), tokenizer()
    want = calibrate.calibrate(words, model, TEXTS, budget=LOOSE).plan
    updates, real = [], fitting.Moments.update

    def update(self, x, y):
        updates.append(1)
        if len(updates) == 30:
            raise KeyboardInterrupt
        real(self, x, y)

    monkeypatch.setattr(fitting, "SAVE_SECONDS", 0)
    monkeypatch.setattr(fitting.Moments, "update", update)
    with pytest.raises(KeyboardInterrupt):
        automatic(words, model, TEXTS, budget=LOOSE)
    assert popvlm.plan_of(model) is None
    before = len(updates)
    plan, _ = automatic(words, model, TEXTS, budget=LOOSE)
    assert plan == want
    fresh = []
    monkeypatch.setattr(fitting.Moments, "update", lambda self, x, y: fresh.append(1) or real(self, x, y))
    calibrate.calibrate(words, model, TEXTS, budget=LOOSE)
    assert len(updates) - before < len(fresh), "what was gathered was not gathered again"


def _share(rank, folder, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with torch.no_grad():
        found = calibrate.calibrate(tokenizer(), build("llama"), TEXTS, budget=Budget(ratio=0.5), gates=True)
    plan = found.plan
    results.put((rank, sorted(plan.text), plan.source, found.profile.indices.tolist(),
                 {name: tensor.tolist() for name, tensor in plan.fitted.items()}))
    torch.distributed.destroy_process_group()


def test_two_processes_find_one_plan(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_share, args=(rank, tmp_path, results)) for rank in range(2)]
    for process in processes:
        process.start()
    one, other = (results.get(timeout=400)[1:] for _ in processes)
    for process in processes:
        process.join()
    assert one == other
    assert one[2] == list(range(16))


# ---- the command


def run(*arguments):
    from popvlm.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers", minversion="5.0")
    path = tmp_path_factory.mktemp("model")
    ours = random_qwen3_vl.processor()
    ours.save_pretrained(path)
    random_qwen3_vl.model(ours.tokenizer.get_vocab(), layers=4).save_pretrained(path)
    for number in range(9):
        Image.new("RGB", (64 + 20 * number, 70), (25 * number, 90, 120)).save(path / f"photo{number}.png")
    return path


def test_the_command_writes_a_plan_and_a_report(folder, tmp_path):
    out = tmp_path / "out"
    got = run("calibrate", "-m", folder, "--data", folder, "--ratio", "0.5", "-o", out, "--json", "--gates")
    assert got.exit_code == 0, got.output
    record = json.loads(got.stdout)
    assert record["samples"]["all"]["prompts"] == 9
    assert record["samples"]["all"]["visual_share"] > 0
    assert record["plan"]["kv"] == "fitted"
    plan = PruningPlan.load(out / "plan.json")
    assert sorted(plan.visual) == record["plan"]["visual"]
    assert len(ImportanceProfile.load(out / "profile.safetensors")) == 9
    page = (out / "report.html").read_text()
    assert page.count("<img") == 2
    assert page.count("<tr") >= len(record["trials"]) + 3
    assert "http" not in page.replace("http://www.w3.org", ""), "the page needs no network"
    asked = run("ask", folder / "photo1.png", "what?", "-m", folder, "--plan", out / "plan.json", "--json",
                "--max-new-tokens", 2)
    assert json.loads(asked.stdout)["plan"]["visual"] == record["plan"]["visual"]


@pytest.mark.parametrize(("arguments", "says"), [
    (["--ratio", "0.5", "--speedup", "2"], "give one of ratio, speedup and divergence"),
    (["--data", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    (["--speedup", "0.2"], "is no budget"),
])
def test_bad_input_is_a_sentence(folder, tmp_path, arguments, says):
    got = run("calibrate", "-m", folder, "-o", tmp_path / "out", *arguments)
    assert got.exit_code == 2
    assert says in got.stderr
    assert got.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_without_images(folder, tmp_path):
    got = run("calibrate", "-m", folder, "--data", tmp_path)
    assert got.exit_code == 2
    assert "has no image" in got.stderr


def test_samples_without_what_is_asked_for(make):
    with pytest.raises(SampleError, match="takes none; give text-only samples"):
        calibrate.calibrate(tokenizer(), make("llama"),
                            [{"question": "?", "image": Image.new("RGB", (9, 9))}] * 8)
    with pytest.raises(SampleError, match="there are no samples"):
        calibrate.calibrate(tokenizer(), make("llama"), [])
