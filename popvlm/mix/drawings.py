"""Pages, tables, charts and screens, drawn with Pillow and the font that it has built in."""

from __future__ import annotations

import random
from functools import cache
from math import sin

from PIL import Image, ImageColor, ImageDraw, ImageFilter, ImageFont

from popvlm.mix import words

Tone = tuple[int, int, int]
Box = tuple[float, float, float, float]
_font = cache(ImageFont.load_default)


def tone(rng: random.Random, saturation: int, lightness: int, hue: int | None = None) -> Tone:
    """A colour, of any hue unless one is given."""
    hue = rng.randrange(360) if hue is None else hue
    red, green, blue, *_ = ImageColor.getrgb(f"hsl({hue},{saturation}%,{lightness}%)")
    return red, green, blue


class Canvas:
    """An image to draw on, in pixels. `em` is the size of its text and `accent` its one loud colour."""

    def __init__(self, rng: random.Random, width: int, height: int) -> None:
        self.rng, self.width, self.height = rng, width, height
        self.em = max(10, round((width * height) ** 0.5 / rng.uniform(36, 72)))
        self.dark = rng.random() < 0.2
        self.paper = tone(rng, 15, 13 if self.dark else rng.randint(95, 100))
        self.ink = tone(rng, 20, 88 if self.dark else 14)
        self.faint = tone(rng, 10, 35 if self.dark else 78)
        self.accent = tone(rng, 65, 55 if self.dark else 42)
        self.image = Image.new("RGB", (width, height), self.paper)
        self.pen = ImageDraw.Draw(self.image)

    def text(self, x: float, y: float, said: str, size: float = 1, ink: Tone | None = None, anchor: str = "la",
             bold: bool = False) -> float:
        """Writes a line and returns where the next one begins."""
        scale = round(self.em * size)
        for shift in (0, scale / 20)[:1 + bold]:  # the font has no bold
            self.pen.text((x + shift, y), said, ink or self.ink, _font(scale), anchor)
        return y + 1.4 * scale

    def flow(self, x: float, y: float, width: float, bottom: float, said: str) -> float:
        """Writes a paragraph in lines of `width`, as far as `bottom`, and returns where the next one begins."""
        line = ""
        for word in said.split():
            longer = f"{line} {word}".strip()
            if line and self.length(longer) > width:
                if y + 2.8 * self.em > bottom:
                    break
                y, longer = self.text(x, y, line), word
            line = longer
        return self.text(x, y, line) + 0.7 * self.em

    def dot(self, x: float, y: float, radius: float, fill: Tone) -> None:
        self.pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)

    def length(self, said: str) -> float:
        return _font(self.em).getlength(said)

    def grid(self, y: float, rows: list[list[str]], step: float) -> float:
        """A table as wide as the page, its first row the head; returns its bottom."""
        left, right = 0.06 * self.width, 0.94 * self.width
        column = (right - left) / (len(rows[0]) + 1)  # the first is twice as wide
        for i, row in enumerate(rows):
            if i == 0 or (i % 2 == 0 and not self.dark):
                self.pen.rectangle((left, y, right, y + step), self.accent if i == 0 else tone(self.rng, 0, 94))
            ink, middle = self.paper if i == 0 else self.ink, y + step / 2
            self.text(left + self.em / 2, middle, row[0], 0.9, ink, "lm", bold=i == 0)
            for j, cell in enumerate(row[1:], 3):
                self.text(left + j * column - self.em / 2, middle, cell, 0.9, ink, "rm", bold=i == 0)
            y += step
            self.pen.line((left, y, right, y), self.faint)
        return y


def report(c: Canvas) -> Image.Image:
    """A title, headings, paragraphs and lists, in one column or two."""
    edge, low = c.width * 0.08, c.height * 0.93
    top = c.text(edge, edge, c.rng.choice(words.WHAT).capitalize(), 1.5, c.accent, bold=True)
    top = c.text(edge, top, f"{c.rng.choice(words.NAMES)}, {c.rng.choice(words.FIRMS)}", 0.9) + c.em
    columns = c.rng.choice((1, 2)) if c.width > 30 * c.em else 1
    wide = (c.width - 2 * edge + c.em) / columns - c.em
    for column in range(columns):
        x, y = edge + column * (wide + c.em), top
        while y < low - 4 * c.em:
            if c.rng.random() < 0.4:
                heading = f"{c.rng.randint(1, 9)}. {c.rng.choice(words.WHAT).capitalize()}"
                y = c.text(x, y, heading, 1.15, c.accent, bold=True)
            y = c.flow(x, y, wide, low, c.rng.choice((words.paragraph(c.rng), "-  " + words.sentence(c.rng))))
    c.text(c.width / 2, c.height - c.em, str(c.rng.randint(1, 90)), 0.8, anchor="mm")
    return _scanned(c)


def page(c: Canvas) -> Image.Image:
    """Nothing but small text."""
    c.em = max(10, round(c.em * 0.6))
    columns = max(1, min(c.rng.randint(1, 3), c.width // (24 * c.em)))
    wide = (c.width - 2 * c.em) / columns
    for column in range(columns):
        y = 2.0 * c.em
        while y < c.height - 4 * c.em:
            y = c.flow(2 * c.em + column * wide, y, wide - 2 * c.em, c.height - c.em, c.rng.choice(words.passages()))
    return _scanned(c)


def invoice(c: Canvas) -> Image.Image:
    left, right = c.width * 0.06, c.width * 0.94
    c.text(right, left, "INVOICE", 1.8, c.accent, "ra", bold=True)
    y = c.text(left, left, c.rng.choice(words.FIRMS), 1.3, bold=True)
    y = c.text(left, y, f"{c.rng.randint(1, 200)} Harbour Road, {c.rng.choice(words.PLACES)}", 0.9) + c.em
    for label, value in (("No.", str(c.rng.randint(10000, 99999))), ("Bill to", c.rng.choice(words.NAMES)),
                         ("Due", f"{c.rng.randint(1, 28)} {c.rng.choice(words.MONTHS)} 2025")):
        c.text(left, y, label, ink=c.accent)
        y = c.text(left + 5 * c.em, y, value)
    goods = c.rng.sample(words.GOODS, max(1, min(12, int((c.height - y - 8 * c.em) / (1.7 * c.em)))))
    rows = [[thing, str(c.rng.randint(1, 40)), words.amount(c.rng)] for thing in goods]
    y = c.grid(y + c.em, [["Item", "Qty", "Price"], *rows], 1.7 * c.em) + c.em / 2
    for label in "Subtotal", "Tax 19 %", "Total":
        c.text(right - 12 * c.em, y, label, bold=label == "Total")
        y = c.text(right, y, words.amount(c.rng), anchor="ra", bold=label == "Total")
    return _scanned(c)


def form(c: Canvas) -> Image.Image:
    """Fields filled in by hand, boxes to tick and a signature."""
    edge, pen = c.width * 0.07, tone(c.rng, 70, 70 if c.dark else 35, 225)
    y = c.text(edge, edge, f"{c.rng.choice(words.FIRMS)}: application", 1.3, c.accent, bold=True) + c.em
    for label in c.rng.sample(words.FIELDS, len(words.FIELDS)):
        if y > c.height - 8 * c.em:
            break
        y = c.text(edge, y, label, 0.85)
        c.pen.rectangle((edge, y, c.width - edge, y + 1.8 * c.em), outline=c.faint, width=2)
        value = c.rng.choice((*words.NAMES[:4], *words.PLACES[:4], *(str(c.rng.randint(10**6, 10**9)),) * 4, "", ""))
        c.text(edge + c.em / 2, y + 0.9 * c.em, value, 1.05, pen, "lm")
        y += 2.4 * c.em
    for x, label in (edge, "I agree to the terms"), (c.width / 2, "Send me news"):
        c.pen.rectangle((x, y, x + c.em, y + c.em), outline=c.ink, width=2)
        if c.rng.random() < 0.6:
            c.pen.line((x, y + c.em / 2, x + c.em / 3, y + c.em, x + c.em * 1.3, y - c.em / 4), pen, 3)
        c.text(x + 1.5 * c.em, y, label, 0.85)
    waves = [(c.rng.uniform(0.1, 0.7), c.rng.uniform(0, 6)) for _ in range(3)]
    c.pen.line([(edge + c.em * step / 10, y + 4 * c.em + c.em / 2 * sum(sin(step * often + at) for often, at in waves))
                for step in range(90)], pen, 2)
    return _scanned(c)


def _scanned(c: Canvas) -> Image.Image:
    """The page as it is, or as a scanner gives it: askew, shaded, a little blurred."""
    if c.dark or c.rng.random() < 0.6:
        return c.image
    turned = c.image.rotate(c.rng.uniform(-2, 2), Image.Resampling.BICUBIC, fillcolor=c.faint)
    shade = Image.linear_gradient("L").rotate(c.rng.choice((0, 90, 180, 270))).resize(c.image.size)
    darker = turned.point(lambda value: round(value * 0.7))
    return Image.composite(darker, turned, shade).filter(ImageFilter.GaussianBlur(c.em / 40))


def table(c: Canvas) -> Image.Image:
    columns, step = max(1, min(c.rng.randint(2, 6), c.width // (5 * c.em) - 2)), c.rng.uniform(1.6, 2.6) * c.em
    y = c.text(0.06 * c.width, c.em, f"{c.rng.choice(words.GOODS).capitalize()}, 2025", 1.2, bold=True) + c.em / 2
    names = c.rng.choice((words.NAMES, words.GOODS, words.PLACES))
    style = c.rng.choice(("{:,.2f}", "{:.0f}", "{:.1f} %"))
    rows = [[c.rng.choice(names), *(style.format(c.rng.uniform(-20, 400)) for _ in range(columns))]
            for _ in range(int((c.height - y) / step) - 1)]
    c.grid(y, [["", *c.rng.sample(words.MONTHS, columns)], *rows], step)
    return c.image


def chart(c: Canvas) -> Image.Image:
    """Bars or lines of up to three series, over months."""
    left, top, right, bottom = 4.5 * c.em, 4.5 * c.em, c.width - 1.5 * c.em, c.height - 3 * c.em
    c.text(c.width / 2, c.em, f"Sales of {c.rng.choice(words.GOODS)}", 1.2, anchor="ma", bold=True)
    ceiling, lines, hue = c.rng.choice((10, 50, 100, 2000)), c.rng.random() < 0.5, c.rng.randrange(360)
    for tick in range(6):
        y = bottom + (top - bottom) * tick / 5
        c.pen.line((left, y, right, y), c.faint)
        c.text(left - c.em / 2, y, f"{ceiling * tick // 5:,}", 0.85, anchor="rm")
    months = max(3, min(12, int((right - left) / (3.2 * c.em))))
    step, start = (right - left) / months, c.rng.randrange(12)
    for month in range(months):
        c.text(left + (month + 0.5) * step, bottom + c.em / 2, words.MONTHS[(start + month) % 12], 0.85, anchor="ma")
    series = c.rng.sample(words.PLACES, c.rng.randint(1, 3))
    for place, name in enumerate(series):
        colour, x = tone(c.rng, 60, 50, (hue + 130 * place) % 360), left + place * (right - left) / 3
        c.pen.rectangle((x, 3 * c.em, x + c.em * 0.8, 3.8 * c.em), colour)
        c.text(x + 1.2 * c.em, 3.4 * c.em, name, 0.85, anchor="lm")
        heights = [bottom + (top - bottom) * c.rng.uniform(0.05, 1) for _ in range(months)]
        if lines:
            c.pen.line([(left + (month + 0.5) * step, y) for month, y in enumerate(heights)], colour, 1 + c.em // 8)
            for month, y in enumerate(heights):
                c.dot(left + (month + 0.5) * step, y, c.em / 4, colour)
        else:
            wide = 0.7 * step / len(series)
            for month, y in enumerate(heights):
                x = left + (month + 0.15) * step + place * wide
                c.pen.rectangle((x, y, x + 0.9 * wide, bottom), colour)
    return c.image


def pie(c: Canvas) -> Image.Image:
    c.text(c.width / 2, c.em, f"Orders from {c.rng.choice(words.PLACES)}", 1.2, anchor="ma", bold=True)
    names = c.rng.sample(words.GOODS, c.rng.randint(3, 7))
    shares = [c.rng.uniform(0.2, 1) for _ in names]
    radius, start, hue = min(c.width / 4, c.height / 2 - 3 * c.em), c.rng.uniform(0, 360), c.rng.randrange(360)
    x, y, key = c.width * 0.28, c.height / 2 + c.em, c.width * 0.58
    for place, name in enumerate(names):
        share, colour = shares[place] / sum(shares), tone(c.rng, 55, 55, (hue + place * 360 // len(names)) % 360)
        c.pen.pieslice((x - radius, y - radius, x + radius, y + radius), start, start + 360 * share, colour, c.paper, 2)
        row = y + (place - len(names) / 2) * 1.8 * c.em
        c.pen.rectangle((key, row, key + c.em, row + c.em), colour)
        c.text(key + 1.5 * c.em, row, f"{name} {share:.0%}", 0.9)
        start += 360 * share
    return c.image


def _window(c: Canvas, title: str) -> Box:
    """A window with its title and menu, before a desktop; returns the box inside."""
    c.image.paste(tone(c.rng, 45, 30), (0, 0, c.width, c.height))
    c.image.paste(tone(c.rng, 45, 65), mask=Image.linear_gradient("L").resize(c.image.size))
    left, top = c.rng.uniform(0, 0.06) * c.width, c.rng.uniform(0, 0.06) * c.height
    right, bottom, bar = c.width - c.rng.uniform(1, left + 1), c.height - c.rng.uniform(1, top + 1), 2.2 * c.em
    c.pen.rounded_rectangle((left, top, right, bottom), c.em / 2, c.paper, c.faint)
    c.pen.rounded_rectangle((left, top, right, top + bar), c.em / 2, c.faint)
    c.text((left + right) / 2, top + bar / 2, title, 0.9, anchor="mm", bold=True)
    for place, hue in enumerate((5, 45, 120)):
        c.dot(left + (1.2 + 1.4 * place) * c.em, top + bar / 2, 0.4 * c.em, tone(c.rng, 75, 58, hue))
    x = left + c.em
    for word in words.MENU:
        if x + 4 * c.em < right:
            c.text(x, top + 1.5 * bar, word, 0.9, anchor="lm")
            x += c.length(word) + c.em
    return left, top + 2 * bar, right, bottom


def dialog(c: Canvas) -> Image.Image:
    """Settings: some text, switches and buttons."""
    left, top, right, bottom = _window(c, c.rng.choice(words.FIRMS))
    x, low, white = left + 2 * c.em, bottom - 6 * c.em, (255, 255, 255)
    y = c.text(x, top + c.em, c.rng.choice(("Settings", "Your account", "Unsaved changes")), 1.6, bold=True)
    y = c.flow(x, y, right - left - 4 * c.em, low, words.paragraph(c.rng)) + c.em
    for option in c.rng.sample(words.WHAT, c.rng.randint(4, 12)):
        if y > low:
            break
        on = c.rng.random() < 0.5
        c.pen.rounded_rectangle((x, y, x + 2.2 * c.em, y + 1.2 * c.em), 0.6 * c.em, c.accent if on else c.faint)
        c.dot(x + (1.6 if on else 0.6) * c.em, y + 0.6 * c.em, 0.45 * c.em, c.paper)
        y = c.text(x + 3 * c.em, y, option.capitalize()) + 0.6 * c.em
    x, y = right - 2 * c.em, bottom - 3.6 * c.em
    for place, action in enumerate(c.rng.sample(words.ACTIONS, 3)):
        wide = c.length(action) + 2 * c.em
        if x - wide > left:
            fill = tone(c.rng, 70, 45, 0 if place == 0 else None)  # one is red
            c.pen.rounded_rectangle((x - wide, y, x, y + 2.2 * c.em), c.em / 2, fill)
            c.text(x - wide / 2, y + 1.1 * c.em, action, ink=white, anchor="mm", bold=True)
            x -= wide + c.em
    return c.image


def editor(c: Canvas) -> Image.Image:
    """Code with numbered lines and coloured words."""
    c.em = max(10, round(c.em * 0.75))
    left, top, right, bottom = _window(c, "main.py")
    hue, first, advance, step = c.rng.randrange(360), c.rng.randint(1, 900), c.em * 0.62, 1.35 * c.em
    keyword, string, comment = (tone(c.rng, 70, 65 if c.dark else 35, (hue + turn) % 360) for turn in (0, 90, 200))
    for row, line in enumerate(words.source(c.rng, int((bottom - top) / step) - 1)):
        x, y = left + 4 * c.em, top + (row + 0.3) * step
        c.text(x - c.em, y, str(first + row), 0.85, c.faint, "ra")
        for column, letter in enumerate(line[:int((right - x) / advance)]):  # the font is not monospaced
            word = line[:column].rpartition(" ")[2] + line[column:].partition(" ")[0]
            ink = (comment if "#" in line[:column + 1] else string if "'" in word or '"' in word else
                   keyword if word in ("def", "class", "if", "else:", "for", "in", "return", "not", "raise") else c.ink)
            c.text(x + (column + 0.5) * advance, y, letter, ink=ink, anchor="ma")
    return c.image
