"""Scenes with the statistics of photographs: edges and texture at all scales, shading, haze, blur and grain."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from popvlm.mix.drawings import Canvas, tone

Light = Any
"""An array in float32, 0 dark and 1 bright: `[height, width, 1]`, or 3 for colours."""


def fractal(rng: random.Random, width: int, height: int, falloff: float) -> Light:
    """Noise `[height, width, 1]` at all scales, from 0 to 1.

    Args:
        falloff: each octave has 2^-falloff of the amplitude of the one below: 0 is rough as photographs are (amplitude
            falls as one over frequency: Field 1987), 1 is soft as clouds.
    """
    draw = np.random.default_rng(rng.getrandbits(64))
    octaves = max(width, height).bit_length() - 1
    field = np.zeros((2, 2), np.float32)
    for octave in range(1, octaves + 1):
        size = [max(2, -(-side >> (octaves - octave))) for side in (width, height)]
        field = np.asarray(Image.fromarray(field).resize((size[0], size[1]), Image.Resampling.BICUBIC))
        field = field + draw.standard_normal(field.shape, np.float32) * np.float32(2.0 ** (-falloff * octave))
    low, high = np.quantile(field[::4, ::4], (0.005, 0.995)).astype(np.float32)
    return ((field - low) / (high - low)).clip(0, 1)[..., None]


def photograph(rng: random.Random, light: Light) -> Image.Image:
    """What a camera makes of it: darker corners, a little blur, grain and JPEG."""
    height, width = light.shape[:2]
    y, x = _grid(width, height)
    light = light * (1 - np.float32(rng.uniform(0, 0.15)) * ((2 * x - 1) ** 2 + (2 * y - 1) ** 2))
    image = Image.fromarray((light.clip(0, 1) * 255).astype(np.uint8))
    image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8) * max(width, height) / 1000))
    grain = np.random.default_rng(rng.getrandbits(64)).standard_normal((height, width, 1), np.float32)
    noisy, file = np.asarray(image) + grain * rng.uniform(1, 6), BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=rng.randint(60, 95))
    return Image.open(file).convert("RGB")


def landscape(canvas: Canvas) -> Image.Image:
    """Sky and clouds, a sun, ridges that fade into the haze, and before them silhouettes of trees and people."""
    rng, width, height = canvas.rng, canvas.width, canvas.height
    y, x = _grid(width, height)
    horizon, haze = rng.uniform(0.35, 0.6), _colour(rng, 45, rng.randint(60, 85), rng.choice((25, 205, 215, 225, 340)))
    up = (1 - y / horizon).clip(0, 1)
    clouds = (fractal(rng, width, height, 0.8) - rng.uniform(0.3, 0.7)).clip(0, 1) * 2
    sun = np.exp(-((x - rng.random()) ** 2 + (y - rng.uniform(0, horizon)) ** 2) / rng.uniform(0.001, 0.02))
    light = _colour(rng, 55, rng.randint(25, 60), 215) * up + haze * (1 - up)
    light = light + clouds * (0.95 - light) + sun * (1 - light)
    ground = _colour(rng, 35, rng.randint(15, 35), rng.choice((35, 80, 110, 150)))
    rough, layers = fractal(rng, width, height, 0.1), rng.randint(2, 5)
    for layer in range(1, layers + 1):
        near = layer / layers
        ridge = fractal(rng, width, 8, 1)[4] * rng.uniform(0.1, 0.3) * (1.2 - near)
        behind = y < horizon + 0.7 * (1 - horizon) * near ** 2 - ridge.T[..., None]
        here = (rough, rough[:, ::-1], rough[::-1], rough[::-1, ::-1])[layer % 4]
        light = np.where(behind, light, haze * (1 - near) + ground * near * (0.4 + 1.2 * here))
    mask = Image.new("L", (width, height))
    for _ in range(rng.randint(0, 9)):
        foot, at = rng.uniform(horizon + 0.1, 1) * height, rng.random() * width
        (_person if rng.random() < 0.3 else _tree)(rng, ImageDraw.Draw(mask), at, foot, rng.uniform(0.1, 0.4) * height)
    dark = np.asarray(mask)[..., None] / np.float32(255)
    return photograph(rng, light * (1 - dark) + dark * ground * (0.2 + 0.5 * rough))


def _tree(rng: random.Random, pen: ImageDraw.ImageDraw, x: float, y: float, size: float) -> None:
    pen.line((x, y, x + size / 20, y - size * 0.7), 255, max(1, round(size / 14)))
    for _ in range(120):
        at, up, radius = x + rng.gauss(0, 0.13) * size, y - rng.gauss(0.72, 0.13) * size, size * rng.uniform(0.01, 0.04)
        pen.ellipse((at - radius, up - radius, at + radius, up + radius), 255)


def _person(rng: random.Random, pen: ImageDraw.ImageDraw, x: float, y: float, size: float) -> None:
    part = size * rng.uniform(0.04, 0.06)
    pen.ellipse((x - part, y - 10 * part, x + part, y - 8 * part), 255)
    pen.rounded_rectangle((x - 1.4 * part, y - 7.8 * part, x + 1.4 * part, y - 3.5 * part), part, 255)
    for leg in -0.7, 0.7:
        pen.line((x + leg * part, y - 4 * part, x + 1.7 * leg * part, y), 255, max(1, round(part)))


def leaves(canvas: Canvas) -> Image.Image:
    """Dead leaves: shapes of all sizes that hide one another, the simplest model that has a photograph's statistics.

    Their radii have a density of r^-3 (Lee, Mumford and Huang, Occlusion models for natural images, 2001).
    """
    rng, angular = canvas.rng, canvas.rng.random() < 0.5
    hue, spread = rng.randrange(360), rng.choice((25, 60, 180))
    for _ in range(1500):
        radius = max(canvas.width, canvas.height) * 0.011 / (1 - rng.random() * 0.9995) ** 0.5
        x, y, flat = rng.uniform(0, canvas.width), rng.uniform(0, canvas.height), rng.uniform(0.4, 1)
        fill = tone(rng, rng.randint(10, 70), rng.randint(12, 80), round(rng.gauss(hue, spread)) % 360)
        if angular:
            canvas.pen.regular_polygon((x, y, radius), rng.randint(3, 7), flat * 360, fill)
        else:
            canvas.pen.ellipse((x - radius, y - radius * flat, x + radius, y + radius * flat), fill)
    shade = 0.4 + 0.8 * fractal(rng, canvas.width, canvas.height, rng.uniform(0, 0.8))
    return photograph(rng, np.asarray(canvas.image) / np.float32(255) * shade)


def still_life(canvas: Canvas) -> Image.Image:
    """Shaded balls with soft shadows on a wooden table, before something out of focus."""
    rng, width, height = canvas.rng, canvas.width, canvas.height
    back = leaves(Canvas(rng, width // 4, height // 4)).filter(ImageFilter.GaussianBlur(width / 160))
    wood = Image.fromarray(fractal(rng, max(2, width // 16), height, 0.3)[..., 0])
    grain = np.asarray(wood.resize((width, height), Image.Resampling.BICUBIC))[..., None]
    edge = round(height * rng.uniform(0.35, 0.6))
    light = np.asarray(back.resize((width, height))) / np.float32(255)
    light[edge:] = (_colour(rng, 40, 45, rng.randint(15, 45)) * (0.6 + 0.7 * grain))[edge:]
    rough, sun = fractal(rng, width, height, rng.uniform(0, 0.6)), (rng.uniform(-0.6, 0.6), -0.6, 0.55)
    for foot in sorted(rng.uniform(edge * 1.1, height) for _ in range(rng.randint(1, 7))):  # the nearest last
        radius, at = (0.05 + 0.17 * foot / height * rng.random()) * (width * height) ** 0.5, rng.uniform(0, width)
        top, left = max(0, round(foot - 2 * radius)), max(0, round(at - 2.5 * radius))
        box = slice(top, round(foot + radius)), slice(left, round(at + 2.5 * radius))
        patch = light[box]
        v = (np.arange(top, top + patch.shape[0], dtype=np.float32)[:, None, None] - foot + radius) / radius
        u = (np.arange(left, left + patch.shape[1], dtype=np.float32)[None, :, None] - at) / radius
        shadow = np.exp(-(((u + sun[0]) / 1.3) ** 2 + ((v - 0.9) / 0.35) ** 2) ** 2)
        shadow[:max(0, edge - top)] = 0  # it falls on the table only
        square = u * u + v * v
        facing = (u * sun[0] + v * sun[1] + np.sqrt((1 - square).clip(0)) * sun[2]).clip(0)
        skin = _colour(rng, rng.randint(20, 80), rng.randint(35, 60)) * (0.7 + 0.6 * rng.random() * rough[box])
        ball = skin * (0.25 + facing) + facing ** 30 * rng.random()
        light[box] = np.where(square < 1, ball, patch * (1 - 0.6 * shadow))
    return photograph(rng, light)


def _grid(width: int, height: int) -> tuple[Light, Light]:
    """From 0 to 1 downwards, `[height, 1, 1]`, and to the right, `[1, width, 1]`."""
    y, x = (np.linspace(0, 1, side, dtype=np.float32) for side in (height, width))
    return y[:, None, None], x[None, :, None]


def _colour(rng: random.Random, saturation: int, lightness: int, hue: int | None = None) -> Light:
    return np.array(tone(rng, saturation, lightness, hue), np.float32) / 255
