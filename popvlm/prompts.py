"""Prompts of a wanted length: real ones through a processor, or of the right form for a model that has none here."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from popvlm.answer import prompt
from popvlm.mix.drawings import Canvas
from popvlm.mix.photographs import landscape

PASSAGE = """Look at the picture and describe it in one paragraph: what is near and what is far, where the light comes \
from, which colours there are, what people are doing, and what a visitor would notice first. Then say what time of \
day it may be, and why, in a few words. """


class Prompt(NamedTuple):
    """A prompt, or a batch of prompts alike: how many visual and text tokens and images each has, and what makes it.

    `make` returns the arguments of `generate`, on the model's device. What it takes is preprocessing.
    """

    visual: int
    text: int
    images: int
    make: Callable[[], dict[str, Any]]


def photograph() -> Image.Image:
    """A drawn scene with the statistics of a photograph, 1024 x 1024."""
    return landscape(Canvas(random.Random(0), 1024, 1024))


def real(processor: Any, model: Any, image: Image.Image, length: int, text: int, batch: int) -> Prompt:
    """Through the model's processor: pictures of about `length - text` tokens and a question of the rest.

    The processor has the last word on how many tokens a picture is, so the prompt says what came of it.

    Args:
        processor: the model's, or its tokenizer where it reads no images.
        model: its config tells how large a picture must be, and its device where the tensors go.
        image: the picture; scaled to the size that has the wanted number of tokens.
        length: tokens of the prompt.
        text: of these, tokens of the question with the chat template around it. Of a text-only model all are.
        batch: how many such prompts.

    Raises:
        ModelError: the processor refuses it.
    """
    images = _sized(model.config, image, length - text) if hasattr(processor, "tokenizer") else []
    wanted = text if images else length

    def made(question: str, batch: int) -> dict[str, Any]:
        return dict(prompt(processor, images, question, batch).to(model.device))

    tokenizer = getattr(processor, "tokenizer", processor)
    words = tokenizer(PASSAGE, add_special_tokens=False)["input_ids"]
    around = made(PASSAGE, 1)["input_ids"]
    room = max(1, wanted - int((around.numel() - _visual(model.config, around)) - len(words)))
    question = tokenizer.decode((words * math.ceil(room / len(words)))[:room])
    ids = made(question, 1)["input_ids"]
    visual = _visual(model.config, ids)
    return Prompt(visual, ids.numel() - visual, len(images), lambda: made(question, batch))


def synthetic(model: Any, length: int, text: int, batch: int, *, pixels: bool) -> Prompt:
    """Random pixels and words in the form that the model's processor gives them.

    Args:
        model: its config and its forward's arguments say what that form is.
        length: tokens of a prompt. With pixels, its images are the largest of at most that many tokens (Qwen3-VL), or
            as many as it takes (Gemma-3, whose images all have one number of tokens).
        text: of these, tokens of the text, those that mark an image's begin and end too. Of a text-only model all are.
        batch: how many prompts; each has words of its own.
        pixels: False leaves the images out and keeps their tokens, so that the decoder has them to read and the vision
            encoder has nothing to do.
    """
    config, draw = model.config, torch.Generator().manual_seed(0)
    grids = _grids(config, length - text, pixels) if hasattr(config, "vision_config") else []
    counts = [height * width for height, width in grids]
    words = max(1, text - 2 * len(counts)) if counts else length
    row: list[int] = []
    for count in counts:
        row += [_begin(config), *[config.image_token_id] * count, _end(config)]
    last = min([config.get_text_config().vocab_size, *([_begin(config), _end(config), config.image_token_id]
                                                       if counts else [])])
    written = torch.randint(3, last, (batch, words), generator=draw)
    ids = torch.cat([torch.tensor(row, dtype=torch.long).expand(batch, -1), written], 1)
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if counts:
        for name in {"mm_token_type_ids", "token_type_ids"} & set(inspect.signature(type(model).forward).parameters):
            inputs[name] = (ids == config.image_token_id).long()
    if counts and pixels:
        inputs |= _pixels(config, grids, batch, draw)
    dtype, device = model.dtype, model.device
    placed = {name: part.to(device, dtype if part.is_floating_point() else None) for name, part in inputs.items()}
    return Prompt(sum(counts), ids.shape[1] - sum(counts), len(counts), lambda: dict(placed))


def _tokens_an_image(config: Any) -> int | None:
    """Of a model whose images all have one number of tokens (Gemma-3); None where that hangs on their size."""
    return getattr(config, "mm_tokens_per_image", None)


def _grids(config: Any, visual: int, pixels: bool) -> list[tuple[int, int]]:
    """The images of a prompt of `visual` visual tokens: height and width of each, in tokens."""
    if each := _tokens_an_image(config):
        side = math.isqrt(each)
        whole, rest = divmod(visual, each)
        return [(side, side)] * (whole + (pixels and rest > 0)) + [(1, rest)] * (rest > 0 and not pixels)
    return [_nearest(visual)] if pixels else [(1, visual)]


def _nearest(visual: int) -> tuple[int, int]:
    """The height and width, in tokens, of an image at most twice as wide as high that has `visual` tokens, or nearly:
    the squarest of those that have the most."""
    side = math.isqrt(visual)
    heights = range(side, max(1, math.isqrt(visual // 2)) - 1, -1)
    height = max(heights, key=lambda height: height * (visual // height))
    return height, visual // height


def _pixels(config: Any, grids: list[tuple[int, int]], batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    vision = config.vision_config
    if _tokens_an_image(config):
        shape = len(grids) * batch, vision.num_channels, vision.image_size, vision.image_size
        return {"pixel_values": torch.randn(shape, generator=draw)}
    merge = vision.spatial_merge_size
    sizes = torch.tensor([(1, merge * height, merge * width) for height, width in grids] * batch)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size ** 2
    return {"pixel_values": torch.randn(int(sizes.prod(-1).sum()), patch, generator=draw), "image_grid_thw": sizes}


def _sized(config: Any, image: Image.Image, visual: int) -> list[Image.Image]:
    """The picture, as large or as often as it takes to be about `visual` tokens."""
    if each := _tokens_an_image(config):
        return [image] * math.ceil(visual / each)
    vision = config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    height, width = _nearest(visual)
    return [image.resize((side * width, side * height))]


def _visual(config: Any, ids: Tensor) -> int:
    return int((ids == config.image_token_id).sum()) if hasattr(config, "image_token_id") else 0


def _begin(config: Any) -> int:
    return config.boi_token_index if _tokens_an_image(config) else config.vision_start_token_id


def _end(config: Any) -> int:
    return config.eoi_token_index if _tokens_an_image(config) else config.vision_end_token_id
