"""Recipes: the shipped ones on small data of the published columns, and local files of every kind."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import fsspec
import pytest
import yaml
from PIL import Image

from popvlm.recipes import load
from popvlm.samples import SampleError

datasets = pytest.importorskip("datasets", exc_type=ImportError)  # the newest wants a newer hub than transformers 4
SHIPPED = Path(__file__).parents[1] / "calibration" / "recipes"


def png(size=(8, 6), name="red"):
    file = io.BytesIO()
    Image.new("RGB", size, name).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def text():
    return datasets.Value("string")


PUBLISHED = {  # the columns as they are on the hub
    "lmms-lab/textvqa": (
        {"image_id": text(), "question_id": datasets.Value("int32"), "question": text(), "image": datasets.Image(),
         "answers": [text()], "ocr_tokens": [text()]},
        lambda index: {"image_id": str(index), "question_id": index, "question": f"what sign {index}?", "image": png(),
                       "answers": ["stop"], "ocr_tokens": []}),
    "HuggingFaceM4/DocumentVQA": (
        {"questionId": text(), "question": text(), "question_types": [text()], "image": datasets.Image(),
         "docId": datasets.Value("int64"), "answers": [text()]},
        lambda index: {"questionId": str(index), "question": f"what date {index}?", "question_types": ["layout"],
                       "image": png(), "docId": 1, "answers": ["1 May"]}),
    "HuggingFaceM4/ChartQA": (
        {"image": datasets.Image(), "query": text(), "label": [text()],
         "human_or_machine": datasets.ClassLabel(names=["human", "machine"])},
        lambda index: {"image": png(), "query": f"which bar {index}?", "label": ["3"], "human_or_machine": 0}),
    "HuggingFaceM4/the_cauldron": (
        {"images": [datasets.Image()], "texts": [{"user": text(), "assistant": text(), "source": text()}]},
        lambda index: {"images": [png(), png(name="blue")], "texts": [
            {"user": f"what differs {index}?", "assistant": "a", "source": "s"},
            {"user": "and then?", "assistant": "b", "source": "s"}]}),
    "Salesforce/wikitext": (
        {"text": text()}, lambda index: {"text": [" = Title = ", "", f"paragraph {index} " * 60][index % 3]}),
}


@pytest.fixture
def hub(monkeypatch):
    """The hub as it publishes these datasets, 30 rows each; what was asked of it."""
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        features, row = PUBLISHED[name]
        made = datasets.Dataset.from_list([row(index) for index in range(30)], datasets.Features(features))
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def write(folder, *sources):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(list(sources)), encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.mark.parametrize("recipe", sorted(path.name for path in SHIPPED.glob("*.yaml")))
def test_shipped_recipes_fit_the_published_columns(recipe, hub):
    sources = yaml.safe_load((SHIPPED / recipe).read_text(encoding="utf-8"))
    samples = load(SHIPPED / recipe, 60, seed=1)
    assert sorted(hub, key=str) == sorted(((source["dataset"], source.get("config"), "train", True)
                                           for source in sources), key=str)
    assert {sample["kind"] for sample in samples} == {source["name"] for source in sources}
    for sample in samples:
        if sample["kind"] == "WikiText":
            assert sample["images"] == []
            assert "Summarise" in sample["question"]
            assert sample["question"].count("paragraph") == 60
        else:
            assert all(image["bytes"].startswith(b"\x89PNG") for image in sample["images"])
            assert sample["question"].startswith(("what ", "which "))
            assert len(sample["images"]) == (2 if "what differs" in sample["question"] else 1)


def test_the_hub_can_be_read_whole(hub, tmp_path):
    recipe = write(tmp_path, {"name": "charts", "dataset": "HuggingFaceM4/ChartQA", "split": "val", "stream": False,
                              "image": "image", "prompt": "{query}"})
    assert len(load(recipe, 99)) == 30
    assert hub == [("HuggingFaceM4/ChartQA", None, "val", False)]


def test_sources_are_mixed_by_weight_and_the_same_for_a_seed(hub, tmp_path):
    source = {"dataset": "lmms-lab/textvqa", "image": "image", "prompt": "{question}"}
    recipe = write(tmp_path, source | {"name": "much", "weight": 3}, source | {"name": "little"})
    samples = load(recipe, 24, seed=7)
    assert samples == load(recipe, 24, seed=7)
    assert samples != load(recipe, 24, seed=8)
    many = Counter(sample["kind"] for seed in range(8) for sample in load(recipe, 30, seed=seed))
    assert 2 < many["much"] / many["little"] < 4
    questions = [sample["question"] for sample in samples if sample["kind"] == "much"]
    assert len(set(questions)) == len(questions)
    assert questions != sorted(questions, key=lambda said: int(said.split()[-1].rstrip("?")))  # shuffled
    assert Counter(sample["kind"] for sample in load(recipe, 1000)) == {"much": 30, "little": 30}  # all that there is


def rows(folder):
    for index in range(4):
        Image.new("RGB", (10 + index, 8), "green").save(folder / f"{index}.png")
    return [{"file": f"{index}.png", "ask": f"number {index}?"} for index in range(4)]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "imagefolder"])
def test_local_data(kind, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    given, image = rows(data), "file"
    path = data / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in given), encoding="utf-8")
    elif kind == "csv":
        path.write_text("file,ask\n" + "".join(f"{row['file']},{row['ask']}\n" for row in given), encoding="utf-8")
    elif kind == "parquet":
        datasets.Dataset.from_list(given).to_parquet(path)
    else:
        path, image = data, "image"
        lines = "".join(f"{row['file']},{row['ask']}\n" for row in given)
        (data / "metadata.csv").write_text("file_name,ask\n" + lines, encoding="utf-8")
    (data / "2.png").write_bytes(b"damaged")  # found out when it is prepared, not here
    source = {"name": "mine", "path": str(path.relative_to(tmp_path)), "image": image, "prompt": "Look. {ask}"}
    samples = load(write(tmp_path, source), 9)
    assert sorted(sample["question"] for sample in samples) == [f"Look. number {index}?" for index in range(4)]
    for sample in samples:
        (found,) = sample["images"]
        assert sample["kind"] == "mine"
        number = int(sample["question"].split()[-1].rstrip("?"))
        if isinstance(found, dict):
            file = io.BytesIO(found["bytes"]) if found.get("bytes") else found["path"]
        else:
            file = found
        if number != 2:
            assert Image.open(file).size == (10 + number, 8)


def test_images_that_lie_on_the_hub_are_fetched(monkeypatch, tmp_path):
    fsspec.filesystem("memory").pipe("/popvlm/one.png", png()["bytes"])
    given = [{"image": {"bytes": None, "path": f"memory://popvlm/{name}.png"}, "ask": name} for name in ("one", "none")]
    features = datasets.Features({"image": datasets.Image(), "ask": text()})
    stream = datasets.Dataset.from_list(given, features).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    recipe = write(tmp_path, {"name": "far", "dataset": "a/b", "image": "image", "prompt": "{ask}"})
    found = {sample["question"]: sample["images"][0]["bytes"] for sample in load(recipe, 2)}
    assert found == {"one": png()["bytes"], "none": None}


def test_local_data_to_a_models_arguments(tmp_path):
    from test_samples import tokenizer

    from popvlm.samples import Prepared

    (tmp_path / "texts.jsonl").write_text('{"text": "one"}\n{"text": " "}\n{"text": "three"}\n', encoding="utf-8")
    samples = load(write(tmp_path, {"name": "texts", "path": "texts.jsonl", "prompt": "{text}"}), 5)
    assert sorted(sample["question"] for sample in samples) == ["one", "three"]  # a blank one is none
    assert len(Prepared(tokenizer(), samples)) == 2


GOOD = {"name": "mine", "path": "rows.jsonl", "prompt": "{ask}"}


@pytest.mark.parametrize(("sources", "error"), [
    ([GOOD | {"wieght": 2}], "source 'mine' of .* has a key 'wieght'; the keys are name, prompt, dataset, path"),
    ([GOOD, GOOD | {"prompt": 3}], "source 'mine' of .* needs a name and a prompt"),
    ([{"path": "rows.jsonl"}], "source 1 of .* needs a name and a prompt"),
    ([GOOD | {"dataset": "a/b"}], "either a dataset, of the hub, or a path"),
    ([{"name": "mine", "prompt": "{ask}"}], "either a dataset, of the hub, or a path"),
    ([GOOD | {"weight": 0}], "weight 0; give a number above 0"),
    ([GOOD | {"weight": True}], "weight True; give a number above 0"),
    ([GOOD | {"path": "none.jsonl"}], "there is no data at .*none.jsonl; give a folder, or a file that ends"),
    ([GOOD | {"path": "recipe.yaml"}], "there is no data at .*recipe.yaml"),
    ([GOOD | {"prompt": "{question}"}], "mine has columns file, ask, and not all of the prompt '{question}'"),
    ([GOOD | {"image": "picture"}], "mine has columns file, ask, and not all of the prompt '{ask}' and picture"),
    ([GOOD | {"prompt": "{ask"}], "mine has columns file, ask, and not all of the prompt '{ask'"),
    ([GOOD | {"at_least": 1000}], "gives no sample"),
    ([], "is no list of sources"),
    (["mine"], "is no list of sources"),
])
def test_what_cannot_be_used_is_refused_in_a_sentence(sources, error, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"file": "0.png", "ask": "what?"}\n', encoding="utf-8")
    with pytest.raises(SampleError, match=error) as caught:
        load(write(tmp_path, *sources), 3)
    assert "\n" not in str(caught.value)


def test_no_recipe_and_no_yaml(tmp_path):
    with pytest.raises(SampleError, match=r"cannot be read .*give a YAML file"):
        load(tmp_path / "none.yaml", 3)
    (tmp_path / "bad.yaml").write_text("- name: [", encoding="utf-8")
    with pytest.raises(SampleError, match=r"cannot be read .*give a YAML file"):
        load(tmp_path / "bad.yaml", 3)


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    recipe = write(tmp_path, {"name": "far", "dataset": "someone/something", "prompt": "{ask}"})

    def refuse(*args, **kwargs):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(SampleError, match=r"dataset someone/something cannot be had \(no route to the hub\); check"):
        load(recipe, 3)

    def breaks():
        yield {"ask": "what?"}
        raise TimeoutError("it took too long")

    broken = datasets.IterableDataset.from_generator(breaks)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: broken)
    with pytest.raises(SampleError, match=r"reading someone/something broke off"):
        load(recipe, 3)
