"""The benchmarks: each a file in `eval/tasks`, read into samples whatever the columns of its dataset.

To add one is to add a file. A CSV or JSON lines file with the columns image, question and answers is one too.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Literal

import yaml
from metrics import METRICS, Target
from PIL import Image
from scenes import COLORS, KINDS, scene

from popvlm.recipes import FILES, dataset, fetched, undecoded
from popvlm.samples import SampleError, brief

FOLDER = Path(__file__).parent / "tasks"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))
"""The tasks that come with popvlm."""
SHUFFLED = 1000
"""How many rows of a stream are held when a few are drawn from it."""


class TaskError(ValueError):
    """A task that cannot be used; the message is one sentence that names the fix."""


@dataclass(frozen=True)
class Sample:
    """One question of a task.

    Args:
        key: tells it from the task's others.
        images: as `popvlm.samples.opened` takes them: bytes, a path, a PIL image.
        prompt: the question and how to answer; `<image 2>` is where the second image belongs, as in MMMU.
        target: what the answer is held against.
        group: the part of the benchmark that it belongs to, or "".
    """

    key: str
    images: tuple[Any, ...]
    prompt: str
    target: Target
    group: str = ""

    def content(self) -> list[dict[str, Any]]:
        """The user's turn as a chat template takes it, images that have no place in the prompt first.

        Each image part says with `number` which of `images` it is.
        """
        placed: list[dict[str, Any]] = []
        seen: set[int] = set()
        for position, piece in enumerate(re.split(r"<image (\d{1,2})>", self.prompt)):
            number = int(piece) - 1 if position % 2 else -1
            if 0 <= number < len(self.images) and number not in seen:
                seen.add(number)
                placed.append({"type": "image", "number": number})
            elif text := f"image {piece}" if position % 2 else piece:
                placed.append({"type": "text", "text": text})
        first = [{"type": "image", "number": number} for number in range(len(self.images)) if number not in seen]
        return [*first, *placed]


@dataclass(frozen=True)
class Task:
    """A task's file.

    Args:
        name: the file's.
        title: as its authors write it.
        prompt: with columns in braces; `{options}` stands for the options, each with its letter on a line.
        metric: one of `metrics.METRICS`.
        max_new_tokens: the longest answer.
        dataset: a name on the Hugging Face hub; or
        path: a folder or a parquet, CSV or JSON lines file, relative to the task's file; or
        drawn: one of `DRAWN`.
        config, split: of the dataset.
        images: the column of the image or images, or several columns.
        answers: the column of the right answer or answers.
        options: the column of the list of options, or the columns of one each.
        answer_by: whether a multiple-choice question's answer is a letter or an index from 0.
        below: columns of numbers, each with what a row's must be below, or it is left out.
        box: the column of the box to click, as shares of width and height.
        group: the column that says to which part of the benchmark a question belongs.
        prompt_without_options: for questions without, where others have some.
        prompts: for models of another convention, by their `model_type`; those that begin with gemma3 put y first.
    """

    name: str
    title: str
    prompt: str
    metric: str
    max_new_tokens: int = 32
    dataset: str | None = None
    path: str | None = None
    drawn: str | None = None
    config: str | None = None
    split: str = "test"
    images: str | list[str] = "image"
    answers: str | None = None
    options: str | list[str] | None = None
    answer_by: Literal["letter", "index"] = "letter"
    below: Mapping[str, float] = field(default_factory=dict)
    box: str | None = None
    group: str | None = None
    prompt_without_options: str | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)


def find(name: str, data: str | None = None) -> Task:
    """The task of a name.

    Args:
        name: of a shipped task, of a task's YAML file, or of a file of samples (CSV, JSON lines, parquet) with columns
            image, question and answers; in a CSV several answers are parted by |. `:split` may follow a task's name.
        data: a folder or file with the task's columns, in place of its dataset.

    Raises:
        TaskError: there is none, or its file cannot be used.
    """
    path = Path(name).expanduser()
    if path.suffix in FILES:
        if not path.is_file():
            raise TaskError(f"there are no samples at {name}; give a file that is there")
        task = Task(path.stem, path.name, "{question}", "exact", path=str(path.resolve()), answers="answers")
    elif path.suffix in (".yaml", ".yml"):
        task = _read(path)
    else:
        stem, _, split = name.partition(":")
        if stem not in NAMES:
            raise TaskError(f"there is no task {stem!r}; there are {', '.join(NAMES)}, or give a task's YAML file or a "
                            "CSV or JSON lines file of image, question, answers")
        task = _read(FOLDER / f"{stem}.yaml")
        task = replace(task, split=split, name=f"{stem}-{split}") if split and split != task.split else task
    return replace(task, dataset=None, drawn=None, path=str(Path(data).expanduser().resolve())) if data else task


def load(task: Task, limit: int | None = None, *, seed: int = 0, stream: bool = False, model_type: str = ""
         ) -> list[Sample]:
    """A task's samples, the same for the same seed, with images undecoded: a damaged one shows when it is asked.

    Args:
        task: from `find`.
        limit: draw so many, at random over the whole task; None takes all, in their order.
        seed: of the draw.
        stream: read the hub row by row and download no more than that; a draw is then from a buffer that moves along.
        model_type: of the model's config, which decides on the prompt where conventions differ.

    Raises:
        TaskError: a column is missing or does not hold what it should, or there is no sample.
        SampleError: the dataset cannot be had.
    """
    where: str | Path = task.dataset or Path(task.path or "")
    samples = []
    try:
        for number, row in enumerate(_rows(task, where, limit, seed, stream)):
            samples.append(_sample(task, str(number), row, where, model_type))
    except (TaskError, SampleError):
        raise
    except Exception as error:  # whatever a connection or a file breaks with
        raise TaskError(f"reading {task.drawn or where} broke off ({brief(error)}); check the network or the file, and "
                        "try again") from error
    if not samples:
        raise TaskError(f"{task.title} gives no sample; ask for at least one, from data that has some")
    return samples


def digest(samples: Sequence[Sample]) -> str:
    """16 hexadecimal digits of the questions and their images: answers to others must not be taken for theirs."""
    made = hashlib.sha256()
    for sample in samples:
        made.update(json.dumps([sample.key, sample.prompt]).encode())
        for image in sample.images:
            if isinstance(image, Image.Image):
                made.update(image.tobytes())
            elif isinstance(image, Mapping):
                made.update(image.get("bytes") or Path(str(image.get("path"))).name.encode())
            else:
                made.update(Path(str(image)).name.encode())
    return made.hexdigest()[:16]


def _read(path: Path) -> Task:
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TaskError(f"the task {path} cannot be read ({brief(error)}); give a YAML file") from error
    known = [each.name for each in fields(Task)][1:]
    if not isinstance(entries, dict):
        raise TaskError(f"the task {path} is no mapping; give {', '.join(known[:4])} and the rest a line each")
    if unknown := [key for key in entries if key not in known]:
        raise TaskError(f"the task {path} has a key {unknown[0]!r}; the keys are {', '.join(known)}")
    if missing := [key for key in ("title", "prompt", "metric") if not isinstance(entries.get(key), str)]:
        raise TaskError(f"the task {path} has no {missing[0]}; give it, in quotes if need be")
    if entries["metric"] not in METRICS:
        raise TaskError(f"the task {path} has metric {entries['metric']!r}; the metrics are {', '.join(METRICS)}")
    if sum(key in entries for key in ("dataset", "path", "drawn")) != 1:
        raise TaskError(f"the task {path} needs either a dataset, of the hub, or a path")
    if not (entries.get("answers") or entries.get("box")):
        raise TaskError(f"the task {path} says of no column that it has the answers; give answers, or box")
    if entries.get("path"):
        entries["path"] = str((path.parent / Path(entries["path"]).expanduser()).resolve())
    return Task(path.stem, **entries)


# ---- rows


def _rows(task: Task, where: str | Path, limit: int | None, seed: int, stream: bool) -> Iterable[Mapping[str, Any]]:
    if task.drawn is not None:
        rows = list(DRAWN[task.drawn](task.split))
        return rows if limit is None else random.Random(seed).sample(rows, min(limit, len(rows)))
    data = dataset(where, task.config, task.split, stream)
    if task.below:
        data = (undecoded(data) if stream else data).filter(partial(_below, tuple(task.below.values())),
                                                            input_columns=list(task.below))
    if limit is None:
        return undecoded(data)
    if stream:
        return islice(undecoded(data).shuffle(seed=seed, buffer_size=SHUFFLED), limit)
    return undecoded(data.shuffle(seed=seed).select(range(min(limit, len(data)))))


def _below(most: tuple[float, ...], *values: Any) -> bool:
    return all(float(value) < bound for value, bound in zip(values, most))


def _easy_vqa(split: str) -> Iterator[dict[str, Any]]:
    try:
        import easy_vqa
    except ImportError as error:
        raise TaskError("easy-VQA comes from PyPI; pip install easy-vqa") from error
    if split not in ("train", "test"):
        raise TaskError(f"easy-VQA has no split {split!r}; it has train and test")
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    for question, answer, image in zip(*getattr(easy_vqa, f"get_{split}_questions")()):
        kind = "yes or no" if answer in ("yes", "no") else "color" if answer in COLORS else "shape"
        yield {"question": question, "answer": answer, "image": paths[image], "kind": kind}


def _scenes(split: str) -> Iterator[dict[str, Any]]:
    for kind in KINDS:
        for index in range(100):
            drawn = scene(split, index, kind, 1)
            by_kind = {question.kind: question for question in drawn.questions}
            for one in random.Random(index).sample(sorted(by_kind), min(3, len(by_kind))):
                yield {"question": by_kind[one].text, "answer": by_kind[one].answer, "image": drawn.image, "kind": kind}


DRAWN: dict[str, Callable[[str], Iterator[dict[str, Any]]]] = {"easy_vqa": _easy_vqa, "scenes": _scenes}


# ---- a row as a sample


def _sample(task: Task, key: str, row: Mapping[str, Any], where: str | Path, model_type: str) -> Sample:
    row = {name: "" if value in (None, "nan") or (isinstance(value, float) and math.isnan(value)) else value
           for name, value in row.items()}
    columns = [task.images] if isinstance(task.images, str) else task.images
    try:
        pictures = [row[column] for column in columns]
        options = _options(task.options, row)
        prompt = task.prompt
        for begins, other in task.prompts.items():
            prompt = other if model_type.startswith(begins) else prompt
        if not options:
            prompt = task.prompt_without_options or prompt
        lines = "\n".join(f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options))
        prompt = prompt.format_map(row | {"options": lines}).strip()
        answers = _answers(row[task.answers]) if task.answers else ()
        if where == Path(task.path or "") and Path(where).suffix == ".csv":
            answers = tuple(one.strip() for answer in answers for one in answer.split("|"))
        if task.answer_by == "index":
            answers = tuple(ascii_uppercase[int(answer)] for answer in answers)
        box = tuple(float(side) for side in row[task.box]) if task.box else None
        group = str(row[task.group]) if task.group else ""
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise TaskError(f"{task.title} has columns {', '.join(row)}, and its task's file asks for others or for other "
                        f"contents ({type(error).__name__}: {brief(error)}); change the file, or the columns' names"
                        ) from error
    if box is not None and (len(box) != 4 or not all(0 <= side <= 1 for side in box)):
        raise TaskError(f"{task.title} has a box {list(box)}; give left, top, right, bottom as shares of the image")
    if not answers and box is None:
        raise TaskError(f"{task.title}'s sample {key} has no right answer ({prompt[:80]!r}); take a split that has "
                        "them, or leave that sample out")
    images = [image for picture in pictures for image in (picture if isinstance(picture, list) else [picture])
              if image not in ("", None)]
    order: Literal["xy", "yx"] = "yx" if model_type.startswith("gemma3") else "xy"
    return Sample(key, tuple(fetched(image, where) for image in images), prompt,
                  Target(answers, options, box, order), group)  # type: ignore[arg-type]


def _options(columns: str | list[str] | None, row: Mapping[str, Any]) -> tuple[str, ...]:
    if columns is None:
        return ()
    if isinstance(columns, str):
        return _texts(row[columns])
    return tuple(str(row[column]) for column in columns if row.get(column, "") != "")


def _answers(value: Any) -> tuple[str, ...]:
    """The right answers of a cell: a text, a number, a list, or VQAv2's list of what each annotator said."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        value = [annotator["answer"] for annotator in value]
    return _texts(value)


def _texts(value: Any) -> tuple[str, ...]:
    """A list of texts, also one that is written out as Python, as MMMU's are."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = [value]
    if isinstance(value, (list, tuple)):
        return tuple(str(one) for one in value)
    return () if value == "" else (str(value),)
