"""The two stages that both small models go through: the tower learns to see, then the whole learns to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from data import Example, batch, cells, easy, sampled
from loop import train
from packing import IGNORED, Packed, right
from scenes import KINDS, Question, scene
from torch import Tensor, nn

QUESTIONS = 8
"""Questions an image in training."""


class Reader(Protocol):
    """How a model reads examples: many questions about an image in one sequence."""

    def see(self, examples: list[Example]) -> dict[str, Tensor]:
        """What the vision tower takes."""

    def grids(self, seen: dict[str, Tensor]) -> list[tuple[int, int]]:
        """Rows and columns of each image's visual tokens."""

    def read(self, examples: list[Example], questions: list[list[Question]]) -> tuple[Packed, dict[str, Any]]:
        """What the model takes, and how it is packed."""

    def logits(self, packed: Packed, inputs: dict[str, Any]) -> Tensor:
        """Logits at the positions that have a target, `[P, V]`."""


def sees(reader: Reader, seer: nn.Module, work: Path, *, steps: int, size: int, lr: float) -> None:
    """Trains `seer`, which gives lists of label logits `[cells, labels]`, to name what is in each cell of an image."""

    def loss_of(step: int) -> tuple[Tensor, dict[str, Any]]:
        _, examples = batch(step, size)
        inputs = reader.see(examples)
        wanted = torch.cat([cells(one, *grid) for one, grid in zip(examples, reader.grids(inputs))])
        found = seer(**inputs)
        losses = [F.binary_cross_entropy_with_logits(names, wanted, reduction="sum") for names in found]
        return sum(losses) / len(losses) / wanted.sum(), {
            "recall": round(float((found[0][wanted > 0] > 0).float().mean()), 3),
            "precision": round(float(wanted[found[0] > 0].mean()), 3)}

    train(seer, loss_of, steps=steps, lr=lr, folder=work, name="sight", warmup=30)


def answers(reader: Reader, net: nn.Module, work: Path, *, steps: int, size: int, lr: float, every: int = 200) -> None:
    """Trains `net` on the answers, and checks now and then how many whole answers are right on held-out images."""
    held = {"easy": [(one, one.questions) for one in easy("test")[:100]]}
    for kind in KINDS:
        examples = [scene("check", index, kind, 1) for index in range(50)]
        held[kind] = [(Example(one.image, one.questions), one.questions) for one in examples]

    def loss_of(step: int) -> tuple[Tensor, dict[str, Any]]:
        numbers, examples = batch(step, size)
        packed, inputs = reader.read(examples, [sampled(one, n, QUESTIONS) for one, n in zip(examples, numbers)])
        logits = reader.logits(packed, inputs)
        wanted = packed.targets[packed.targets != IGNORED]
        return F.cross_entropy(logits, wanted), {"hit": round(float((logits.argmax(-1) == wanted).float().mean()), 3)}

    def check() -> dict[str, Any]:
        scores: dict[str, Any] = {}
        for name, pairs in held.items():
            hits = correct(reader, pairs)
            scores[name] = round(sum(map(sum, hits.values())) / sum(map(len, hits.values())), 3)
            scores |= {kind: round(sum(row) / len(row), 3) for kind, row in sorted(hits.items())}
        return {"held": scores}

    train(net, loss_of, steps=steps, lr=lr, folder=work, name="answers", check=check, every=every)


@torch.no_grad()
def correct(reader: Reader, pairs: list[tuple[Example, list[Question]]]) -> dict[str, list[bool]]:
    """Whether greedy decoding writes each answer as it should, by question kind."""
    hits: dict[str, list[bool]] = {}
    for start in range(0, len(pairs), 16):
        some = pairs[start:start + 16]
        packed, inputs = reader.read([one for one, _ in some], [questions for _, questions in some])
        for (_, questions), row in zip(some, right(packed, reader.logits(packed, inputs).argmax(-1))):
            for question, hit in zip(questions, row):
                hits.setdefault(question.kind, []).append(hit)
    return hits
