"""Each task on small data of its published columns; a user's own file; the sets that need no network."""

from __future__ import annotations

import io
import json

import pytest
import yaml
from metrics import METRICS, Target
from PIL import Image
from tasks import FOLDER, NAMES, Sample, TaskError, digest, find, load

from popvlm.samples import SampleError, opened

datasets = pytest.importorskip("datasets", exc_type=ImportError)  # the newest wants a newer hub than transformers 4


def png(size=(8, 6), name="red"):
    file = io.BytesIO()
    Image.new("RGB", size, name).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def columns(**more):
    """Features by name: str, int, float, "image", or a list of one of them."""
    kinds = {str: datasets.Value("string"), int: datasets.Value("int64"), float: datasets.Value("float64"),
             "image": datasets.Image()}

    def feature(kind):
        if isinstance(kind, list):
            return [feature(kind[0])]
        return {name: feature(each) for name, each in kind.items()} if isinstance(kind, dict) else kinds[kind]

    return datasets.Features({name: feature(kind) for name, kind in more.items()})


PUBLISHED = {  # task: (dataset, config, split), its columns, a row, an answer that is right and one that is wrong
    "textvqa": (("lmms-lab/textvqa", None, "validation"),
                columns(image_id=str, question_id=int, question=str, question_tokens=[str], image="image",
                        image_width=int, image_height=int, flickr_original_url=str, flickr_300k_url=str, answers=[str],
                        image_classes=[str], set_name=str, ocr_tokens=[str]),
                {"question": "what sign?", "image": png(), "answers": ["Stop", *["the stop."] * 8, "halt"]},
                "stop", "go"),
    "docvqa": (("lmms-lab/DocVQA", "DocVQA", "validation"),
               columns(questionId=str, question=str, question_types=[str], image="image", docId=int,
                       ucsf_document_id=str, ucsf_document_page_no=str, answers=[str], data_split=str),
               {"question": "which date?", "image": png(), "answers": ["May 1", "1 May 2020"]}, "1 may 2020", "never"),
    "infovqa": (("lmms-lab/DocVQA", "InfographicVQA", "validation"),
                columns(questionId=str, question=str, answers=[str], answer_type=[str], image="image", image_url=str,
                        ocr=str, data_split=str),
                {"question": "how many?", "image": png(), "answers": ["12"]}, "12", "99"),
    "chartqa": (("HuggingFaceM4/ChartQA", None, "test"),
                datasets.Features({"image": datasets.Image(), "query": datasets.Value("string"),
                                   "label": [datasets.Value("string")],
                                   "human_or_machine": datasets.ClassLabel(names=["human", "machine"])}),
                {"query": "how high?", "image": png(), "label": ["100"], "human_or_machine": 1}, "103", "120"),
    "vqav2": (("lmms-lab/VQAv2", None, "validation"),
              columns(question_type=str, multiple_choice_answer=str,
                      answers=[{"answer": str, "answer_confidence": str, "answer_id": int}], image_id=int,
                      answer_type=str, question_id=int, question=str, image="image"),
              {"question": "how many?", "image": png(), "answer_type": "number",
               "answers": [{"answer": "two", "answer_confidence": "yes", "answer_id": number} for number in range(10)]},
              "2", "3"),
    "ai2d": (("lmms-lab/ai2d", None, "test"), columns(question=str, options=[str], answer=str, image="image"),
             {"question": "which part?", "image": png(), "options": ["leaf", "root", "stem"], "answer": "1"}, "B", "A"),
    "mmmu": (("lmms-lab/MMMU", None, "validation"),
             columns(id=str, question=str, options=str, explanation=str, **{f"image_{n}": "image" for n in range(1, 8)},
                     img_type=str, answer=str, topic_difficulty=str, question_type=str, subfield=str),
             {"question": "Compare <image 2> with <image 1>.", "options": "['same', '<image 3>']", "answer": "A",
              "image_1": png(), "image_2": png(), "image_3": png(), "question_type": "multiple-choice"}, "same", "B"),
    "mmbench": (("lmms-lab/MMBench_EN", None, "dev"),
                columns(index=int, question=str, hint=str, A=str, B=str, C=str, D=str, answer=str, category=str,
                        image="image", source=str, **{"l2-category": str}, comment=str, split=str),
                {"index": 3, "question": "what?", "hint": "nan", "A": "cat", "B": "dog", "C": None, "D": "nan",
                 "answer": "B", "image": png()}, "B. dog", "A"),
    "realworldqa": (("lmms-lab/RealWorldQA", None, "test"),
                    columns(image="image", question=str, answer=str, image_path=str),
                    {"question": "Which?\nA. left\nB. right\nPlease answer directly with only the letter of the "
                                 "correct option and nothing else.", "answer": "B", "image": png()}, "B", "A"),
    "pope": (("lmms-lab/POPE", None, "test"),
             columns(id=str, question_id=str, question=str, answer=str, image_source=str, image="image", category=str),
             {"question": "Is there a dog?", "answer": "no", "image": png(), "category": "random"}, "No", "Yes"),
    "screenspot": (("rootsautomation/ScreenSpot", None, "test"),
                   columns(file_name=str, bbox=[float], instruction=str, data_type=str, data_source=str, image="image"),
                   {"instruction": "send", "bbox": [0.1, 0.2, 0.3, 0.4], "image": png(), "data_type": "icon"},
                   '{"point_2d": [200, 350]}', '{"point_2d": [350, 200]}'),
}
ROWS = 5


def published(task):
    where, features, row, *_ = PUBLISHED[task]
    full = {name: row.get(name) for name in features}
    return where, datasets.Dataset.from_list([full] * ROWS, features)


@pytest.fixture
def hub(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split))
        (made,) = (data for where, data in map(published, PUBLISHED) if where == (name, config, split))
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_columns(name, hub):
    task = find(name)
    where, _, row, right, wrong = PUBLISHED[name]
    for samples in load(task), load(task, 3), load(task, 3, stream=True):
        assert hub.pop() == where
        score = METRICS[task.metric]
        for sample in samples:
            assert score(right, sample.target) > 0.5 > score(wrong, sample.target)
            assert sample.images[0]["bytes"].startswith(b"\x89PNG")
            assert "{" not in sample.prompt.replace('{"point_2d": [x, y]}', "")
            assert (row.get("question") or row.get("query") or row["instruction"]).split("\n")[0] in sample.prompt
    assert len({sample.key for sample in samples}) == 3


def test_every_shipped_task_is_tested():
    assert set(NAMES) == {*PUBLISHED, "easy-vqa", "scenes"}
    for name in NAMES:  # and its file says no more than it must
        assert len((FOLDER / f"{name}.yaml").read_text().splitlines()) <= 16


def test_mmbench_without_rotations(hub, monkeypatch):
    monkeypatch.setitem(PUBLISHED["mmbench"][2], "index", 1_000_003)  # question 3 with its options rotated
    for stream in False, True:
        with pytest.raises(TaskError, match=r"gives no sample|size 0"):
            load(find("mmbench"), stream=stream)


def test_prompts_of_options(hub):
    (sample,) = load(find("mmbench"), 1)
    assert sample.prompt == "what?\nA. cat\nB. dog\nAnswer with the option's letter from the given choices directly."
    (sample,) = load(find("mmmu"), 1)
    assert [part.get("number", part.get("text")) for part in sample.content()] == [
        "Compare ", 1, " with ", 0, ".\nA. same\nB. ", 2,
        "\nAnswer with the option's letter from the given choices directly."]
    again = Sample("0", ("a", "b"), "In <image 1>, not <image 1> or <image 7>?", Target())
    assert [part.get("number", part.get("text")) for part in again.content()] == [
        1, "In ", 0, ", not ", "image 1", " or ", "image 7", "?"]


def test_a_question_of_mmmu_without_options(hub, monkeypatch):
    row = PUBLISHED["mmmu"][2]
    monkeypatch.setitem(row, "options", "[]")
    monkeypatch.setitem(row, "answer", "['3.5', '7/2']")
    (sample,) = load(find("mmmu"), 1)
    assert sample.prompt.endswith("Answer the question using a single word or phrase.")
    assert METRICS["choice"]("3.50", sample.target) == METRICS["choice"]("7/2", sample.target) == 1


def test_gemma_puts_y_first(hub):
    (sample,) = load(find("screenspot"), 1, model_type="gemma3")
    assert "[y, x]" in sample.prompt
    assert METRICS["click"]('{"point": [350, 200]}', sample.target) == 1


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_benchmark_from_local_data(kind, tmp_path):
    _, data = published("docvqa")
    data.to_parquet(tmp_path / "any.parquet")
    where = tmp_path / "any.parquet" if kind == "parquet" else tmp_path
    samples = load(find("docvqa", str(where)), 3)
    assert len(samples) == 3
    assert samples[0].target.answers == ("May 1", "1 May 2020")
    assert opened(samples[0].images[0]).size == (8, 6)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_users_own_file(kind, tmp_path):
    (tmp_path / "0.png").write_bytes(png()["bytes"])
    path = tmp_path / f"mine.{kind}"
    if kind == "csv":
        path.write_text("image,question,answers\n0.png,what?,red|dark red\n0.png,how many?,1\n"
                        "0.png,NA,007\n,who?,null\n", encoding="utf-8")
    else:
        rows = [{"image": "0.png", "question": "what?", "answers": ["red", "dark red"]},
                {"image": "0.png", "question": "how many?", "answers": ["1"]},
                {"image": "0.png", "question": "NA", "answers": ["007"]}, {"question": "who?", "answers": ["null"]}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = find(str(path))
    first, second, third, fourth = load(task)
    assert (third.prompt, third.target.answers) == ("NA", ("007",)), "a CSV's cells are texts"
    assert (fourth.images, fourth.target.answers) == ((), ("null",))
    assert (first.prompt, first.target.answers) == ("what?", ("red", "dark red"))
    assert (second.prompt, second.target.answers) == ("how many?", ("1",))
    assert opened(first.images[0]).size == (8, 6)
    assert METRICS[task.metric]("Dark red", first.target) == 1


def test_a_question_without_an_answer_is_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("image,question,answers\n0.png,what?,red\n0.png,how many?,\n", encoding="utf-8")
    with pytest.raises(TaskError, match=r"sample 1 has no right answer \('how many\?'\); take a split"):
        load(find(str(path)))


def test_answers_to_other_questions_are_told_apart(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("image,question,answers\n0.png,what?,red\n0.png,how many?,1\n", encoding="utf-8")
    before = digest(load(find(str(path))))
    assert before == digest(load(find(str(path))))
    path.write_text("image,question,answers\n0.png,who?,me\n0.png,what?,red\n0.png,how many?,1\n", encoding="utf-8")
    assert before != digest(load(find(str(path))))


def test_a_task_is_one_file(tmp_path):
    (tmp_path / "mine.csv").write_text("picture,ask,right\n0.png,what?,12%\n", encoding="utf-8")
    entries = {"title": "Mine", "path": "mine.csv", "images": "picture", "prompt": "Look. {ask}", "answers": "right",
               "metric": "relaxed"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(entries), encoding="utf-8")
    (sample,) = load(find(str(tmp_path / "mine.yaml")))
    assert (sample.prompt, sample.target.answers) == ("Look. what?", ("12%",))


def test_the_sets_that_need_no_network():
    pytest.importorskip("easy_vqa")
    whole = load(find("easy-vqa"))
    assert len(whole) == 9673  # the whole test split
    assert {sample.group for sample in whole} == {"shape", "color", "yes or no"}
    drawn = load(find("easy-vqa"), 40, seed=3)
    assert drawn == load(find("easy-vqa"), 40, seed=3) != load(find("easy-vqa"), 40, seed=4)
    assert find("easy-vqa:train").name == "easy-vqa-train"
    assert not {sample.images for sample in load(find("easy-vqa:train"), 40)} & {sample.images for sample in whole}


def test_scenes(monkeypatch):
    import tasks

    monkeypatch.setattr(tasks, "KINDS", {"signs": None, "table": None})
    samples = load(find("scenes"), 12)
    assert [sample.prompt for sample in samples] == [sample.prompt for sample in load(find("scenes"), 12)]
    assert {sample.group.split("/")[0] for sample in samples} == {"signs", "table"}
    assert opened(samples[0].images[0]).size == samples[0].images[0].size


GOOD = {"title": "Mine", "path": "rows.jsonl", "prompt": "{ask}", "answers": "right", "metric": "exact"}


@pytest.mark.parametrize(("entries", "error"), [
    (GOOD | {"metrik": "vqa"}, "has a key 'metrik'; the keys are title, prompt"),
    (GOOD | {"metric": "bleu"}, "has metric 'bleu'; the metrics are vqa, anls"),
    ({key: value for key, value in GOOD.items() if key != "prompt"}, "has no prompt; give it"),
    (GOOD | {"dataset": "a/b"}, "needs either a dataset"),
    (GOOD | {"answers": None}, "says of no column that it has the answers"),
    ([GOOD], "is no mapping"),
    (GOOD | {"images": "picture"}, "Mine has columns image, ask, right, box, and its task's file asks for others"),
    (GOOD | {"prompt": "{question}"}, "asks for others"),
    (GOOD | {"answer_by": "index"}, "asks for others or for other contents"),
    (GOOD | {"box": "box"}, r"Mine has a box \[1.0, 20.0, 3.0, 4.0\]; give left, top, right, bottom as shares"),
])
def test_what_cannot_be_used_is_refused_in_a_sentence(entries, error, tmp_path):
    row = {"image": "0.png", "ask": "what?", "right": "red", "box": [1, 20, 3, 4]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(entries), encoding="utf-8")
    with pytest.raises(TaskError, match=error) as caught:
        load(find(str(tmp_path / "mine.yaml")))
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(TaskError, match=r"there is no task 'textvga'; there are ai2d, chartqa"):
        find("textvga")
    with pytest.raises(TaskError, match=r"there are no samples at none.csv"):
        find("none.csv")
    with pytest.raises(TaskError, match=r"cannot be read"):
        find(str(tmp_path / "none.yaml"))
    with pytest.raises(SampleError, match=r"there is no data at .*none; give a folder"):
        load(find("pope", str(tmp_path / "none")))
    with pytest.raises(TaskError, match=r"easy-VQA has no split 'val'; it has train and test"):
        load(find("easy-vqa:val"))
