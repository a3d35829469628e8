"""A question to a model, timed: what the commands of `popvlm` share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.utils.tqdm import enable_progress_bars
from PIL import Image
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    TextStreamer,
)
from transformers.utils import logging

from popvlm import embedded
from popvlm.api import full_prefill
from popvlm.decoders import fingerprint, models
from popvlm.plan import Fingerprint


class ModelError(Exception):
    """A model that cannot be found, loaded or asked; the message is one sentence that names the fix."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that popvlm prunes, before its weights are read.

    Args:
        name: as the user gave it.
        path: the folder, or the name on the hub.
        config: its transformers config.
        model_class: the transformers class that it loads as.
    """

    name: str
    path: str
    config: Any
    model_class: Any

    @property
    def reads_images(self) -> bool:
        return type(self.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    @property
    def fingerprint(self) -> Fingerprint:
        """What a plan for this model must have."""
        return fingerprint(SimpleNamespace(config=self.config))


@dataclass(frozen=True)
class Answer:
    """What a model answered and how soon.

    Args:
        text: the answer.
        prompt_tokens: tokens of the prompt, visual ones included.
        tokens: tokens of the answer, an end-of-turn token included.
        first_token_s: seconds from the decoded images to the first token; the processor and the vision encoder are
            part of it.
        tokens_per_s: tokens per second after the first; None where the answer has one token.
    """

    text: str
    prompt_tokens: int
    tokens: int
    first_token_s: float
    tokens_per_s: float | None


def find(name: str, say: Callable[[str], None] = lambda step: None) -> Checkpoint:
    """Looks a model up: a folder, an embedded model's name or a name on the Hugging Face hub. Reads no weights.

    Args:
        name: of the model.
        say: called with each step's name where an embedded model is first put together.

    Raises:
        ModelError: it is not there, or popvlm does not know its family.
        EmbeddedModelError: an embedded model that cannot be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = str(folder)
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {name} has no config.json, so it is no model; give the folder that a "
                             "model's save_pretrained wrote")
    elif name in embedded.NAMES:
        path = str(embedded.folder(name, say))
    elif folder.exists() or folder.is_absolute() or name[0] in ".~" or name.count("/") != 1:
        raise ModelError(f"there is no model {name}; give a model's folder, a name on the Hugging Face hub such as "
                         f"Qwen/Qwen3-VL-2B-Instruct, or an embedded model ({', '.join(embedded.NAMES)})")
    else:
        path = name
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if folder.is_dir():
            raise ModelError(f"the config.json of {name} cannot be used ({_brief(error)}); upgrade transformers, or "
                             "save the model again") from error
        raise ModelError(f"{name} is no folder here, and the Hugging Face hub does not give it ({_brief(error)}); "
                         "check the name, the network and, for a gated model, your login") from error
    kind = type(config)
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, object))
    known = models()
    if not issubclass(model_class, known):
        raise ModelError(f"{name} is a {config.model_type} model, which popvlm cannot prune; use one that loads as "
                         f"{', '.join(sorted(model.__name__ for model in known))}")
    return Checkpoint(name, path, config, model_class)


def load(checkpoint: Checkpoint, *, dtype: str = "auto", device: str = "auto",
         attention: str | None = None) -> tuple[Any, Any]:
    """The processor (a text-only model's tokenizer) and the model, without a plan, ready to generate.

    Args:
        checkpoint: from `find`.
        dtype: "auto" (the checkpoint's), or a torch dtype's name.
        device: "auto" (accelerators as far as they reach, else the CPU), or a torch device.
        attention: transformers' name of an attention implementation, or None for its choice.

    Raises:
        ModelError: the device is not there, or the folder's weights or processor cannot be loaded.
        MemoryError, RuntimeError: too little memory, as torch says it; see `out_of_memory`.
    """
    if device != "auto":
        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            raise ModelError(f"there is no device {device} here ({_brief(error)}); use --device cpu or auto") from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own, and with it the hub's, whose downloads are worth seeing
    if sys.stderr.isatty():
        enable_progress_bars()
    try:
        auto = AutoProcessor if checkpoint.reads_images else AutoTokenizer
        processor = auto.from_pretrained(checkpoint.path)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"the processor of {checkpoint.name} cannot be loaded ({_brief(error)}); save it into the "
                         "model's folder, from the checkpoint that the model is from") from error
    try:
        model, seen = checkpoint.model_class.from_pretrained(
            checkpoint.path, dtype=dtype, device_map=device, attn_implementation=attention, output_loading_info=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError, SafetensorError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        fix = f"choose another --attention than {attention}, or check the files" if attention else "check its files"
        raise ModelError(f"the model {checkpoint.name} cannot be loaded ({_brief(error)}); {fix}") from error
    if missing := sorted(seen["missing_keys"]):
        raise ModelError(f"{checkpoint.name} has no weights for {missing[0]} and {len(missing) - 1} more of its "
                         "parameters; copy its files again")
    return processor, model.eval()


def out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python, torch or an accelerator says that memory is short."""
    says = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")
    return isinstance(error, MemoryError) or (isinstance(error, (RuntimeError, OSError))
                                              and any(words in str(error).lower() for words in says))


def answer(processor: Any, model: Any, images: Sequence[Image.Image], question: str, *, max_new_tokens: int = 256,
           write: Callable[[str], None] = lambda text: None) -> Answer:
    """Asks once, greedily.

    Args:
        processor: the model's processor, or a text-only model's tokenizer.
        model: with a plan or without.
        images: in RGB; none for a question about text.
        question: in words; a chat template goes around it, where there is one.
        max_new_tokens: the longest answer.
        write: is given the answer piece by piece, as it is written.

    Raises:
        ModelError: the processor refuses the images or the question.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    stream = _Stream(tokenizer, write)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    start = time.perf_counter()
    inputs = prompt(processor, images, question).to(model.device)
    length = inputs["input_ids"].shape[1]
    tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, streamer=stream)
    text = tokenizer.decode(tokens[0, length:], skip_special_tokens=True).strip()
    first, last, count = stream.times[0], stream.times[-1], len(stream.times)
    return Answer(text, length, count, first - start, (count - 1) / (last - first) if count > 1 else None)


def compare(processor: Any, model: Any, images: Sequence[Image.Image], question: str, *,
            max_new_tokens: int = 256, rounds: int = 3) -> tuple[Answer, Answer]:
    """Asks the model that a plan is on in full and pruned, in turn, so that both meet the same machine.

    Each warms up once. `first_token_s` is the median of `rounds` runs, or of one where it takes seconds, which needs
    no second to be told apart from noise. The rest is from the first run.

    Returns:
        The full model's answer, and that of the plan.
    """
    full: list[Answer] = []
    pruned: list[Answer] = []
    for tokens in (2, max_new_tokens, *[1] * (rounds - 1)):
        if len(full) > 1 and full[1].first_token_s > 5:
            break
        with full_prefill(model):
            full.append(answer(processor, model, images, question, max_new_tokens=tokens))
        pruned.append(answer(processor, model, images, question, max_new_tokens=tokens))
    measured_full, measured_pruned = (replace(runs[1], first_token_s=median(run.first_token_s for run in runs[1:]))
                                      for runs in (full, pruned))
    return measured_full, measured_pruned


class _Stream(TextStreamer):
    """Hands on the text, and notes when each token came: `generate` copies it to the CPU, so it is computed by then."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.write(text)


def prompt(processor: Any, images: Sequence[Image.Image], question: str, batch: int = 1) -> Any:
    """What the processor makes of a question about images, `[B, T]`: `batch` times the same.

    Args:
        processor: the model's processor, or a text-only model's tokenizer.
        images: in RGB; none for a question about text.
        question: in words; a chat template goes around it, where there is one.
        batch: how many.

    Raises:
        ModelError: the processor refuses the images or the question.
    """
    content: Any = question
    if hasattr(processor, "tokenizer"):
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": question}]
    try:
        if processor.chat_template is None:
            if images:
                raise ModelError("the processor has no chat template to put images into; use an instruction-tuned "
                                 "checkpoint")
            return processor(text=[question] * batch, return_tensors="pt")  # a base model, which goes on writing
        return processor.apply_chat_template([[{"role": "user", "content": content}]] * batch, tokenize=True,
                                             add_generation_prompt=True, return_dict=True, return_tensors="pt")
    except (ValueError, TypeError, IndexError) as error:
        raise ModelError(f"the processor refuses these images or this question ({_brief(error)}); give others"
                         ) from error


def chats_batch(processor: Any, chats: Sequence[Any], images: Sequence[Sequence[Image.Image]]) -> Any:
    """What the processor makes of several chats, `[B, T]`, padded on the side that its tokenizer pads.

    Args:
        processor: the model's processor.
        chats: messages, in which a place for an image is `{"type": "image"}`.
        images: of each chat, in RGB, in the order of their places.
    """
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return processor(text=texts, images=list(images) if any(images) else None, padding=True, add_special_tokens=False,
                     return_tensors="pt")


def _brief(error: BaseException) -> str:
    """An error's first sentence, in one line."""
    said = " ".join(str(error).split()) or type(error).__name__
    first = said.split(". ")[0].rstrip(".")
    return first if len(first) <= 200 else f"{first[:200]}..."
