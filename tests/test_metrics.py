"""Each metric on cases worked out by hand from its definition, and all of them on answers that are none."""

from __future__ import annotations

import pytest
from metrics import METRICS, Target, chosen, f1, normalised, pointed, said_yes_no


def score(metric, answer, *right, **more):
    return METRICS[metric](answer, Target(right, **more))


@pytest.mark.parametrize(("text", "read"), [
    ("The Cat", "cat"), ("an apple", "apple"), ("two dogs", "2 dogs"), ("None", "0"), ("ten", "10"),
    ("dont know", "don't know"), ("couldnt've", "couldn't've"), ("hes", "he's"), ("y'allll", "y'all'll"),
    ("red, blue", "red blue"),           # a mark beside a space goes
    ("red/blue", "red blue"),            # one between letters becomes a space
    ("1,000", "1000"),                   # in a text with a comma between digits all marks go
    ("3.5 m.", "3.5 m"), ("St. Ives", "st ives"), ("t-shirt", "t shirt"), ("what?!", "what"),
    ("two\nlines\tand", "2 lines and"), ("  ", ""), ("日本、東京", "日本、東京"),
])
def test_vqa_normalisation(text, read):
    assert normalised(text) == read


@pytest.mark.parametrize(("matching", "expected"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1), (10, 1)])
def test_vqa_accuracy_of_ten_annotators(matching, expected):
    # k of 10 match: k subsets leave one of them out (k - 1 matches), 10 - k do not (k matches).
    others = [f"other {index}" for index in range(10 - matching)]
    assert score("vqa", "Yes.", *["yes"] * matching, *others) == pytest.approx(expected)


def test_vqa_accuracy_normalises_also_where_all_agree():
    assert score("vqa", "2", *["Two"] * 10) == 1
    assert score("vqa", "the dont", *["don't"] * 10) == 1
    assert score("vqa", "cat", "cat") == score("vqa", "cat", "dog", "A cat!") == 1  # fewer than four annotators
    assert score("vqa", "cat", "dog", "cow") == 0


@pytest.mark.parametrize(("said", "right", "expected"), [
    ("hello", ["hello"], 1), ("HELLO ", ["hello"], 1), ("helo", ["hello"], 1 - 1 / 5), ("hexxo", ["hello"], 1 - 2 / 5),
    ("hexx", ["hello"], 0),                         # 3 / 5 apart
    ("ab", ["ax"], 0),                              # 1 / 2 apart: the threshold itself gives 0
    ("kitten", ["sitting"], 1 - 3 / 7), ("helo", ["help me out", "hello"], 1 - 1 / 5), ("", [""], 1), ("", ["a"], 0),
    ("東京都", ["東京部"], 1 - 1 / 3), ("two  words", ["two words"], 1), ("x", [], 0),
])
def test_anls(said, right, expected):
    assert score("anls", said, *right) == pytest.approx(expected)


@pytest.mark.parametrize(("said", "right", "expected"), [
    ("105", "100", 1), ("95", "100", 1), ("106", "100", 0), ("94.9", "100", 0), ("-105", "-100", 1), ("105", "-100", 0),
    ("1,234", "1234", 1), ("1234", "1,234.5", 1), ("1,23", "123", 0),
    ("45%", "45", 1), ("45", "45%", 1), ("0.45", "45%", 1), ("45%", "0.45", 1), ("45%", "46%", 1), ("45 %", "60%", 0),
    ("45%", "0.0045", 0), ("0.45", "4500%", 0),
    ("0", "0", 1), ("0.0", "0", 1), ("0.01", "0", 0), ("$5", "5", 1), ("2019.", "2019", 1),
    ("Yes", "yes", 1), ("blue", "dark blue", 0), ("nan", "nan", 1), ("inf", "1", 0), ("1e3", "1000", 1),
    ("", "5", 0), ("[1, 2]", "[1, 2]", 1), ("9" * 5000, "9", 0), ("٣", "3", 1), ("²", "2", 0),
])
def test_relaxed_accuracy(said, right, expected):
    assert score("relaxed", said, right) == expected


OPTIONS = "the cat", "the dog", "a red bird", "bird"


@pytest.mark.parametrize(("said", "letter"), [
    ("B", "B"), ("b", "B"), ("(B)", "B"), ("B.", "B"), ("B. the dog", "B"), ("B) the cat?", "B"), ("**B**", "B"),
    ("The answer is B.", "B"), ("Answer: (C)", "C"), ("the correct option is D", "D"), ("I think it is (C).", "C"),
    ("the dog", "B"), ("The Dog.", "B"), ("It shows the dog.", "B"), ("a red bird", "C"), ("bird", "D"),
    ("I see a red bird", "C"), ("It is C", "C"),
    ("**Answer:** A", "A"), ("**Answer:** C", "C"), ("It is A", "A"), ("It is **A**.", "A"),
    ("A dog and B", "B"), ("A or B or C", None), ("the cat and the dog", None), ("E", None), ("", None),
    ("I cannot help with that.", None), ("A picture of something", None), ("answer is A or answer is B", None),
    ("Z" * 9000, None), ("猫", None), ("B\nbecause of the ears", "B"),
])
def test_multiple_choice(said, letter):
    assert chosen(said, OPTIONS) == letter
    assert score("choice", said, "B", options=OPTIONS) == (letter == "B")


def test_choice_questions_without_options():
    assert score("choice", "C. left", "C") == 1  # RealWorldQA: the options are in the question's text
    assert score("choice", "D", "C") == 0
    assert score("choice", "Downhill.", "downhill") == 1
    assert score("choice", "about 3.14159 metres", "3.14") == 1
    assert score("choice", "3.2", "3.14") == score("choice", "30", "3") == score("choice", "", "3") == 0
    assert score("choice", "three", "3") == 1
    for right in "6.02e23", ".5", "-.25", "1e-3", "(a, b)":
        assert score("choice", right, right) == score("choice", f"It is {right} then", right) == 1
    assert score("choice", "6.02e22", "6.02e23") == score("choice", "5", ".5") == 0
    assert score("choice", "the left ventricle", "right ventricle", "left ventricle") == 1  # any of MMMU's answers


@pytest.mark.parametrize(("answer", "said"), [
    ("Yes", "yes"), ("no.", "no"), ("Yes, there is no doubt", "yes"), ("There is not a dog. Yes", "no"),
    ("There is no dog", "no"), ("I would say yes", "yes"), ("A dog", ""), ("", ""), ("I'm sorry.", ""), ("はい", ""),
    ("nothing", ""), ("YES\nit is", "yes"),
])
def test_yes_no(answer, said):
    assert said_yes_no(answer) == said
    assert score("yes_no", answer, "Yes") == (said == "yes")


def test_f1():
    answers = [("yes", "yes"), ("yes", "yes"), ("no", "yes"), ("yes", "no"), ("no", "no"), ("who knows", "yes")]
    found = f1((said, Target((right,))) for said, right in answers)
    assert found == pytest.approx({"precision": 2 / 3, "recall": 2 / 4, "F1": 2 * 2 / (3 + 4), "yes": 3 / 6})
    assert f1([]) == f1([("no", Target(("no",)))]) == {"precision": 0, "recall": 0, "F1": 0, "yes": 0}


@pytest.mark.parametrize(("answer", "point"), [
    ('{"point_2d": [250, 500], "label": "send 3"}', (0.25, 0.5)), ("(250, 500)", (0.25, 0.5)), ("250 500", (0.25, 0.5)),
    ('```json\n[{"bbox_2d": [200, 400, 300, 600]}]\n```', (0.25, 0.5)), ("click(0.25, 0.5)", (0.25, 0.5)),
    ("[0, 1]", (0, 0.001)), ("<point>250,500</point>", (0.25, 0.5)), ("x=250, y=500", (0.25, 0.5)),
    ("in the 2d corner", None), ("", None), ("[250]", None), ("I cannot", None), ("(" * 9000, None),
    ("1" * 9000, None),
])
def test_point(answer, point):
    assert pointed(answer) == (None if point is None else pytest.approx(point))


def test_click_in_both_conventions():
    box = 0.2, 0.45, 0.3, 0.55
    qwen, gemma = '{"point_2d": [250, 500]}', '{"box_2d": [450, 200, 550, 300]}'
    assert score("click", qwen, box=box) == score("click", gemma, box=box, order="yx") == 1
    assert score("click", gemma, box=box) == score("click", qwen, box=box, order="yx") == 0
    assert score("click", "[300, 550]", box=box) == 1  # the border is inside
    assert score("click", "[301, 550]", box=box) == 0


def test_exact():
    assert score("exact", "Yes.", "yes") == score("exact", " dark  Blue", "dark blue") == 1
    assert score("exact", "yes it is", "yes") == 0


@pytest.mark.parametrize("answer", [
    "", " \n\t", "word " * 20_000, "a\n" * 200, "答えは、はい。", "أزرق", "🙂", "\x00\ud800",
    "I'm sorry, but I can't help with that.", "((((", "[[1,", "%", "-", ".", ",", "1" * 9999,
    "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE} ½ ①", "1,,2"])
@pytest.mark.parametrize("metric", METRICS)
def test_any_answer_scores(metric, answer):
    for target in (Target(("yes",)), Target(("B",), OPTIONS), Target(("12.5%", "1,000")), Target(), Target(("",)),
                   Target(("x",), box=(0.1, 0.2, 0.3, 0.4))):
        assert 0 <= METRICS[metric](answer, target) <= 1
