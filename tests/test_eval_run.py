"""A whole evaluation on a small trained model: resumed, in two processes, with samples that fail, and its report."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import answers
import evaluate
import pytest
import typer
from answers import AnswerError, Kept, _answered, ask_all, batches
from metrics import Target
from PIL import Image
from tasks import Sample, find, load
from typer.testing import CliRunner

from popvlm import PruningPlan, answer
from popvlm.embedded import demo_questions

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("easy_vqa")

ROOT = Path(__file__).parents[1]
app = typer.Typer()
app.command()(evaluate.main)
QUICK = "--model", "tiny-qwen3-vl", "--tasks", "easy-vqa", "--limit", "8", "--batch", "4", "--device", "cpu"


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def figures(out):
    record = json.loads((out / "report.json").read_text())
    return {name: task["settings"] for name, task in record["tasks"].items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An unbroken run with a plan and two baselines, timed on two prompts."""
    out = tmp_path_factory.mktemp("whole")
    layers = answer.find("tiny-qwen3-vl").fingerprint.num_layers
    PruningPlan.from_layers(layers, {layers - 1, layers - 2}).save(out / "mine.json")
    done(*QUICK, "--out", out, "--plan", out / "mine.json", "--baselines", "removed,dart", "--ratios", "0.8",
         "--time", 2)
    return out


def test_the_record(whole):
    record = json.loads((whole / "report.json").read_text())
    assert list(record["settings"]) == ["full", "mine", "80% removed", "80% dart"]
    task = record["tasks"]["easy-vqa"]
    assert (task["samples"], task["compared"], task["failed"]) == (8, 8, {})
    assert task["tokens"]["prompt"] > task["tokens"]["visual"] > 0
    for name, found in task["settings"].items():
        assert found["low"] <= found["score"] <= found["high"]
        assert ("against full" in found) == (name != "full")
    against = task["settings"]["80% removed"]["against full"]
    assert against["samples"] == 8
    assert against["low"] <= against["difference"] <= against["high"]
    everything = record["timing"][-1]
    assert (everything["prompt tokens"], everything["prompts"]) == ("all", 2)
    assert 0 < everything["vision_share"] < 1
    assert everything["settings"]["full"]["speedup"] == 1
    assert all(found["first_token_s"] > 0 for found in everything["settings"].values())
    assert {"torch", "transformers", "popvlm"} <= set(record["run"]["versions"])
    assert record["run"]["hardware"]["device"].endswith("(cpu)")
    assert (record["run"]["seed"], record["run"]["batch"], record["run"]["processes"]) == (0, 4, 1)


def test_the_page(whole):
    page = (whole / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', page), "it needs nothing else"
    assert "easy-VQA" in page
    assert "too few to tell" in page
    record = json.loads((whole / "report.json").read_text())
    apart = record["tasks"]["easy-vqa"]["disagreements"]
    assert apart, "four fifths of the layers removed change an answer"
    assert page.count("data:image/jpeg") == len(apart)
    assert "data:image/svg" in page
    assert (whole / "plot.png").stat().st_size > 1000


def test_a_broken_off_run_goes_on(whole, tmp_path, monkeypatch):
    asked = []
    real = evaluate.ask_all

    def breaks(model, processor, planned, kept, *rest):
        real(model, processor, planned[:1], kept, *rest)
        raise KeyboardInterrupt

    arguments = *QUICK, "--out", tmp_path, "--baselines", "removed", "--ratios", "0.8", "--time", 0
    monkeypatch.setattr(evaluate, "ask_all", breaks)
    assert run(*arguments).exit_code != 0
    (half,) = (tmp_path / "answers").glob("*.jsonl")
    assert len(half.read_text().splitlines()) == 5
    lines = half.read_bytes().splitlines(keepends=True)
    half.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])  # the power went while a line was written
    monkeypatch.setattr(evaluate, "ask_all", lambda model, processor, planned, *rest: (
        asked.append(len(planned)), real(model, processor, planned, *rest)))
    done(*arguments)
    ours, theirs = figures(tmp_path)["easy-vqa"], figures(whole)["easy-vqa"]
    assert ours["full"] == theirs["full"]
    assert ours["80% removed"] == theirs["80% removed"]
    before = {path: path.read_bytes() for path in (tmp_path / "answers").iterdir()}
    done(*arguments)  # nothing is left to ask
    assert {path: path.read_bytes() for path in (tmp_path / "answers").iterdir()} == before
    result = run(*arguments, "--batch", 2)
    assert result.exit_code == 2
    assert "has answers of another run (another batch); give another --out" in result.output.replace("\n", " ")


@pytest.mark.slow
def test_two_processes_give_the_score_of_one(whole, tmp_path):
    # What accelerate calls --multi_gpu is any number of processes; its --cpu starts one.
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    launch = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, ROOT / "eval" / "evaluate.py", *QUICK,
               "--out", tmp_path, "--baselines", "removed", "--ratios", "0.8", "--time", "0"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert {path.name for path in (tmp_path / "answers").iterdir()} == {
        f"easy-vqa.{setting}.{process}.jsonl" for setting in ("full", "80--removed") for process in (0, 1)}
    assert json.loads((tmp_path / "report.json").read_text())["run"]["processes"] == 2
    ours, theirs = figures(tmp_path)["easy-vqa"], figures(whole)["easy-vqa"]
    assert ours == {name: theirs[name] for name in ours}


def test_a_users_own_file_with_a_damaged_image(tmp_path):
    path, question = demo_questions()[0]
    (tmp_path / "damaged.png").write_bytes(path.read_bytes()[:60])
    (tmp_path / "mine.csv").write_text(
        f"image,question,answers\n{path},{question},yellow\ndamaged.png,{question},red\nnone.png,{question},red\n")
    result = done("--model", "tiny-qwen3-vl", "--tasks", tmp_path / "mine.csv", "--out", tmp_path / "out", "--time", 0,
                  "--device", "cpu", "--plan", "lossless")
    record = json.loads((tmp_path / "out" / "report.json").read_text())["tasks"]["mine"]
    assert (record["samples"], record["compared"], sorted(record["failed"])) == (3, 1, ["1", "2"])
    assert all("an image cannot be read" in error for error in record["failed"].values())
    assert record["settings"]["full"]["score"] == record["settings"]["lossless"]["score"] == 1
    assert "2 failed" in result.output
    assert "2 questions failed" in (tmp_path / "out" / "report.html").read_text()


@pytest.fixture(scope="module")
def loaded():
    processor, model = answer.load(answer.find("tiny-qwen3-vl"), device="cpu")
    processor.tokenizer.padding_side = "left"
    return processor, model


def test_too_little_memory(loaded, monkeypatch):
    """A batch that is too large is asked one by one, an image that is too large is made smaller, and that is told."""
    processor, model = loaded
    samples = load(find("easy-vqa"), 3)
    picture = Image.open(samples[0].images[0]).convert("RGB").resize((512, 512))
    large = Sample("large", (picture,), "what color is it?", Target(("red",)))
    real, sizes = model.generate, []

    def scarce(**call):
        sizes.append((len(call["input_ids"]), call["input_ids"].shape[1]))
        if len(call["input_ids"]) > 1 or call["input_ids"].shape[1] > 200:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return real(**call)

    monkeypatch.setattr(model, "generate", scarce)
    rows = {row["key"]: row for row in _answered(model, processor, [*samples, large], 8)}
    assert all(rows[sample.key]["answer"] for sample in samples)
    assert not any("scale" in rows[sample.key] for sample in samples)
    assert rows["large"]["scale"] == 0.7
    assert sizes[0][0] == 4
    monkeypatch.setattr(model, "generate", lambda **call: (_ for _ in ()).throw(MemoryError()))
    (row,) = _answered(model, processor, [large], 8)
    assert row == {"key": "large", "answer": "", "error": "MemoryError: MemoryError"}


def test_what_failed_is_asked_again(tmp_path, monkeypatch):
    samples = [Sample(str(index), (), "what?", Target(("red",))) for index in range(4)]
    kept = Kept(tmp_path, "task.full", {"run": 1})
    kept.add([{"key": sample.key, "answer": "red"} for sample in samples[:3]])
    kept.add([{"key": "3", "answer": "", "error": "out of memory"}])
    asked = []

    def answered(model, processor, batch, longest):
        asked.append([sample.key for sample in batch])
        return [{"key": sample.key, "answer": "red"} for sample in batch]

    monkeypatch.setattr(answers, "_answered", answered)
    for _ in range(2):
        ask_all(None, None, batches(samples, 2), Kept(tmp_path, "task.full", {"run": 1}), 4)
    assert asked == [["2", "3"]]


def test_batches_are_the_same_for_the_same_samples():
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    samples = [Sample(str(index), ({"bytes": file.getvalue()[:20] if index == 3 else file.getvalue()},),
                      "?" * (7 * index % 5), Target()) for index in range(7)]
    made = batches(samples, 3)
    assert [len(batch) for batch in made] == [3, 3, 1]
    assert sorted(sample.key for batch in made for sample in batch) == sorted(sample.key for sample in samples)
    assert made == batches(samples, 3)


def test_answers_on_disk(tmp_path):
    kept = Kept(tmp_path, "a", {"seed": 1})
    kept.add([{"key": "0", "answer": "\ud800 答え\n"}])
    other = Kept(tmp_path, "a", {"seed": 1}, process=1)
    assert other.rows["0"]["answer"].endswith("答え\n")
    other.add([{"key": "1", "answer": "x"}])
    kept.read()
    assert set(kept.rows) == {"0", "1"}
    with pytest.raises(AnswerError, match=r"another run \(another seed\)"):
        Kept(tmp_path, "a", {"seed": 2})


@pytest.mark.parametrize(("arguments", "error"), [
    (("--tasks", "textvga"), "there is no task 'textvga'"),
    (("--tasks", "easy-vqa,easy-vqa"), "two tasks of one name"),
    (("--tasks", "easy-vqa", "--data", "pope=x"), "--data names pope, which is not in --tasks"),
    (("--tasks", "easy-vqa", "--data", "pope"), "write TASK=PATH"),
    (("--tasks", "easy-vqa", "--baselines", "darts"), "there is no baseline 'darts'; there are pop, pop-fitted"),
    (("--tasks", "easy-vqa", "--ratios", "a third"), "--ratios is 'a third'; give numbers"),
    (("--tasks", "easy-vqa", "--limit", "2", "--plan", "none.json"), "there is no plan to read at none.json"),
    (("--tasks", "easy-vqa", "--model", "no/no/no"), "there is no model no/no/no"),
])
def test_what_cannot_be_done_is_said_in_a_sentence(arguments, error, tmp_path):
    result = run("--model", "tiny-qwen3-vl", "--out", tmp_path, "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert error in " ".join(result.output.split())
