"""Scenes drawn by code from a seed, with questions whose answers need several steps.

Five kinds: coloured shapes and the relations between them, printed signs, tables, bar charts, and diagrams of boxes
and arrows. A split's name is part of every seed, so "test" shares no scene with "train".

    python eval/scenes.py FOLDER        # a few of each kind, to look at
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import atan2, cos, dist, pi, sin
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

COLORS = {"red": (222, 48, 42), "green": (58, 168, 70), "blue": (44, 84, 214), "yellow": (240, 206, 40),
          "teal": (30, 160, 160), "brown": (134, 82, 40), "gray": (128, 128, 128), "black": (24, 24, 24)}
SHAPES = "circle", "triangle", "rectangle", "star", "cross"
WORDS = ("stop", "exit", "open", "shut", "sale", "milk", "taxi", "bank", "park", "cafe", "book", "fish", "left", "push",
         "pull", "door", "help", "news", "shop", "food", "rent", "free", "gold", "hotel", "water", "bread", "music",
         "train", "beach", "north", "south", "quiet")
NAMES = "Ann", "Bob", "Cat", "Dan", "Eve", "Fay", "Gus", "Hal"
GOODS = "pies", "hats", "peas", "nuts", "eggs", "figs"
DAYS = "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"
LETTERS = "ABCDEFGH"

LABELS = (*COLORS, *SHAPES, *WORDS, *NAMES, *GOODS, *DAYS, *LETTERS, *(f"to {letter}" for letter in LETTERS),
          *(f"_{digit}" for digit in range(10)), *(f"{digit}_" for digit in range(1, 10)))
"""All words by which `Scene.items` name things; numbers as their ones (`_7`) and tens (`4_`)."""

SIZES = (256, 256), (320, 224), (224, 320), (288, 256), (256, 288)
"""Canvas sizes in pixels at scale 1: 64 to 72 visual tokens of 32 x 32 pixels."""
SQUARE = ((256, 256),)
"""The same for models that make every image square."""
CELL = 32
"""Side in pixels of the grid that print is set on: a visual token of a model with patches of 16 merged by two."""


@dataclass(frozen=True)
class Question:
    """A question, its one right answer, and what it asks for (`shapes/nearest`, say). `bare`: no chat around it."""

    kind: str
    text: str
    answer: str
    bare: bool = False


@dataclass
class Scene:
    """A picture and all that can be asked about it.

    `items` are the boxes `(left, top, right, bottom)` in pixels of what was drawn, each with the words that name it:
    what a vision tower can be taught to see before it is asked anything.
    """

    image: Image.Image
    questions: list[Question] = field(default_factory=list)
    items: list[tuple[tuple[float, float, float, float], tuple[str, ...]]] = field(default_factory=list)


def scene(split: str, index: int, kind: str | None = None, scale: float | None = None,
          sizes: tuple[tuple[int, int], ...] = SIZES, most: int = 6) -> Scene:
    """The `index`-th scene of a split, the same on every call.

    Args:
        split: "train", "test" or any other name; it seeds the scene together with `index`.
        index: 0 or more.
        kind: one of `KINDS`; by default drawn from the seed.
        scale: 1 gives 64 to 72 visual tokens, 4 gives about 1,024; by default drawn from the seed, mostly 1.
        sizes: the canvas sizes at scale 1 to draw from.
        most: coloured shapes in a scene of them.
    """
    rng = random.Random(f"{split}-{index}")
    kind = kind or rng.choice(tuple(KINDS))
    drawn = rng.choices((1, 1.25, 1.5, 2), (12, 2, 1, 1))[0]
    canvas = Canvas(rng, rng.choice(sizes), scale or drawn, most)
    questions = KINDS[kind](canvas)
    rng.shuffle(questions)
    return Scene(canvas.image, [Question(f"{kind}/{name}", text, answer) for name, text, answer in questions],
                 canvas.items)


class Canvas:
    """A drawing in units of 1/32 of a visual token's side at scale 1, rendered at `scale` pixels a unit."""

    def __init__(self, rng: random.Random, size: tuple[int, int], scale: float, most: int) -> None:
        self.rng, self.scale, self.most = rng, scale, most
        self.width, self.height = size
        pixels = tuple(round(side * scale / 32) * 32 for side in size)
        self.image = Image.new("RGB", pixels, tuple(rng.randint(228, 255) for _ in range(3)))
        self.draw = ImageDraw.Draw(self.image)
        self.items: list[tuple[tuple[float, float, float, float], tuple[str, ...]]] = []

    def see(self, box: tuple[float, float, float, float], *words: str) -> None:
        left, top, right, bottom = (side * self.scale for side in box)
        self.items.append(((left, top, right, bottom), words))

    def shape(self, shape: str, color: str, x: float, y: float, radius: float) -> None:
        fill, s = COLORS[color], self.scale
        if shape == "circle":
            self.draw.ellipse([(x - radius) * s, (y - radius) * s, (x + radius) * s, (y + radius) * s], fill=fill)
        elif shape == "cross":
            arm = radius * 0.36
            for half_x, half_y in (radius, arm), (arm, radius):
                self.draw.rectangle([(x - half_x) * s, (y - half_y) * s, (x + half_x) * s, (y + half_y) * s], fill=fill)
        else:
            if shape == "rectangle":
                corners = [(-0.95, -0.7), (0.95, -0.7), (0.95, 0.7), (-0.95, 0.7)]
            elif shape == "triangle":
                corners = [(cos(angle), sin(angle)) for angle in (-pi / 2, pi / 6, 5 * pi / 6)]
            else:
                corners = [(cos(k * pi / 5 - pi / 2) * (0.42 if k % 2 else 1),
                            sin(k * pi / 5 - pi / 2) * (0.42 if k % 2 else 1)) for k in range(10)]
            turn = self.rng.uniform(-0.35, 0.35)
            turned = [(u * cos(turn) - v * sin(turn), u * sin(turn) + v * cos(turn)) for u, v in corners]
            self.draw.polygon([((x + u * radius) * s, (y + v * radius) * s) for u, v in turned], fill=fill)
        self.see((x - radius, y - radius, x + radius, y + radius), shape, color)

    def text(self, text: str, x: float, y: float) -> None:
        """Black print near a point. Like print it has one size in pixels at every scale: 16 a letter, on the grid of
        `CELL`, so that towers of a few layers learn to read it within an hour."""
        digits = text.isdigit()
        shown = text.rjust(2) if digits else text
        left = max(0, min(round(x * self.scale / CELL - len(shown) / 4) * CELL, self.image.width - 16 * len(shown)))
        if len(shown) == 1:
            left = int(x * self.scale / CELL) * CELL + 8
        middle = self.middle(y) * self.scale
        font = ImageFont.load_default(21)
        for number, letter in enumerate(shown):
            self.draw.text((left + 16 * number + 8, middle), letter, COLORS["black"], font, anchor="mm")
        words = [f"_{text[-1]}"] + [f"{text[0]}_"] * (len(text) > 1) if digits else [text]
        box = (left, middle - CELL / 2, left + 16 * len(shown), middle + CELL / 2)
        self.items.append((box, tuple(words)))

    def middle(self, at: float) -> float:
        """The middle of the grid's cell that a coordinate is in."""
        return (int(at * self.scale / CELL) + 0.5) * CELL / self.scale

    def edge(self, at: float) -> float:
        """The grid's line nearest to a coordinate."""
        return round(at * self.scale / CELL) * CELL / self.scale

    def frame(self, box: tuple[float, float, float, float], color: str, width: float = 3, fill: str | None = None
              ) -> None:
        self.draw.rectangle([side * self.scale for side in box], COLORS.get(fill or "", fill), COLORS[color],
                            round(width * self.scale))

    def line(self, points: list[tuple[float, float]], color: str = "black", width: float = 2) -> None:
        self.draw.line([(x * self.scale, y * self.scale) for x, y in points], COLORS[color], round(width * self.scale))


Asked = list[tuple[str, str, str]]


def shapes(canvas: Canvas) -> Asked:
    rng, asked = canvas.rng, []
    pairs = rng.sample([(color, shape) for color in COLORS for shape in SHAPES], rng.randint(2, canvas.most))
    placed: list[tuple[str, str, str, float, float]] = []
    for color, shape in pairs:
        for _ in range(60):
            radius = rng.uniform(19, 29)
            x, y = rng.uniform(radius, canvas.width - radius), rng.uniform(radius, canvas.height - radius)
            if all(dist((x, y), other[3:]) > 62 for other in placed):
                canvas.shape(shape, color, x, y, radius)
                placed.append((f"{color} {shape}", color, shape, x, y))
                break
    names = [name for name, *_ in placed]
    colors, kinds = [one[1] for one in placed], [one[2] for one in placed]
    for name, color, shape, x, y in placed:
        if kinds.count(shape) == 1:
            asked.append(("color", f"what color is the {shape}?", color))
        if colors.count(color) == 1:
            asked.append(("shape", f"what shape is {color}?", shape))
        same = [other for other, its, *_ in placed if its == color and other != name]
        if len(same) == 1:
            asked.append(("same color", f"what has the same color as the {name}?", same[0]))
        others = sorted((dist((x, y), other[3:]), other) for other in placed if other[0] != name)
        if len(others) > 1 and others[1][0] > 1.25 * others[0][0]:
            nearest = others[0][1]
            asked.append(("nearest", f"what is nearest to the {name}?", nearest[0]))
            if kinds.count(shape) == 1:
                asked.append(("nearest color", f"what color is the shape nearest to the {shape}?", nearest[1]))
    for one, other in combinations(placed, 2):
        if rng.random() < 0.4 and abs(one[3] - other[3]) > 20:
            asked.append(("left of", f"is the {one[0]} left of the {other[0]}?", "yes" if one[3] < other[3] else "no"))
        if rng.random() < 0.4 and abs(one[4] - other[4]) > 20:
            asked.append(("above", f"is the {one[0]} above the {other[0]}?", "yes" if one[4] < other[4] else "no"))
    for shape in sorted({rng.choice(SHAPES), rng.choice(kinds)}):
        asked.append(("count", f"how many {shape}s are there?".replace("crosss", "crosses"), str(kinds.count(shape))))
    for color in sorted({rng.choice(tuple(COLORS)), rng.choice(colors)}):
        asked.append(("count", f"how many {color} shapes are there?", str(colors.count(color))))
    asked.append(("count", "how many shapes are there?", str(len(placed))))
    for there in sorted({rng.choice(names), f"{rng.choice(colors)} {rng.choice(kinds)}"}):
        asked.append(("exists", f"is there a {there}?", "yes" if there in names else "no"))
    across = sorted(placed, key=lambda one: one[3])
    if all(right[3] - left[3] > 12 for left, right in pairwise(across)):
        asked.append(("leftmost", "what is the leftmost shape?", across[0][0]))
        asked.append(("rightmost", "what is the rightmost shape?", across[-1][0]))
        if len(across) <= 4:
            asked.append(("list", "list the shapes from left to right.", ", ".join(one[0] for one in across)))
    return asked


def signs(canvas: Canvas) -> Asked:
    rng, asked = canvas.rng, []
    colors = rng.sample(tuple(COLORS), 4)
    count = rng.randint(1, 4 if canvas.height > 256 else 3)
    height = canvas.height / count
    texts = [rng.choice(WORDS) if rng.random() < 0.7 else str(rng.randint(1, 99)) for _ in range(count)]
    for row, (text, color) in enumerate(zip(texts, colors)):
        x, y = canvas.width / 2 + rng.uniform(-35, 35), canvas.middle((row + 0.5) * height)
        half_x, half_y = rng.uniform(62, 84), min(height / 2 - 4, rng.uniform(22, 34))
        box = (x - half_x, y - half_y, x + half_x, y + half_y)
        canvas.frame(box, color, 6, "white")
        canvas.see(box, color)
        canvas.text(text, x, y)
        asked.append(("read", f"what does the {color} sign say?", text))
        if texts.count(text) == 1:
            asked.append(("color", f"what color is the sign that says {text}?", color))
        if row:
            asked.append(("above", f"what is above the {color} sign?", f"{colors[row - 1]} sign"))
            asked.append(("read above", f"what does the sign above the {color} one say?", texts[row - 1]))
    asked.append(("count", "how many signs are there?", str(count)))
    asked.append(("list", "read the signs from top to bottom.", ", ".join(texts)))
    return asked


def table(canvas: Canvas) -> Asked:
    rng, asked = canvas.rng, []
    rows, columns = rng.sample(NAMES, rng.randint(2, 4)), rng.sample(GOODS, rng.randint(1, 2))
    wide, high = canvas.width / (len(columns) + 1), min(52.0, canvas.height / (len(rows) + 1))
    values = {(row, column): rng.randint(1, 20) for row in rows for column in columns}
    for j, column in enumerate(columns):
        canvas.text(column, (j + 1.5) * wide, high / 2)
    for i, row in enumerate(rows):
        canvas.text(row, wide / 2, (i + 1.5) * high)
        line = canvas.edge((i + 1) * high)
        canvas.line([(4, line), (canvas.width - 4, line)], "gray", 1)
        for j, column in enumerate(columns):
            value = str(values[row, column])
            canvas.text(value, (j + 1.5) * wide, (i + 1.5) * high)
            asked.append(("cell", f"how many {column} does {row} have?", value))
    for column in columns:
        ranked = sorted(rows, key=lambda row: values[row, column])
        if values[ranked[-1], column] > values[ranked[-2], column]:
            asked.append(("most", f"who has the most {column}?", ranked[-1]))
        if values[ranked[0], column] < values[ranked[1], column]:
            asked.append(("fewest", f"who has the fewest {column}?", ranked[0]))
        for row in rows:
            if sum(values[other, column] == values[row, column] for other in rows) == 1:
                asked.append(("who", f"who has {values[row, column]} {column}?", row))
    asked.append(("list", "who is in the table?", ", ".join(rows)))
    return asked


def chart(canvas: Canvas) -> Asked:
    rng, asked = canvas.rng, []
    first = rng.randint(0, 2)
    days = DAYS[first:first + rng.randint(3, 4 if canvas.width > 256 else 3)]
    heights, colors = rng.sample(range(1, 9), len(days)), rng.sample(tuple(COLORS), len(days))
    cell = CELL / canvas.scale
    left, bottom = cell, canvas.height - cell
    wide, three = (canvas.width - left) / len(days) // cell * cell, (bottom - 16) * 3 / 8 // cell * cell
    for level in range(0, 9, 3):  # a number stands on its line
        y = bottom - level / 3 * three
        canvas.line([(left, y), (canvas.width, y)], "gray", 1)
        canvas.text(str(level), cell / 2, y - cell / 2)
    for k, (day, height, color) in enumerate(zip(days, heights, colors)):
        x, top = left + (k + 0.5) * wide, bottom - height / 3 * three
        box = (x - wide * 0.3, top, x + wide * 0.3, bottom)
        canvas.frame(box, color, 1, color)
        canvas.see(box, color)
        canvas.see((box[0], top, box[2], top + 8), f"_{height}")
        canvas.text(day, x, bottom + cell / 2)
        asked.append(("value", f"what is the value of {day}?", str(height)))
        asked.append(("color", f"what color is the bar of {day}?", color))
        asked.append(("day", f"which day is the {color} bar?", day))
    ranked = sorted(zip(heights, days, colors))
    asked.append(("tallest", "which day has the tallest bar?", ranked[-1][1]))
    asked.append(("lowest", "which day has the lowest bar?", ranked[0][1]))
    asked.append(("tallest color", "what color is the tallest bar?", ranked[-1][2]))
    for one, other in combinations(range(len(days)), 2):
        if rng.random() < 0.4:
            asked.append(("higher", f"is {days[one]} higher than {days[other]}?",
                          "yes" if heights[one] > heights[other] else "no"))
    asked.append(("list", "list the days from lowest to highest.", ", ".join(day for _, day, _ in ranked)))
    return asked


def diagram(canvas: Canvas) -> Asked:
    rng, asked = canvas.rng, []
    spots = [(column, row) for column in range(3) for row in range(3)]
    count = rng.randint(3, 5)
    letters, cells = rng.sample(LETTERS, count), rng.sample(spots, count)
    wide, high = canvas.width / 3, canvas.height / 3
    middle = {letter: (canvas.middle((column + 0.5) * wide + rng.uniform(-8, 8)),
                       canvas.middle((row + 0.5) * high + rng.uniform(-8, 8)))
              for letter, (column, row) in zip(letters, cells)}
    leads: dict[str, str] = {}
    for one, other in rng.sample([(a, b) for a in letters for b in letters if a != b], count * (count - 1)):
        (x1, y1), (x2, y2) = middle[one], middle[other]
        length = dist((x1, y1), (x2, y2))
        clear = all(abs((x2 - x1) * (y1 - y) - (x1 - x) * (y2 - y1)) / length > 30
                    or not -20 < ((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1)) / length < length + 20
                    for letter, (x, y) in middle.items() if letter not in (one, other))
        if one not in leads and leads.get(other) != one and clear and rng.random() < 0.8:
            leads[one] = other
            toward = atan2(y2 - y1, x2 - x1)
            start, end = ((x1 + 24 * cos(toward), y1 + 24 * sin(toward)),
                          (x2 - 26 * cos(toward), y2 - 26 * sin(toward)))
            canvas.line([start, end], "black", 3)
            for side in (-0.45, 0.45):
                canvas.line([end, (end[0] - 14 * cos(toward + side), end[1] - 14 * sin(toward + side))], "black", 3)
    for letter, (x, y) in middle.items():
        canvas.frame((x - 19, y - 19, x + 19, y + 19), "blue", 3, "white")
        canvas.text(letter, x, y)
        if letter in leads:
            # The box is told where its arrow goes: reading the arrow is the tower's work, following it the decoder's.
            canvas.see((x - 19, y - 19, x + 19, y + 19), f"to {leads[letter]}")
        asked.append(("next", f"where does the arrow from {letter} lead?", leads.get(letter, "nowhere")))
        if leads.get(letter) in leads:
            asked.append(("two steps", f"where do two arrows from {letter} lead?", leads[leads[letter]]))
    for one, other in rng.sample([(a, b) for a in letters for b in letters if a != b], 2):
        asked.append(("linked", f"is there an arrow from {one} to {other}?",
                      "yes" if leads.get(one) == other else "no"))
    into = [a for a, b in leads.items() if list(leads.values()).count(b) == 1]
    for source in into[:2]:
        asked.append(("from", f"which box has an arrow to {leads[source]}?", source))
    asked.append(("count", "how many boxes are there?", str(count)))
    return asked


KINDS = {"shapes": shapes, "signs": signs, "table": table, "chart": chart, "diagram": diagram}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in KINDS:
        for number in range(3):
            shown = scene("show", number, name)
            shown.image.save(folder / f"{name}-{number}.png")
            print(f"{name}-{number}.png", *(f"  {question.text} {question.answer}" for question in shown.questions),
                  sep="\n")
