"""The plugin inside lmms-eval itself, found by its entry point: on a local easy-VQA task its score is ours.

Where lmms-eval is not installed (its requirements are many) the plugin runs against the little of it that it uses.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

popvlm = pytest.importorskip("popvlm")
pytest.importorskip("easy_vqa")
pytest.importorskip("transformers", minversion="5.0")

QUESTIONS = 24


def questions():
    from tasks import find, load

    return load(find("easy-vqa"), QUESTIONS, seed=5)


def ours(plan):
    """Our own score of the same questions, in the same order of batches."""
    from answers import ask
    from metrics import METRICS

    from popvlm import answer
    from popvlm.samples import opened

    processor, model = answer.load(answer.find("tiny-qwen3-vl"), device="cpu")
    processor.tokenizer.padding_side = "left"
    if plan != "full":
        popvlm.accelerate(processor, model, plan=plan)
    samples = questions()
    rows = ask(model, processor, samples, [[opened(image) for image in sample.images] for sample in samples], 16)
    return [row["answer"] for row in rows], sum(
        METRICS["exact"](row["answer"], sample.target) for row, sample in zip(rows, samples)) / len(rows)


TASK = """\
task: easy_vqa_local
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: generate_until
doc_to_visual: !function utils.visual
doc_to_text: "{{{{question}}}}"
doc_to_target: "answer"
generation_kwargs:
  max_new_tokens: 16
  temperature: 0
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: true
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["last-third", "full"])
def test_lmms_eval_gives_our_score(plan, tmp_path):
    evaluator = pytest.importorskip("lmms_eval.evaluator")
    import datasets
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.tasks import TaskManager

    assert MODEL_REGISTRY_V2.get_manifest("popvlm").chat_class_path == "popvlm.lmms.PopVLM", "the entry point is found"
    rows = [{"image": str(sample.images[0]), "question": sample.prompt, "answer": sample.target.answers[0]}
            for sample in questions()]
    datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).to_parquet(tmp_path / "easy.parquet")
    (tmp_path / "utils.py").write_text("def visual(doc):\n    return [doc['image'].convert('RGB')]\n")
    (tmp_path / "easy_vqa_local.yaml").write_text(TASK.format(path=tmp_path / "easy.parquet"))
    found = evaluator.simple_evaluate(
        model="popvlm", model_args=f"pretrained=tiny-qwen3-vl,plan={plan}", tasks=["easy_vqa_local"],
        batch_size=QUESTIONS, device="cpu", task_manager=TaskManager(include_path=str(tmp_path)), log_samples=True,
        bootstrap_iters=0)
    answers, score = ours(plan)
    assert found["results"]["easy_vqa_local"]["exact_match,none"] == pytest.approx(score)
    samples = sorted(found["samples"]["easy_vqa_local"], key=lambda sample: sample["doc_id"])
    assert [sample["filtered_resps"][0] for sample in samples] == answers


@dataclass
class Part:
    type: str
    text: str = ""
    url: Any = None


class FakeMessages:
    """lmms_eval.protocol.ChatMessages, as far as the plugin uses it."""

    def __init__(self, messages):
        self.messages = [SimpleNamespace(role=message["role"], content=[Part(**part) for part in message["content"]])
                         for message in messages]

    def extract_media(self):
        parts = [part for message in self.messages for part in message.content]
        return tuple([part.url for part in parts if part.type == kind] for kind in ("image", "video", "audio"))


@pytest.fixture
def plugin(monkeypatch):
    """The plugin over stand-ins for lmms-eval's modules, whose names and calls are those of lmms-eval 0.7.3."""
    def base_init(self):
        self.cache_hook, self.task_dict = SimpleNamespace(add_partial=lambda *args: None), {}

    def manifest(model_id, chat_class_path):
        return SimpleNamespace(model_id=model_id, chat_class_path=chat_class_path)

    def result(text, token_counts=None):
        return SimpleNamespace(text=text, token_counts=token_counts)

    stand_ins = {
        "lmms_eval": {}, "lmms_eval.api": {}, "lmms_eval.models": {},
        "lmms_eval.api.instance": {"GenerationResult": result, "Instance": SimpleNamespace,
                                   "TokenCounts": SimpleNamespace},
        "lmms_eval.api.model": {"lmms": type("lmms", (), {"__init__": base_init})},
        "lmms_eval.models.registry_v2": {"ModelManifest": manifest},
        "lmms_eval.protocol": {"ChatMessages": FakeMessages}}
    for name, content in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "popvlm.lmms", raising=False)
    yield importlib.import_module("popvlm.lmms")
    sys.modules.pop("popvlm.lmms", None)


def request(number, how=None):
    def messages(doc):
        return [{"role": "user", "content": [{"type": "image", "url": doc["image"]},
                                             {"type": "text", "text": doc["question"]}]}]

    how = how or {"max_new_tokens": 16, "until": ["\n\n"]}
    return SimpleNamespace(args=(f"question {number}", messages, how, number, "easy", "test"))


def test_the_plugin_answers_as_we_do(plugin):
    assert plugin.MANIFEST.chat_class_path == "popvlm.lmms.PopVLM"
    assert [point.value for point in entry_points(group="lmms_eval.models", name="popvlm")] in (
        [], ["popvlm.lmms:MANIFEST"])  # of an installation that is older than this file there is none
    model = plugin.PopVLM("tiny-qwen3-vl", batch_size="5", device="cpu")
    assert popvlm.plan_of(model.model) == popvlm.PruningPlan.last(len(model.model.model.language_model.layers), 1 / 3)
    samples = questions()
    model.task_dict = {"easy": {"test": [{"image": Image.open(sample.images[0]), "question": sample.prompt}
                                         for sample in samples]}}
    results = model.generate_until([request(number) for number in range(12)])
    assert [result.text for result in results] == ours("last-third")[0][:12]
    assert all(result.token_counts.output_tokens >= 1 for result in results)
    (cut,) = model.generate_until([request(0, {"max_new_tokens": 16, "until": results[0].text[1]})])
    assert cut.text == results[0].text[0]
    (short, whole) = model.generate_until([request(0, {"max_new_tokens": 1, "temperature": 0}), request(1)])
    assert short.token_counts.output_tokens == 1
    assert whole.text == results[1].text
    for call in model.loglikelihood, model.generate_until_multi_round:
        with pytest.raises(NotImplementedError, match="leave"):
            call([])


def test_the_plugin_in_full(plugin):
    assert popvlm.plan_of(plugin.PopVLM("tiny-qwen3-vl", plan="full", device="cpu").model) is None
    with pytest.raises(popvlm.PlanError, match="no plan to read"):
        plugin.PopVLM("tiny-qwen3-vl", plan="none.json", device="cpu")
