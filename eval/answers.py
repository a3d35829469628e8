"""Asks a model a task's questions in batches, and keeps each answer on disk as it comes.

Batches are made before anything is asked, and a batch is asked again as a whole where a run was broken off inside it:
the padding that a prompt gets, and with it the last bits of its logits, are the same in any run, on any number of
processes.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tasks import Sample

from popvlm.answer import chats_batch, out_of_memory
from popvlm.decoders import family_of
from popvlm.samples import UnreadableImage, brief, opened

SCALES = 1.0, 0.7, 0.5
"""Sides of the images, as shares, that are tried in turn where one prompt alone is too large for the memory."""

Row = dict[str, Any]


class AnswerError(ValueError):
    """Answers that cannot be kept where they are wanted; the message names the fix."""


class Kept:
    """The answers of one setting to one task on disk: JSON lines, a header first, by each process in a file of its own.

    A row has `key`, `answer`, `tokens` (of it), `prompt` and `visual` (tokens of the prompt), `scale` where the images
    were made smaller, and `error`, in a sentence, where there is no answer.

    Args:
        folder: where they are, or will be.
        name: of task and setting, for the file's name.
        header: what the run is; answers of another are refused.
        process: the number of this process.

    Raises:
        AnswerError: the answers that are there belong to another run.
    """

    def __init__(self, folder: Path, name: str, header: Mapping[str, Any], process: int = 0) -> None:
        self.folder, self.name, self.header = folder, name, json.loads(json.dumps(header))
        self.path = folder / f"{name}.{process}.jsonl"
        self.rows: dict[str, Row] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.read()
        if self.path.exists():
            whole = self.path.read_bytes()
            if not whole.endswith(b"\n"):  # broken off inside a line
                self.path.write_bytes(whole[:whole.rfind(b"\n") + 1])
        if not self.path.exists() or not self.path.stat().st_size:
            self._append([{"run": self.header}])

    def read(self) -> None:
        """Reads what all processes have written."""
        for path in sorted(self.folder.glob(f"{self.name}.*.jsonl")):
            lines = path.read_bytes().split(b"\n")[:-1]
            for number, line in enumerate(lines):
                row = json.loads(line)
                if number:
                    self.rows[row["key"]] = row
                elif row.get("run") != self.header:
                    apart = [key for key in {**self.header, **row.get("run", {})}
                             if self.header.get(key) != row.get("run", {}).get(key)]
                    raise AnswerError(f"{path} has answers of another run (another {', '.join(apart)}); give another "
                                      "--out, or delete them")

    def add(self, rows: Sequence[Row]) -> None:
        """Keeps a batch's answers, at once."""
        self._append(rows)
        self.rows |= {row["key"]: row for row in rows}

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self.path.open("ab") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())


def batches(samples: Sequence[Sample], size: int) -> list[list[Sample]]:
    """The samples in batches of prompts about as long, the same for the same samples."""
    order = sorted(range(len(samples)), key=lambda index: (sum(map(_pixels, samples[index].images)),
                                                           len(samples[index].prompt), index))
    return [[samples[index] for index in order[start:start + size]] for start in range(0, len(order), size)]


def ask_all(model: Any, processor: Any, planned: Sequence[Sequence[Sample]], kept: Kept, max_new_tokens: int,
            done: Callable[[int], None] = lambda count: None) -> None:
    """Asks the batches that have not been answered yet, or in which a sample failed, and keeps each.

    Args:
        model: a vision-language model, held to the setting.
        processor: its own, padding on the left.
        planned: this process's share of `batches`.
        kept: where answers are and go.
        max_new_tokens: the longest answer.
        done: is told how many samples are done, after each batch.
    """
    for batch in planned:
        if any(kept.rows.get(sample.key, {"error": ""}).get("error") is not None for sample in batch):
            kept.add(_answered(model, processor, batch, max_new_tokens))
        done(len(batch))


def _answered(model: Any, processor: Any, batch: Sequence[Sample], max_new_tokens: int) -> list[Row]:
    """Each sample's row: asked together; one by one where that fails, and with smaller images where memory is short."""
    rows: dict[str, Row] = {}
    images: dict[str, list[Image.Image]] = {}
    for sample in batch:
        try:
            images[sample.key] = [opened(image) for image in sample.images]
        except (UnreadableImage, MemoryError) as error:
            rows[sample.key] = {"key": sample.key, "answer": "", "error": str(error) or type(error).__name__}
    good = [sample for sample in batch if sample.key in images]
    try:
        if good:
            asked = ask(model, processor, good, [images[sample.key] for sample in good], max_new_tokens)
            rows |= {row["key"]: row for row in asked}
    except Exception:  # whatever a sample can break, the others shall be asked
        _tidy()
        for sample in good:
            rows[sample.key] = _alone(model, processor, sample, images[sample.key], max_new_tokens)
    return [rows[sample.key] for sample in batch]


def _alone(model: Any, processor: Any, sample: Sample, images: list[Image.Image], max_new_tokens: int) -> Row:
    said = ""
    for scale in SCALES:
        smaller = [image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
                   for image in images] if scale < 1 else images
        try:
            (row,) = ask(model, processor, [sample], [smaller], max_new_tokens)
            return row | ({"scale": scale} if scale < 1 else {})
        except Exception as error:  # is recorded
            said = f"{type(error).__name__}: {brief(error)}"
            if not (out_of_memory(error) and images):
                break
        _tidy()
    return {"key": sample.key, "answer": "", "error": said}


@torch.no_grad()
def ask(model: Any, processor: Any, samples: Sequence[Sample], images: Sequence[Sequence[Image.Image]],
        max_new_tokens: int) -> list[Row]:
    """Asks greedily, in one batch.

    Args:
        model: a vision-language model.
        processor: its own, padding on the left.
        samples: the questions.
        images: of each sample, in RGB, in the order of `sample.images`.
        max_new_tokens: the longest answer.
    """
    inputs = prepared(processor, samples, images).to(model.device)
    tokens = inputs["input_ids"]
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
    written = output[:, tokens.shape[1]:].cpu()
    visual = torch.isin(tokens, torch.tensor(family_of(model).visual_token_ids(model.config), device=tokens.device))
    padding = processor.tokenizer.pad_token_id
    return [{"key": sample.key, "answer": text.strip(), "tokens": int((row != padding).sum()), "prompt": prompt,
             "visual": seen}
            for sample, text, row, prompt, seen in zip(
                samples, processor.batch_decode(written, skip_special_tokens=True), written,
                inputs["attention_mask"].sum(1).tolist(), visual.sum(1).tolist())]


def prepared(processor: Any, samples: Sequence[Sample], images: Sequence[Sequence[Image.Image]]) -> Any:
    """A batch of prompts with the chat template around them, `input_ids` `[B, T]`, padded on the left."""
    chats, ordered = [], []
    for sample, pictures in zip(samples, images):
        content = sample.content()
        ordered.append([pictures[part["number"]] for part in content if part["type"] == "image"])
        chats.append([{"role": "user", "content": [{"type": "image"} if part["type"] == "image" else part
                                                   for part in content]}])
    return chats_batch(processor, chats, ordered)


def _pixels(image: Any) -> int:
    """How large an image is, from its first bytes; 0 where it cannot be read."""
    try:
        if isinstance(image, Mapping):
            image = BytesIO(image["bytes"]) if image.get("bytes") else image["path"]
        if isinstance(image, Image.Image):
            return image.width * image.height
        with Image.open(image) as read:
            return read.width * read.height
    except Exception:  # it will be told when it is asked
        return 0


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
