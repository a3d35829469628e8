"""The stages that both small models go through: the decoder learns to answer from what a faultless tower would tell it,
the tower learns to see, then the decoder learns to answer from what this tower tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from data import (
    MIX,
    PAIRS_FIRST,
    SHAPES_FIRST,
    SHAPES_MIX,
    SIGHT_MIX,
    Example,
    batch,
    cells,
    draw,
    easy,
    sampled,
    telling,
)
from loop import train
from packing import IGNORED, Branch, Packed, right
from scenes import KINDS, LABELS, SHAPES, SIZES, SQUARE, Question, scene
from torch import Tensor, nn


class Reader(Protocol):
    """How a model reads examples: many questions about an image in one sequence. `square`: it makes images square."""

    square: bool

    def see(self, examples: list[Example]) -> dict[str, Tensor]:
        """What the vision tower takes: pixels, or while `imagining` the labels of cells."""

    def grids(self, seen: dict[str, Tensor]) -> list[tuple[int, int]]:
        """Rows and columns of each image's visual tokens."""

    def ids(self, text: str) -> list[int]:
        """Tokens of a text, none added."""

    def read(self, examples: list[Example], questions: list[list[Question]]) -> tuple[Packed, dict[str, Any]]:
        """What the model takes, and how it is packed."""

    def logits(self, packed: Packed, inputs: dict[str, Any]) -> Tensor:
        """Logits at the positions that have a target, `[P, V]`."""


def sees(reader: Reader, seer: nn.Module, work: Path, *, steps: int, first: int, size: int, lr: float) -> None:
    """Trains `seer`, which gives lists of label logits `[cells, labels]`, to name what is in each cell of an image: the
    `first` steps mostly print, then mostly shapes."""

    shapes = [LABELS.index(shape) for shape in SHAPES]  # print is learned first, shapes last

    def loss_of(step: int) -> tuple[Tensor, dict[str, Any]]:
        _, examples = batch(step, size, SIGHT_MIX if step < first else SHAPES_MIX, reader.square)
        inputs = reader.see(examples)
        found = seer(**inputs)
        wanted = labels(reader, examples, inputs)
        losses = [F.binary_cross_entropy_with_logits(names, wanted, reduction="sum") for names in found]
        seen, there = found[0] > 0, wanted > 0
        return torch.stack(losses).mean() / wanted.sum(), {
            "recall": round(float(seen[there].float().mean()), 3),
            "shapes": round(float(seen[:, shapes][there[:, shapes]].float().mean()), 3),
            "precision": round(float(wanted[seen].mean()), 3)}

    train(seer, loss_of, steps=steps, lr=lr, folder=work, name="sight", warmup=30)


def labels(reader: Reader, examples: list[Example], seen: dict[str, Tensor]) -> Tensor:
    """What is in the cells of all images, one after the other, `[cells, labels]`."""
    return torch.cat([cells(one, *grid) for one, grid in zip(examples, reader.grids(seen))])


def branches(reader: Reader, questions: list[list[Question]], after: str, end: str) -> list[list[Branch]]:
    """What `pack` takes of questions: `after` is the chat between a question and its answer, `end` ends the answer."""
    between = reader.ids(after)
    return [[(reader.ids(one.text), [] if one.bare else between, reader.ids(one.answer + end),
              len(reader.ids(one.text[:telling(one)]))) for one in asked] for asked in questions]


def imagined(cells: Tensor, places: Tensor) -> Tensor:
    """What a tower that was aligned tells of cells with these labels `[cells, labels]` at these places `[cells, 2]`: it
    overlooks some labels, and no number is exact. `[cells, labels + 2]`."""
    seen = cells * (torch.rand_like(cells) > 0.03) + torch.randn_like(cells) * 0.12
    return torch.cat([seen, places + torch.randn_like(places) * 0.05], dim=1)


def places(grids: list[tuple[int, int]]) -> Tensor:
    """Where each cell of all images is, from -0.5, left or top, to 0.5, `[cells, 2]`: what is ordered needs no more
    than a look along it, and the decoder's rotary embeddings tell of distances only."""
    found = []
    for rows, columns in grids:
        down, across = ((torch.arange(count) + 0.5) / count - 0.5 for count in (rows, columns))
        found.append(torch.cartesian_prod(down, across).flip(1))
    return torch.cat(found)


@torch.no_grad()
def placed(reader: Reader, seer: nn.Module, modules: list[nn.Module]) -> list[Tensor]:
    """The matrices `[outputs, 3]` that tell a cell's two coordinates and a 1 from what comes out of each of the
    modules, by least squares."""
    states: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
    wanted: list[Tensor] = []
    hooks = [module.register_forward_hook(lambda module, args, out: states[module].append(out.flatten(0, -2)))
             for module in modules]
    for start in range(0, 320, 32):
        seen = reader.see([draw(index, 1, SIGHT_MIX, reader.square) for index in range(start, start + 32)])
        wanted.append(places(reader.grids(seen)))
        seer(**seen)
    for hook in hooks:
        hook.remove()
    truth = F.pad(torch.cat(wanted), (0, 1), value=1.0)
    found = [torch.linalg.lstsq(torch.cat(each), truth).solution for each in states.values()]
    for each, matrix in zip(states.values(), found):
        off = (torch.cat(each) @ matrix - truth).square().mean(0).sqrt()
        print("cells' places and a 1 are told with errors of", *(f"{float(one):.3f}" for one in off))
    return found


@torch.no_grad()
def told(reader: Reader, seer: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """How `seer` tells a label that is in a cell from one that is not, for each of its outputs.

    Returns:
        Of each label one over the distance of its mean logits, where it is and where it is not, `[labels]`, 0 where the
        tower does not see it or it was not there; and the latter of the two.
    """
    wanted: list[Tensor] = []
    logits: list[list[Tensor]] = []
    for start in range(0, 640, 32):
        examples = [draw(index, 1, SIGHT_MIX, reader.square) for index in range(start, start + 32)]
        seen = reader.see(examples)
        wanted.append(labels(reader, examples, seen))
        logits.append(list(seer(**seen)))
    there = torch.cat(wanted) > 0
    found = []
    for output in map(torch.cat, zip(*logits)):
        absent = torch.where(there, 0, output).sum(0) / (~there).sum(0)
        present = torch.where(there, output, 0).sum(0) / there.sum(0).clamp(min=1)
        found.append((torch.where((there.sum(0) > 4) & (present > 0), 1 / (present - absent), 0), absent))
    return found


def answers(reader: Reader, net: nn.Module, work: Path, stage: str, *, steps: int, pairs: int, shapes: int, size: int,
            questions: int, lr: float, early: int, every: int = 200) -> None:
    """Trains `net` on the answers, and checks it on held-out images.

    Args:
        reader: of the model.
        net: the model; what of it requires gradients is trained.
        work: where checkpoints and the log go.
        stage: its name in `work`.
        steps: in all; until step `pairs` mostly on two shapes, until step `shapes` on more, then on all kinds of image.
        size: images in a step.
        questions: asked of an image, and up to half as many bare ones.
        lr: the learning rate.
        early: the decoder layer behind which a naming word is to know its answer. The question's end takes about three
            layers more to fetch it: a model of which this is asked early leaves its deeper layers idle.
        every: so many steps are between two checks.
    """
    sizes = SQUARE if reader.square else SIZES
    held = {"easy": [(one, one.questions) for one in easy("test")[:40]]}
    for kind in KINDS:
        examples = [scene("check", index, kind, 1, sizes) for index in range(20)]
        held[kind] = [(Example(one.image, one.questions, one.items), one.questions) for one in examples]

    decoder = net.model.language_model
    layer = decoder.layers[early]
    states: dict[nn.Module, Tensor] = {}
    hooks = [module.register_forward_hook(lambda module, args, out: states.__setitem__(module, out))
             for module in (layer, decoder.norm)]

    def among(states: Tensor, wanted: Tensor) -> Tensor:
        """Cross entropy among the step's answers: a whole vocabulary costs as much as half of Gemma's decoder."""
        tokens, index = wanted.unique(return_inverse=True)
        return F.cross_entropy(F.linear(states, net.lm_head.weight[tokens]), index)

    def loss_of(step: int) -> tuple[Tensor, dict[str, Any]]:
        mix = PAIRS_FIRST if step < pairs else SHAPES_FIRST if step < shapes else MIX
        torch.manual_seed(step)  # of what is imagined
        numbers, examples = batch(step, size, mix, reader.square)
        chosen = [sampled(one, n, questions) for one, n in zip(examples, numbers)]
        packed, inputs = reader.read(examples, chosen)
        logits = reader.logits(packed, inputs)
        loss = F.cross_entropy(logits, packed.targets[packed.targets != IGNORED])
        at_word, at_end = packed.early != IGNORED, packed.ahead != IGNORED
        known, soon = states[layer][at_word], states[decoder.norm][at_end]
        loss = loss + among(soon, packed.ahead[at_end])
        if len(known):
            loss = loss + among(decoder.norm(known), packed.early[at_word])
        hits: dict[str, list[bool]] = {"bare": [], "lookups": [], "right": []}
        for row, asked in zip(right(packed, logits.argmax(-1)), chosen):
            for hit, question in zip(row, asked):
                hits["bare" if question.bare else "lookups" if telling(question) else "right"].append(hit)
        return loss, {name: round(sum(some) / max(1, len(some)), 3) for name, some in hits.items()}

    def check() -> dict[str, Any]:
        scores: dict[str, Any] = {}
        for name, some in held.items():
            hits = correct(reader, some)
            scores[name] = round(sum(map(sum, hits.values())) / sum(map(len, hits.values())), 3)
            scores |= {kind: round(sum(row) / len(row), 3) for kind, row in sorted(hits.items())}
        return {"held": scores}

    train(net, loss_of, steps=steps, lr=lr, folder=work, name=stage, warmup=40, check=check, every=every)
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def correct(reader: Reader, pairs: list[tuple[Example, list[Question]]], batch: int = 16) -> dict[str, list[bool]]:
    """Whether greedy decoding writes each answer as it should, by question kind."""
    hits: dict[str, list[bool]] = {}
    for start in range(0, len(pairs), batch):
        some = pairs[start:start + batch]
        packed, inputs = reader.read([one for one, _ in some], [questions for _, questions in some])
        for (_, questions), row in zip(some, right(packed, reader.logits(packed, inputs).argmax(-1))):
            for question, hit in zip(questions, row):
                hits.setdefault(question.kind, []).append(hit)
    return hits


def figures(reader: Reader, scales: dict[float, int], work: Path) -> None:
    """Writes the accuracy on the whole easy-VQA test split and on scenes of the split "test", by question kind and by
    image size.

    Args:
        reader: of the model.
        scales: how many scenes of each kind at each scale (1 gives 64 to 72 visual tokens, 4 about 1,024).
        work: the folder for `accuracy.json`.
    """
    hits = {"easy-VQA test": [hit for row in correct(reader, [(one, one.questions) for one in easy("test")]).values()
                              for hit in row]}
    for scale, count in scales.items():
        for kind in KINDS:
            drawn = [scene("test", index, kind, scale, SQUARE if reader.square else SIZES) for index in range(count)]
            found = correct(reader, [(Example(one.image, one.questions), one.questions) for one in drawn],
                            batch=max(1, round(16 / scale**2)))
            hits.setdefault(f"scenes, scale {scale:g}", []).extend(hit for row in found.values() for hit in row)
            if scale == 1:
                hits |= found
    scores = {name: round(sum(row) / len(row), 4) for name, row in hits.items()}
    (work / "accuracy.json").write_text(json.dumps(scores, indent=1))

