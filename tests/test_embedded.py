"""The models in the package: plain Hugging Face folders that answer questions about images."""

from __future__ import annotations

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import popvlm
from popvlm import embedded

ANSWERS = ["yellow", "rectangle", "rectangle", "blue", "red triangle"]
"""To `demo_questions`, by those who drew the images."""


def written(processor, model, path, question):
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[text], images=[Image.open(path).convert("RGB")], return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


def test_tiny_qwen3_vl_answers():
    folder = embedded.folder("tiny-qwen3-vl")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20e6
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    answers(processor, model)


def test_gemma_3_270m_vision_answers(tmp_path, monkeypatch):
    """Put together from PyPI's decoder and what was trained here; the second call finds it."""
    monkeypatch.setenv("POPVLM_CACHE", str(tmp_path))
    assert sum(path.stat().st_size for path in (embedded.HERE / "gemma-3-270m-vision").iterdir()) < 20e6
    if transformers.__version__.startswith("4."):
        with pytest.raises(embedded.EmbeddedModelError, match="needs transformers 5"):
            embedded.folder("gemma-3-270m-vision")
        return
    steps = []
    folder = embedded.folder("gemma-3-270m-vision", steps.append)
    assert any("ai.google.dev/gemma/terms" in step for step in steps), "the licence is shown"
    assert "Gemma Terms of Use" in (folder / "NOTICE").read_text()
    assert embedded.folder("gemma-3-270m-vision", pytest.fail) == folder
    processor, model = AutoProcessor.from_pretrained(folder), AutoModelForImageTextToText.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    answers(processor, model)


def answers(processor, model):
    """The demo's questions, nearly all rightly; and word for word the same with a plan that loses nothing."""
    questions = embedded.demo_questions()
    assert len(questions) == len(ANSWERS)
    full = [written(processor, model, path, question) for path, question in questions]
    assert sum(ours == right for ours, right in zip(full, ANSWERS)) >= len(ANSWERS) - 1
    popvlm.accelerate(processor, model, plan="lossless")
    assert [written(processor, model, path, question) for path, question in questions] == full


def test_no_such_model():
    with pytest.raises(embedded.EmbeddedModelError, match="there is no embedded model 'tiny'; there is tiny-qwen3-vl"):
        embedded.folder("tiny")
