"""What the small models are trained on: the public easy-VQA set and the drawn scenes, as images with questions."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import easy_vqa
import numpy as np
import torch
from PIL import Image
from scenes import COLORS, LABELS, SHAPES, SIZES, SQUARE, Question, scene
from torch import Tensor

Box = tuple[float, float, float, float]
SMALL = ((128, 128),)
"""Canvas sizes of 16 visual tokens, for a decoder that imagines them; a tower would enlarge them."""


@dataclass
class Example:
    """An image, its questions, and the boxes of what is in it, in its pixels, each with words of `scenes.LABELS`."""

    image: Image.Image
    questions: list[Question]
    items: list[tuple[Box, tuple[str, ...]]] = field(default_factory=list)


@cache
def easy(split: str) -> list[Example]:
    """easy-VQA's "train" (4,000 images) or "test" (1,000 images, 9,673 questions) split, whole, an image each."""
    texts, answers, images = getattr(easy_vqa, f"get_{split}_questions")()
    paths = getattr(easy_vqa, f"get_{split}_image_paths")()
    examples = {index: Example(Image.open(Path(path)).convert("RGB"), []) for index, path in sorted(paths.items())}
    for text, answer, index in zip(texts, answers, images):
        kind = ("yes or no" if answer in ("yes", "no") else "color" if answer in COLORS else "shape")
        examples[index].questions.append(Question(f"easy/{kind}", text, answer))
    for example in examples.values():
        words = {question.answer for question in example.questions} - {"yes", "no"}
        for question in example.questions:  # "is there not a red shape?" "no" says red as well as its answers do
            asked = set(question.text.rstrip("?").split())
            if question.answer == ("no" if asked & {"not", "no"} else "yes"):
                words |= asked & {*COLORS, *SHAPES}
        pixels = np.asarray(example.image).astype(int)
        rows, columns = np.nonzero(np.abs(pixels - pixels[0, 0]).max(-1) > 24)
        if len(rows):
            box = (float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1))
            example.items.append((box, tuple(sorted(words))))
    return list(examples.values())


MIX = {"easy": 0.45, "shapes": 0.45, "signs": 0.1}
"""Shares of the kinds of image when answers are learned. Tables and charts take more looks than were ever learned,
diagrams show arrows, which small towers do not see."""

SHAPES_FIRST = {"easy": 0.3, "shapes": 0.7}
"""The same before that: to find what a word names comes before the rest."""

PAIRS_FIRST = {"easy": 0.1, "pair": 0.9}
"""The same at the very first: two shapes on small canvases, where little else can be looked at."""

SIGHT_MIX = {"easy": 0.1, "shapes": 0.16, "signs": 0.26, "table": 0.16, "chart": 0.12, "diagram": 0.2}
"""The same when a tower begins to see: print is learned first, as it stands on the grid of visual tokens."""

SHAPES_MIX = {"easy": 0.28, "shapes": 0.42, "signs": 0.12, "table": 0.05, "chart": 0.05, "diagram": 0.08}
"""The same after that: shapes, at any place and turn, take a tower longest."""


def draw(index: int, scale: float | None = None, mix: dict[str, float] = MIX, square: bool = False) -> Example:
    """The `index`-th training example; `square` for a model that makes every image square."""
    rng = random.Random(f"train-mix-{index}")
    (kind,) = rng.choices(tuple(mix), tuple(mix.values()))
    if kind == "easy":
        return rng.choice(easy("train"))
    if kind == "pair":
        drawn = scene("train", index, "shapes", scale, SQUARE if square else SMALL, 2)
    else:
        drawn = scene("train", index, kind, scale, SQUARE if square else SIZES)
    return Example(drawn.image, drawn.questions, drawn.items)


def batch(step: int, size: int, mix: dict[str, float] = MIX, square: bool = False
          ) -> tuple[list[int], list[Example]]:
    """A step's examples and their numbers. Images of a batch are about as large, and fewer where they are large."""
    scale = 1 if square else random.Random(f"scale-{step}").choices((1, 1.25, 1.5, 2), (20, 2, 1, 1))[0]
    numbers = [step * size + row for row in range(max(1, round(size / scale**2)))]
    return numbers, [draw(number, scale, mix, square) for number in numbers]


def sampled(example: Example, index: int, most: int) -> list[Question]:
    """At most so many of an example's questions, rarer kinds first, as many to affirm as to deny, three in ten with a
    capital letter, and of those that have a `bare` form half as many in it."""
    rng = random.Random(f"questions-{index}")
    shuffled = rng.sample(example.questions, len(example.questions))
    by_kind: dict[tuple[str, bool, str], list[Question]] = {}
    for question in shuffled:
        # Seven of eight colours are not there: who denies them all is right so often that none learned to look.
        sort = (" no" in question.text, question.answer) if question.answer in ("yes", "no") else (False, "")
        by_kind.setdefault((question.kind, *sort), []).append(question)
    kinds, chosen = list(by_kind.values()), []
    while len(chosen) < most and kinds:
        for questions in list(kinds):
            chosen.append(questions.pop())
            if not questions:
                kinds.remove(questions)
    asked = [replace(one, text=one.text.capitalize() if rng.random() < 0.3 else one.text) for one in chosen[:most]]
    return asked + [short for one in shuffled if (short := bare(one))][:most // 2]


LOOKUPS = {"shapes/color": r"what color is the (.*)\?", "shapes/shape": r"what shape is (.*)\?",
           "signs/read": r"what does the (.*) sign say\?", "signs/color": r"what color is the sign that says (.*)\?",
           "table/cell": r"how many (.*) does (.*) have\?", "table/who": r"who has (.*)\?",
           "chart/value": r"what is the (value) of (.*)\?", "chart/color": r"what (color) is the bar of (.*)\?",
           "chart/day": r"which day is the (.*) bar\?"}
"""The questions that are answered from one place in the image, and the words that name it."""
EXISTS = {"easy/yes or no": rf".*\b({'|'.join((*SHAPES, *COLORS))})\b.*\?", "shapes/exists": r"is there a (.*)\?"}
"""The questions whether something is there, and the words for it."""


def bare(question: Question) -> Question | None:
    """Of a question in `LOOKUPS` the telling words, its answer to be written right behind them with no chat around.

    "star" and then "red" takes one look: from the word to where it is in the image. "what color is the star?" in a chat
    takes two, as its answer is written seven tokens behind that word: 1,900 steps did not find the first of them while
    nothing rewarded it alone.
    """
    found = re.fullmatch(LOOKUPS.get(question.kind, "no words"), question.text)
    return replace(question, text=" ".join(["", *found.groups()]), bare=True) if found else None


def telling(question: Question) -> int:
    """How many characters of a question have told what it asks for, 0 where that is in no one place."""
    if question.bare:
        return len(question.text)
    found = re.fullmatch((LOOKUPS | EXISTS).get(question.kind, "no words"), question.text, re.IGNORECASE)
    return found.end(found.re.groups) if found else 0


def cells(example: Example, rows: int, columns: int) -> Tensor:
    """What is in each of `rows x columns` cells of the image, `[rows * columns, len(LABELS)]`, 1 where it is there.

    A thing is in a cell if it covers a quarter of it or half of the thing is in it.
    """
    wide, high = example.image.width / columns, example.image.height / rows
    seen = torch.zeros(rows, columns, len(LABELS))
    left, top = np.arange(columns) * wide, np.arange(rows)[:, None] * high
    for (x1, y1, x2, y2), words in example.items:
        across = np.clip(np.minimum(left + wide, x2) - np.maximum(left, x1), 0, None)
        down = np.clip(np.minimum(top + high, y2) - np.maximum(top, y1), 0, None)
        area = down * across
        inside = (area > wide * high / 4) | (area > (x2 - x1) * (y2 - y1) / 2)
        if not inside.any():  # small and on a border
            inside = area >= area.max()
        for word in words:
            seen[..., LABELS.index(word)][torch.from_numpy(inside)] = 1
    return seen.flatten(0, 1)


