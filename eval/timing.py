"""Time to first token and tokens per second of every setting on the same prompts, in turn, by the prompt's length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from settings import FULL, Setting
from tasks import Sample
from torch import nn

from popvlm.answer import answer
from popvlm.samples import UnreadableImage, opened

Row = dict[str, Any]
ROUNDS = 3
"""Times that each prompt is asked of each setting; the median counts."""


def measure(model: Any, processor: Any, settings: Sequence[Setting], samples: Sequence[Sample], visual: Sequence[int],
            max_new_tokens: int, progress: Callable[[Sequence[Sample]], Iterable[Sample]] = iter) -> list[Row]:
    """Asks each sample alone of every setting, in turn, so that all meet the same machine.

    Args:
        model: without a plan.
        processor: its own.
        settings: the full model among them.
        samples: to time.
        visual: the visual tokens of each.
        max_new_tokens: the longest answer, for the tokens per second.
        progress: goes around the loop over samples.

    Returns:
        A row a sample: `prompt` and `visual` tokens, `first_token_s` (from the decoded images on, with the processor
        and the vision encoder) and `tokens_per_s` by setting's name, and `vision_s` of the full model. A sample whose
        image cannot be read has none.
    """
    rows: list[Row] = []
    known = {sample.key: tokens for sample, tokens in zip(samples, visual)}
    for sample in progress(samples):
        try:
            images = [opened(image) for image in sample.images]
        except UnreadableImage:
            continue
        first: dict[str, list[float]] = {setting.name: [] for setting in settings}
        rates: dict[str, list[float]] = {setting.name: [] for setting in settings}
        prompt = 0
        for turn in range(ROUNDS):
            # Forth and back, so that none always follows the same other.
            for setting in settings if turn % 2 == 0 else reversed(settings):
                with setting.put(model):
                    answer(processor, model, images, sample.prompt, max_new_tokens=1)  # warms up
                    got = answer(processor, model, images, sample.prompt, max_new_tokens=max_new_tokens)
                first[setting.name].append(got.first_token_s)
                if got.tokens_per_s is not None:
                    rates[setting.name].append(got.tokens_per_s)
                prompt = got.prompt_tokens
        shares = []
        for _ in range(ROUNDS):
            with clocked(vision_encoder(model)) as spent:
                whole = answer(processor, model, images, sample.prompt, max_new_tokens=1).first_token_s
            shares.append(spent[0] / whole)
        rows.append({"prompt": prompt, "visual": known[sample.key],
                     "first_token_s": {name: median(times) for name, times in first.items()},
                     "tokens_per_s": {name: median(rate) if rate else None for name, rate in rates.items()},
                     "vision_share": median(shares)})
    return rows


def summary(rows: Sequence[Row]) -> list[Row]:
    """The medians by prompt length, from one power of two to the next, and of all; `speedup` is the median of each
    prompt's own ratio to the full model."""
    if not rows:
        return []
    bins: dict[int, list[Row]] = {}
    for row in rows:
        bins.setdefault(row["prompt"].bit_length(), []).append(row)
    made = [(f"{2 ** (bits - 1)} to {2 ** bits - 1}", some) for bits, some in sorted(bins.items())]
    return [{"prompt tokens": name, "prompts": len(some), "visual": median(row["visual"] for row in some),
             "vision_share": median(row["vision_share"] for row in some),
             "settings": {setting: _medians(some, setting) for setting in rows[0]["first_token_s"]}}
            for name, some in [*made, ("all", list(rows))]]


def _medians(rows: Sequence[Row], setting: str) -> dict[str, float | None]:
    rates = [row["tokens_per_s"][setting] for row in rows if row["tokens_per_s"][setting] is not None]
    return {"first_token_s": median(row["first_token_s"][setting] for row in rows),
            "speedup": median(row["first_token_s"][FULL] / row["first_token_s"][setting] for row in rows),
            "tokens_per_s": median(rates) if rates else None}


def vision_encoder(model: Any) -> nn.Module:
    """The vision encoder of a model that popvlm knows."""
    inner = model.model
    found = getattr(inner, "visual", None) or getattr(inner, "vision_tower", None)
    assert found is not None, f"{type(model).__name__} has no vision encoder that this script knows"
    return found


@contextmanager
def clocked(module: nn.Module) -> Iterator[list[float]]:
    """The seconds that a module takes inside the block, in a list of one."""
    spent, begun = [0.0], [0.0]

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def begin(*_: Any) -> None:
        begun[0] = now()

    def end(*_: Any) -> None:
        spent[0] += now() - begun[0]

    hooks = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()
