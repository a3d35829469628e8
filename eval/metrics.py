"""Scores of an answer, each as the benchmark's authors define it: from 0 to 1, for any text whatsoever.

A metric is a function of an answer and a `Target`; `METRICS` names them, as a task's file does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Literal

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Target:
    """What an answer is held against.

    Args:
        answers: the right answers; of a multiple-choice question the letter.
        options: the texts of options A, B, C, ...; none where it is no multiple-choice question.
        box: what must be clicked, (left, top, right, bottom) as shares of the image's width and height.
        order: of the two coordinates in an answer; see `click`.
    """

    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    box: Box | None = None
    order: Literal["xy", "yx"] = "xy"


# ---- VQA accuracy: https://visualqa.org/evaluation.html and its vqaEval.py

NUMBERS = {"none": "0", **{word: str(number) for number, word in enumerate(
    ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"))}}
ARTICLES = {"a", "an", "the"}
PUNCTUATION = ";/[]\"{}()=+\\_-><@`,?!"
ONE_APOSTROPHE = """
    ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's
    isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've
    shouldn't somebody'll somebody's someone'd someone'll someone's something'd something'll that's there'd there're
    there's they'd they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd
    where's where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're
    you've
"""
MORE_APOSTROPHES = """
    couldn't've hadn't've he'd've it'd've mightn't've 'ow's'at she'd've shouldn't've somebody'd've someone'd've
    something'd've there'd've they'd've we'd've who'd've wouldn't've y'all'll y'all'd've you'd've
"""
CONTRACTIONS = {word.replace("'", ""): word for word in ONE_APOSTROPHE.split()} | {
    word[:index] + word[index + 1:]: word for word in MORE_APOSTROPHES.split() for index, letter in enumerate(word)
    if letter == "'"} | {"somebody'd": "somebodyd"}
"""How a contraction is written that lacks an apostrophe; the last entry is the official table's own slip."""


def normalised(text: str) -> str:
    """An answer as the VQA evaluation reads it: one line, lower case, punctuation by its rules, digits for number
    words, no articles, contractions with their apostrophes."""
    text = text.replace("\n", " ").replace("\t", " ").strip()
    grouped = re.search(r"\d,\d", text) is not None
    read = text
    for mark in PUNCTUATION:
        alone = f"{mark} " in text or f" {mark}" in text or grouped
        read = read.replace(mark, "" if alone else " ")
    read = re.sub(r"\.(?!\d)", "", read)
    words = [NUMBERS.get(word, word) for word in read.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def vqa_accuracy(answer: str, target: Target) -> float:
    """The mean, over the annotators left out one at a time, of min(matches among the others / 3, 1).

    Answers are normalised always, also where all annotators agree: the official code does so since its second version
    for the model's answer, and what it compares with must be treated alike. With fewer than four annotators, of whom
    no three others could match, any match counts 1.
    """
    said = normalised(answer)
    matches = [normalised(one) == said for one in target.answers]
    if len(matches) < 4:
        return float(any(matches))
    return sum(min((sum(matches) - match) / 3, 1) for match in matches) / len(matches)


# ---- ANLS: Biten et al., "Scene Text Visual Question Answering" (ICCV 2019), equation 1


def anls(answer: str, target: Target, threshold: float = 0.5) -> float:
    """1 - Levenshtein distance / length of the longer text, the best over the right answers; 0 where that distance is
    `threshold` of the length or more. Case and runs of white space do not count."""
    said = " ".join(answer.lower().split())
    best = 0.0
    for right in target.answers:
        right = " ".join(right.lower().split())
        longest = max(len(said), len(right))
        if not longest:
            best = 1.0
        elif abs(len(said) - len(right)) < threshold * longest:  # else too far already; a novel costs nothing
            distance = _levenshtein(said, right) / longest
            best = max(best, 1 - distance if distance < threshold else 0.0)
    return best


def _levenshtein(one: str, other: str) -> int:
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        corner, row[0] = row[0], number
        for column, right in enumerate(other, 1):
            corner, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, corner + (letter != right))
    return row[-1]


# ---- relaxed accuracy: Masry et al., "ChartQA" (ACL Findings 2022), section 5.1

NUMBER = re.compile(r"[-+]?(\d{1,3}(,\d{3})+|\d+)?(\.\d*)?(e[-+]?\d+)?")


def relaxed_accuracy(answer: str, target: Target, tolerance: float = 0.05) -> float:
    """1 where a number is within 5 % of the right one, or a text is the right one but for case.

    A number may have thousands separators, a currency sign and a percent sign. 45 % is 0.45; where only one of the
    two has the sign it may also stand for 45, since ChartQA's own labels leave the sign out. Where 0 is right only 0
    is.
    """
    return float(any(_relaxed(answer.strip().rstrip("."), right.strip(), tolerance) for right in target.answers))


def _relaxed(said: str, right: str, tolerance: float) -> bool:
    ours, theirs = _number(said), _number(right)
    if ours is None or theirs is None:
        return said.lower() == right.lower()
    readings = {ours}
    if said.endswith("%") != right.endswith("%"):
        readings.add(ours * 100 if said.endswith("%") else ours / 100)
    return any(abs(reading - theirs) <= tolerance * abs(theirs) for reading in readings)


def _number(text: str) -> float | None:
    """The number that a text is, a percent sign taken for a hundredth; None where it is no number."""
    percent = text.endswith("%")
    digits = text.rstrip("%").lstrip("$€£").strip()
    if not any(letter.isdigit() for letter in digits) or len(digits) > 40 or not NUMBER.fullmatch(digits.lower()):
        return None
    try:
        return float(digits.replace(",", "")) / (100 if percent else 1)
    except ValueError:
        return None


# ---- multiple choice


def choice(answer: str, target: Target) -> float:
    """1 where the answer names the right option, by its letter or by its text.

    A question of such a benchmark that has no options (MMMU, RealWorldQA) is scored by `open_answer`.
    """
    right = target.answers[0].strip() if target.answers else ""
    if target.options or (len(right) == 1 and right in ascii_uppercase):
        return float(chosen(answer, target.options or tuple("" for _ in ascii_uppercase)) == right)
    return open_answer(answer, target)


def chosen(answer: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer names; None where it names none or several.

    In turn: a letter with which it begins ("B", "(B)", "B. left"), one that it says is the answer, one in brackets, an
    option's text, one option's text within it, a capital that stands alone.
    """
    letters = ascii_uppercase[:len(options)]
    if not letters:
        return None
    text, anywhere = answer.strip().strip("*`\"' \n"), f"[{letters}]"
    if begin := re.match(rf"\(?({anywhere})(?=[).:,*\s]*$|[).:]|\s*\n)", text) or (
            len(text) == 1 and re.match(f"({anywhere})", text.upper())):
        return begin[1]
    named = re.findall(rf"(?i:answer|option|choice)(?i:\s+is)?\s*:?\s*\**\s*\(?({anywhere})(?![\w'])", text)
    if not named:
        named = re.findall(rf"\bis\s+\**\(?({anywhere})[\s.*)]*$", text)
    if not named:
        named = re.findall(rf"\(({anywhere})\)", text)
    if named:
        return named[-1] if len(set(named)) == 1 else None
    said = _words(text)
    shown = [_words(option) for option in options]
    if said and shown.count(said) == 1:
        return letters[shown.index(said)]
    within = [index for index, option in enumerate(shown) if option and f" {option} " in f" {said} "]
    # "not a red apple" names one option, where another is "apple".
    within = [index for index in within if not any(index != other and f" {shown[index]} " in f" {shown[other]} "
                                                  for other in within)]
    if len(within) == 1:
        return letters[within[0]]
    # Not A and I, which are words.
    alone = {letter for letter in re.findall(r"(?<![\w'])[B-HJ-Z](?![\w'])", text) if letter in letters}
    return alone.pop() if len(alone) == 1 and not within else None


def _words(text: str) -> str:
    return " ".join(re.findall(r"[\w.%-]+", text.lower().rstrip(". ")))


def open_answer(answer: str, target: Target) -> float:
    """1 where a short free answer is right: MMMU's rule, without its search for the sentence that concludes.

    A number is right to two decimals wherever it stands in the answer; a text where it is the answer, or stands in
    it. Of `answers` any will do.
    """
    said = _words(answer)
    found = re.findall(r"-?(?:\d[\d,]{0,30}(?:\.\d{1,30})?|(?<!\d)\.\d{1,30})(?:[eE][+-]?\d{1,2}(?!\d))?", answer)
    numbers = {round(float(number.replace(",", "")), 2) for number in found}
    for right in target.answers:
        number = _number(right.strip())
        if answer.strip() and answer.strip() == right.strip():
            return 1.0
        if number is not None and not right.strip().endswith("%"):
            if round(number, 2) in numbers or NUMBERS.get(said) == right.strip():
                return 1.0
        elif _words(right) and f" {_words(right)} " in f" {said} ":
            return 1.0
    return 0.0


# ---- yes or no: Li et al., "Evaluating Object Hallucination in Large Vision-Language Models" (POPE, EMNLP 2023)


def yes_no(answer: str, target: Target) -> float:
    """1 where the answer says yes, or no, and that is right. One that says neither (a refusal, say) is wrong."""
    return float(bool(target.answers) and said_yes_no(answer) == target.answers[0].strip().lower())


def said_yes_no(answer: str) -> Literal["yes", "no", ""]:
    """Its first word, or else what its first sentence says: no where "no" or "not" is in it, as POPE's evaluation
    does, yes where "yes" is. POPE's takes all else for a yes, also a refusal and silence; here it is neither."""
    words = re.findall(r"[\w']+", answer.strip().split(".")[0].lower())
    if words and words[0] in ("yes", "no"):
        return "yes" if words[0] == "yes" else "no"
    if {"no", "not"} & set(words):
        return "no"
    return "yes" if "yes" in words else ""


def f1(pairs: Iterable[tuple[str, Target]]) -> dict[str, float]:
    """Precision, recall and F1 of "yes", and how often it was said, over a whole benchmark's answers; 0 for 0 / 0."""
    said = [(said_yes_no(answer), target.answers[0].strip().lower()) for answer, target in pairs]
    hits = sum(ours == theirs == "yes" for ours, theirs in said)
    ours, theirs = (sum(pair[side] == "yes" for pair in said) for side in (0, 1))
    return {"precision": hits / ours if ours else 0.0, "recall": hits / theirs if theirs else 0.0,
            "F1": 2 * hits / (ours + theirs) if ours + theirs else 0.0, "yes": ours / len(said) if said else 0.0}


# ---- click in a box: Cheng et al., "SeeClick" (ScreenSpot, ACL 2024)

COORDINATE = re.compile(r"(?<![\w.])-?\d{1,9}(?:\.\d{1,9})?(?![\w])")


def click(answer: str, target: Target) -> float:
    """1 where the point, or the middle of the box, that the answer gives is inside the target's box.

    Coordinates run from 0 to 1000 over the image's width and height. Qwen3-VL gives x first (`point_2d`, `bbox_2d`);
    Gemma-3, like Gemini, y first (`point`, `box_2d`): `target.order`. Coordinates that are all at most 1, with a
    decimal point, are shares of the image.
    """
    found = pointed(answer)
    if found is None or target.box is None:
        return 0.0
    x, y = found if target.order == "xy" else found[::-1]
    left, top, right, bottom = target.box
    return float(left <= x <= right and top <= y <= bottom)


def pointed(answer: str) -> tuple[float, float] | None:
    """The first point in an answer, or the middle of its first box, as shares of the image, in the answer's order."""
    for group in (*re.findall(r"[\[(]([^\[\]()]{1,120})[\])]", answer), answer[:400]):
        numbers = COORDINATE.findall(group)[:4]
        if len(numbers) < 2:
            continue
        values = [float(number) for number in numbers]
        if not (max(values) <= 1 and any("." in number for number in numbers)):
            values = [value / 1000 for value in values]
        if len(values) == 4:
            return (values[0] + values[2]) / 2, (values[1] + values[3]) / 2
        return values[0], values[1]
    return None


# ---- exact text


def exact(answer: str, target: Target) -> float:
    """1 where the answer is one of the right ones, but for case, white space and a full stop."""
    said = " ".join(answer.lower().split()).rstrip(".")
    return float(any(" ".join(right.lower().split()).rstrip(".") == said for right in target.answers))


METRICS: dict[str, Callable[[str, Target], float]] = {
    "vqa": vqa_accuracy, "anls": anls, "relaxed": relaxed_accuracy, "choice": choice, "yes_no": yes_no,
    "click": click, "exact": exact}
EXTRAS: dict[str, Callable[[Iterable[tuple[str, Target]]], dict[str, float]]] = {"yes_no": f1}
"""Figures of a whole benchmark that are no mean over answers."""
