"""The examples run as written, on a model folder with the real processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

import popvlm
import popvlm.embedded
import random_qwen3_vl
from models import oracle

torchvision = pytest.importorskip("torchvision")
ROOT = Path(__file__).parents[1]


def run(script, *arguments):
    done = subprocess.run([sys.executable, ROOT / "examples" / script, *arguments], capture_output=True, text=True,
                          check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers", minversion="5.0")
    path = tmp_path_factory.mktemp("model")
    random_qwen3_vl.write(path)
    return path


def test_ask_an_image():
    said = run("ask_an_image.py", popvlm.embedded.folder("tiny-qwen3-vl"), ROOT / "examples/images/chart.png",
               "Which day sold the most?")
    assert [line.split(":")[0] for line in said.splitlines() if ":" in line] == ["pruned", "full"]


def executed(name, folder):
    """What a notebook prints, and how many pictures it shows, run from top to bottom."""
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    pytest.importorskip("nbclient").NotebookClient(notebook, timeout=300, kernel_name="python3",
                                                   resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.output_type == "stream")
    return said, sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    said, pictures = executed("ask_an_image.ipynb", tmp_path)
    assert said.count("pruned:") == len(popvlm.embedded.demo_questions())
    assert pictures > 1, "a chart is drawn"


@pytest.mark.slow
def test_the_notebook_on_calibration(tmp_path):
    said, pictures = executed("calibrate.ipynb", tmp_path)
    assert said.count("layers skipped") >= 3
    assert "held-out prompts that chose it KL" in said
    assert pictures == 5
    assert (tmp_path / "my_plan" / "plan.json").exists()


@pytest.mark.slow
def test_the_notebook_on_evaluation(tmp_path):
    (tmp_path / "examples").mkdir()
    (tmp_path / "eval").symlink_to(ROOT / "eval")
    said, pictures = executed("evaluate.ipynb", tmp_path / "examples")
    assert said.count("same answers") == 3
    assert pictures == 1
    assert (tmp_path / "examples" / "evaluation" / "report.html").exists()


def conversation(processor, questions):
    chats = [[{"role": "user", "content": [*[{"type": "image"} for _ in images], {"type": "text", "text": text}]}]
             for images, text in questions]
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    images = [image for images, _ in questions for image in images]
    return processor(text=texts, images=images or None, return_tensors="pt", padding=True)


def test_real_prompts_of_several_images_and_none(folder):
    from PIL import Image

    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    chart = Image.open(ROOT / "examples/images/chart.png").convert("RGB")
    batch = conversation(processor, [([chart], "Which day?"), ([], "Hello, are you there?"),
                                     ([chart.resize((1, 3)).resize((300, 70)), chart.convert("L").convert("RGB")],
                                      "Which of the two?")])
    plan = popvlm.PruningPlan(12, visual=set(range(4, 12)), text={10, 11}, tail=8)
    with oracle(model, set(plan.visual), set(plan.text), tail=8,
                visual_ids=(model.config.image_token_id, model.config.video_token_id)):
        want = model.generate(**batch, max_new_tokens=8, do_sample=False)
    popvlm.accelerate(processor, model, plan=plan)
    assert (model.generate(**batch, max_new_tokens=8, do_sample=False) == want).all()


def test_another_models_processor(folder):
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    model.config.image_token_id += 1
    with pytest.raises(popvlm.ProcessorError, match="image token"):
        popvlm.accelerate(processor, model, plan="last-third")
    with pytest.raises(popvlm.ProcessorError, match="needs its processor"):
        popvlm.accelerate(processor.tokenizer, model, plan="last-third")
