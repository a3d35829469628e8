"""The built-in calibration mix: prompts of many kinds, drawn by code from a seed; no network, no files.

    words.py        what is written, and the prompts without an image
    drawings.py     pages, tables, charts and screens
    photographs.py  scenes with the statistics of photographs
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from PIL import Image

from popvlm.mix import drawings, photographs, words
from popvlm.mix.drawings import Canvas

Messages = list[dict[str, Any]]
"""A chat as `apply_chat_template` takes it: each content a list of parts, images among them."""

KINDS = {"document": 2, "dense text": 2, "table": 2, "chart": 2, "screenshot": 3, "scene": 4, "several images": 2,
         "text": 2, "code": 1}
"""The kinds of prompt, and how many of 20 are of each; the last two have no image."""

DRAWN: dict[str, tuple[Callable[[Canvas], Image.Image], ...]] = {
    "document": (drawings.report, drawings.invoice, drawings.form),
    "dense text": (drawings.page,),
    "table": (drawings.table,),
    "chart": (drawings.chart, drawings.chart, drawings.pie),
    "screenshot": (drawings.dialog, drawings.editor),
    "scene": (photographs.landscape, photographs.leaves, photographs.still_life)}
WRITTEN: dict[str, Callable[[random.Random], list[str]]] = {"text": words.text, "code": words.code}

SIZES = ((256, 256), (448, 448), (672, 448), (480, 640), (640, 480), (896, 896), (768, 1024), (1024, 768), (1344, 756),
         (756, 1344), (1008, 1344), (1344, 1008), (1344, 1344))
"""Width and height of the images, in pixels: 64 to 1,764 of Qwen3-VL's tokens of 32 x 32 pixels."""


def kind_of(index: int, seed: int = 0, kinds: tuple[str, ...] = tuple(KINDS)) -> str:
    """The kind of the `index`-th prompt: dealt from decks in which each of `kinds` is as often as `KINDS` says."""
    deck = [kind for kind in KINDS if kind in kinds for _ in range(KINDS[kind])]
    turn, place = divmod(index, len(deck))
    # Shuffled, or a fit that holds out every fifth prompt would always hold out the same kinds.
    random.Random(f"deck {seed} {turn}").shuffle(deck)
    return deck[place]


def builtin(index: int, seed: int = 0, largest: int = 1344, kinds: tuple[str, ...] = tuple(KINDS)) -> Messages:
    """The `index`-th prompt: the same in every process with the same Python, Pillow and NumPy.

    Args:
        index: 0 or more.
        seed: another seed, other prompts.
        largest: the longest side of an image, in pixels; those that would be longer are drawn smaller.
        kinds: the `KINDS` to draw from.

    Returns:
        A chat that ends with the user's turn; its images are PIL images in RGB.
    """
    kind = kind_of(index, seed, kinds)
    rng = random.Random(f"prompt {seed} {index} {kind}")
    if kind in WRITTEN:
        first, *later = WRITTEN[kind](rng)
        images = []
    else:
        images = _images(rng, kind, largest)
        first, *later = words.about(rng, kind)
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    parts.insert(0 if rng.random() < 0.15 else len(parts), {"type": "text", "text": first})
    turns = [parts, *([{"type": "text", "text": each}] for each in later)]
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(turns)]


def _images(rng: random.Random, kind: str, largest: int) -> list[Image.Image]:
    count = 1
    if kind == "several images":  # of one kind: people compare
        kind, count, largest = rng.choice(tuple(DRAWN)), rng.choice((2, 2, 3, 4)), min(largest, 896)
    images = []
    for _ in range(count):
        size = rng.choice(SIZES)
        scale = min(1, max(largest, 256) / max(size))
        image = rng.choice(DRAWN[kind])(Canvas(rng, *(round(side * scale) for side in size)))
        image.thumbnail((largest, largest))  # one below 256 has no room to draw on
        images.append(image)
    return images
