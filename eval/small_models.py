"""The small trained models, full and pruned, question by question: what each plan and each baseline costs.

    python eval/small_models.py tiny-qwen3-vl [--easy 1000] [--scenes 200] [--out eval/results]

Every answer is written by `generate`, greedily, in batches. A setting's result is kept as soon as it is there, and a
run that was broken off goes on with the next. Scenes are of the split "test", which no training saw.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "training")]

import baselines
from data import Example, easy
from scenes import KINDS, Question, scene

import popvlm
from popvlm import PruningPlan, embedded

RATIOS = 0.2, 0.25, 1 / 3, 0.5
Pair = tuple[Example, Question]


def questions(easy_questions: int, scenes_a_kind: int) -> list[Pair]:
    """Held-out questions: so many of easy-VQA's test split, and three each on so many scenes a kind."""
    pairs = [(example, question) for example in easy("test") for question in example.questions]
    chosen = random.Random(0).sample(pairs, min(easy_questions, len(pairs)))
    for kind in KINDS:
        for index in range(scenes_a_kind):
            drawn = scene("test", index, kind, 1)
            by_kind = {question.kind: question for question in drawn.questions}
            for one in random.Random(index).sample(sorted(by_kind), min(3, len(by_kind))):
                chosen.append((Example(drawn.image, drawn.questions), by_kind[one]))
    return chosen


@torch.no_grad()
def answers(model: Any, processor: Any, pairs: list[Pair], batch: int, what: str) -> list[str]:
    """The model's greedy answers."""
    written: dict[int, str] = {}
    order = sorted(range(len(pairs)), key=lambda index: (pairs[index][0].image.size, len(pairs[index][1].text)))
    for start in track(range(0, len(order), batch), what, console=Console(stderr=True)):
        some = [pairs[index] for index in order[start:start + batch]]
        chats = [processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}],
            add_generation_prompt=True, tokenize=False) for _, question in some]
        inputs = processor(text=chats, images=[[example.image] for example, _ in some], padding=True,
                           add_special_tokens=False, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1]:], skip_special_tokens=True)
        written |= dict(zip(order[start:start + batch], (text.strip() for text in texts)))
    return [written[index] for index in range(len(pairs))]


def settings(layers: int, fit: Callable[[PruningPlan], PruningPlan] | None
             ) -> dict[str, Callable[[Any], AbstractContextManager[Any]]]:
    """Each setting's name, and what puts it on a model."""
    made: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {"full": lambda model: nullcontext()}
    for ratio in RATIOS:
        plan = PruningPlan.last(layers, ratio)
        plans = {"POP": plan, "POP, visual only": PruningPlan(layers, visual=plan.visual)}
        for name, one in plans.items():
            made[f"{ratio:.0%} {name}"] = lambda model, one=one: planned(model, one)
            if fit:
                made[f"{ratio:.0%} {name}, fitted"] = lambda model, one=one: planned(model, fit(one))
        for name, baseline in (("no boundary", baselines.without_boundary), ("no KV", baselines.without_kv),
                               ("removed", baselines.removed)):
            made[f"{ratio:.0%} {name}"] = lambda model, b=baseline, one=plan: b(model, sorted(one.text))
    return made


class planned(AbstractContextManager):
    """A plan on the model inside the block."""

    def __init__(self, model: Any, plan: PruningPlan) -> None:
        self.model = popvlm.accelerate(None, model, plan=plan)

    def __exit__(self, *error: object) -> None:
        popvlm.restore(self.model)


def main(name: str, easy_questions: Annotated[int, typer.Option("--easy")] = 1000,
         scenes_a_kind: Annotated[int, typer.Option("--scenes")] = 100, batch: int = 32, fit_on: int = 200,
         only: str = "", out: Path = Path(__file__).parent / "results") -> None:
    path = embedded.folder(name, print) if name in embedded.NAMES else Path(name)
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    layers = model.config.get_text_config().num_hidden_layers
    pairs = questions(easy_questions, scenes_a_kind)
    out.mkdir(parents=True, exist_ok=True)
    kept = out / f"small_{Path(name).name}_{easy_questions}_{scenes_a_kind}.jsonl"
    done = {row["setting"]: row for row in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    for setting, put in settings(layers, fitter(model, processor, fit_on) if fit_on else None).items():
        if setting in done or only not in setting:
            continue
        began = time.monotonic()
        with put(model):
            texts = answers(model, processor, pairs, batch, setting)
        row = {"setting": setting, "seconds": round(time.monotonic() - began, 1), "answers": texts}
        with kept.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        done[setting] = row
    Console().print(table(name, pairs, done))


def fitter(model: Any, processor: Any, count: int) -> Callable[[PruningPlan], PruningPlan]:
    """Fits a plan on prompts of the training split."""
    from data import draw

    from popvlm.fitting import fit

    def inputs(index: int) -> dict[str, Any]:
        example = draw(index, 1)
        question = random.Random(index).choice(example.questions)
        chat = processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}],
            add_generation_prompt=True, tokenize=False)
        return dict(processor(text=[chat], images=[[example.image]], add_special_tokens=False, return_tensors="pt"))

    class Prompts:
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index >= count:
                raise IndexError
            return inputs(5_000_000 + index)

    return lambda plan: fit(model, plan, Prompts())[0]  # type: ignore[arg-type]


def table(name: str, pairs: list[Pair], done: dict[str, Any]) -> Table:
    """Accuracy by kind of image, and agreement with the full model's answers."""
    groups = ["easy", *KINDS]
    shown = Table("setting", "all", *groups, "agrees", title=f"{name}, {len(pairs)} held-out questions")
    for setting, row in done.items():
        hits = {group: [text == question.answer for (_, question), text in zip(pairs, row["answers"])
                        if question.kind.startswith(group)] for group in groups}
        every = [hit for hit in hits.values() for hit in hit]
        agrees = [ours == theirs for ours, theirs in zip(row["answers"], done["full"]["answers"])]
        shown.add_row(setting, *(f"{sum(one) / max(1, len(one)):.3f}" for one in (every, *hits.values(), agrees)))
    return shown


if __name__ == "__main__":
    typer.run(main)
