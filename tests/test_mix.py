"""The built-in mix: reproducible, of all kinds and sizes, and photographs that have a photograph's statistics."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from popvlm.mix import KINDS, builtin, kind_of
from popvlm.mix.photographs import fractal

ROOT = Path(__file__).parents[1]
DIGEST = """
import hashlib, sys, types
popvlm = sys.modules["popvlm"] = types.ModuleType("popvlm")  # without torch, which takes seconds to import
popvlm.__path__ = [sys.argv[1]]
from popvlm.mix import builtin
digest = hashlib.sha256()
for index in range(16):
    for turn in builtin(index, seed=3, largest=64):
        for part in turn["content"]:
            digest.update(part["text"].encode() if part["type"] == "text" else part["image"].tobytes())
print(digest.hexdigest())
"""


def parts(messages, kind):
    return [part[kind] for turn in messages for part in turn["content"] if part["type"] == kind]


def test_every_process_draws_the_same():
    seen = {subprocess.run([sys.executable, "-c", DIGEST, str(ROOT / "popvlm")], capture_output=True, text=True,
                           check=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(seen) == 1
    assert len(seen.pop()) == 65


def test_other_seeds_and_indices_draw_others():
    drawn = [builtin(index, seed, largest=64) for seed in (0, 1) for index in range(10)]
    seen = {(*parts(each, "text"), *(image.tobytes() for image in parts(each, "image"))) for each in drawn}
    assert len(seen) == len(drawn)


def test_twenty_prompts_have_each_kind_as_often_as_stated():
    assert sum(KINDS.values()) == 20
    for start in 0, 20, 180:
        assert Counter(kind_of(index) for index in range(start, start + 20)) == KINDS
    assert Counter(kind_of(index, kinds=("code", "text")) for index in range(30)) == {"text": 20, "code": 10}
    assert [kind_of(index, seed=1) for index in range(20)] != [kind_of(index) for index in range(20)]


def test_every_fifth_prompt_is_of_every_kind():
    assert set(map(kind_of, range(4, 200, 5))) == set(KINDS)  # what a fit holds out


@pytest.mark.parametrize("largest", [48, 256, 400])
def test_a_prompt_is_a_chat_that_ends_with_the_user(largest):
    turns = set()
    for index in range(20):
        messages, kind = builtin(index, 5, largest), kind_of(index, 5)
        roles = [turn["role"] for turn in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(text.strip() for text in parts(messages, "text"))
        images = parts(messages, "image")
        assert all(image.mode == "RGB" and max(image.size) <= largest for image in images)
        count = range(0, 1) if kind in ("text", "code") else range(2, 5) if kind == "several images" else range(1, 2)
        assert len(images) in count, kind
        turns.add(len(messages))
    assert {1, 3} <= turns  # some with a further turn


def test_images_are_small_and_large_upright_and_wide(monkeypatch):
    monkeypatch.setattr("popvlm.mix.DRAWN", {"chart": (lambda canvas: canvas.image,)})
    sizes = [image.size for index in range(60) for image in parts(builtin(index, 2, kinds=("chart",)), "image")]
    areas = [width * height for width, height in sizes]
    assert min(areas) == 256 * 256
    assert max(map(max, sizes)) == 1344
    assert 500 * 1024 < np.mean(areas) < 1100 * 1024  # some hundred to a thousand visual tokens of 32 x 32 pixels
    assert {np.sign(width - height) for width, height in sizes} == {-1, 0, 1}


def test_only_the_asked_kinds():
    kinds = ("chart", "code")
    for index in range(9):
        assert bool(parts(builtin(index, 0, 64, kinds), "image")) == (kind_of(index, 0, kinds) == "chart")


def falloff(image):
    """The exponent of the amplitude spectrum over frequency, from a line fitted to it on logarithmic scales."""
    gray = np.asarray(image.convert("L"), float)[:192, :192]
    window = np.hanning(192)[:, None] * np.hanning(192)
    spectrum = np.abs(np.fft.fft2((gray - gray.mean()) * window))
    rows, columns = np.meshgrid(np.fft.fftfreq(192) * 192, np.fft.fftfreq(192) * 192, indexing="ij")
    radius = np.hypot(rows, columns)
    bands = [(radius >= low) & (radius < low * 1.5) for low in 1.5 ** np.arange(3, 10)]
    centres, means = zip(*((radius[band].mean(), spectrum[band].mean()) for band in bands))
    return np.polyfit(np.log(centres), np.log(means), 1)[0]


@pytest.mark.parametrize("exponent", [0, 0.5, 1])
def test_fractal_noise_falls_as_it_says(exponent):
    # An octave's amplitude is spread over frequencies whose number grows as the square.
    fields = [fractal(random.Random(seed), 256, 224, exponent)[..., 0] for seed in range(6)]
    slopes = [falloff(Image.fromarray((field * 255).astype(np.uint8))) for field in fields]
    assert np.mean(slopes) == pytest.approx(-1 - exponent, abs=0.25)
    assert all((field.min(), field.max()) == (0, 1) for field in fields)


def test_scenes_have_the_spectrum_of_photographs():
    # About one over frequency in photographs (Field 1987): -0.7 to -1.6, one by one. White noise has 0.
    images = [image for index in range(18) for image in parts(builtin(index, 1, 256, ("scene",)), "image")]
    slopes = [falloff(image) for image in images if min(image.size) >= 192]
    assert len(slopes) >= 8
    assert -1.7 < np.mean(slopes) < -0.9, slopes
    shades = [len(np.unique(np.asarray(image.convert("L")))) for image in images]
    assert min(shades) > 100
    shuffled = images[0].resize((256, 256)).effect_spread(200)  # the same colours
    assert falloff(shuffled) > np.mean(slopes) + 0.5
