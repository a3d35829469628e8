"""Calibration prompts: the built-in mix or a user's own samples, as the model's processor prepares them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from PIL import Image
from transformers.image_utils import load_image

from popvlm.mix import KINDS, WRITTEN, Messages, builtin, kind_of


class SampleError(ValueError):
    """Samples that cannot be used; the message is one sentence that names the fix."""


class UnreadableImage(SampleError):
    """A sample with an image that cannot be read or that the processor refuses: `Prepared` passes over it."""


@dataclass(frozen=True)
class BuiltinMix:
    """The first `count` prompts of the built-in mix, each drawn when it is asked for (`popvlm.mix.builtin`)."""

    count: int
    seed: int = 0
    largest: int = 1344
    kinds: tuple[str, ...] = tuple(KINDS)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SampleError(f"the mix has no {self.count} prompts; give a count from 1 on")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise SampleError(f"kinds is {self.kinds}; give some of {', '.join(KINDS)}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"kind": kind_of(index, self.seed, self.kinds),
                "messages": builtin(index, self.seed, self.largest, self.kinds)}


class Counts(NamedTuple):
    """The kind of a prompt, and how many visual and text tokens it has."""

    kind: str
    visual: int
    text: int


KEPT = 1 << 30
"""Bytes of prepared samples that are kept, so that calibration, which goes through them many times, need not prepare
them again."""


class Prepared(Sequence[dict[str, Any]]):
    """Samples as the arguments of a model's call, each prepared when it is asked for; the first `KEPT` bytes are kept.

    A sample is one of

    - messages, as `apply_chat_template` takes them: a list of `{"role": ..., "content": ...}`;
    - a mapping with `messages`, and `images` for those of their images that have no source, as in `datasets`;
    - a mapping with a `question`, and an `image` or `images`;
    - a prompt's text.

    An image is a PIL image, a path, a URL, base64, or `{"bytes": ..., "path": ...}`. Answers at the end of messages are
    left off. A mapping may have a `kind`, for `describe`.

    A sample whose image cannot be read is passed over: all are tried once, when this is made. The built-in mix has no
    such image, and a text-only model gets its prompts without images.

    Args:
        processor: the model's processor, or a text-only model's tokenizer.
        samples: a list, a split of a `datasets` dataset, a `BuiltinMix`: anything with a length and an index.

    Raises:
        SampleError: there are no samples, or none that can be read; one has none of these forms, or has an image where
            the model reads none.
    """

    def __init__(self, processor: Any, samples: Any) -> None:
        if isinstance(samples, (str, Mapping)) or not all(hasattr(samples, has) for has in ("__len__", "__getitem__")):
            raise SampleError(f"samples is a {type(samples).__name__}, and calibration may go through them more than "
                              "once; give a list, or one split of a dataset")
        if not len(samples):
            raise SampleError("there are no samples; give at least one")
        drawn = isinstance(samples, BuiltinMix)
        if drawn and not _reads_images(processor):
            samples = replace(samples, kinds=tuple(WRITTEN))
        self.processor, self.samples = processor, samples
        self.skipped: dict[int, str] = {}
        """The samples that are passed over, by their index in `samples`, and why."""
        self._counts: dict[int, Counts] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        self._room = KEPT
        for index in () if drawn else range(len(samples)):
            try:
                self._prepare(index)
            except UnreadableImage as error:
                self.skipped[index] = str(error)
        self.indices = [index for index in range(len(samples)) if index not in self.skipped]
        """Those that are here, by their index in `samples`."""
        if not self.indices:
            raise SampleError(f"of {len(samples)} samples none can be read; {self.skipped[0]}")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self._prepare(self.indices[index])

    def counts(self, index: int) -> Counts:
        """Of a sample by its index in `samples`; prepares it only if that was never done."""
        if index not in self._counts:
            self._prepare(index)
        return self._counts[index]

    def _prepare(self, index: int) -> dict[str, Any]:
        if index in self._kept:
            return dict(self._kept[index])
        kind = "samples"
        try:
            sample = self.samples[index]
            if isinstance(sample, Mapping):
                kind = str(sample.get("kind", kind))
            inputs = prepare(self.processor, sample)
        except (SampleError, OSError, SyntaxError) as error:
            self._counts[index] = Counts(kind, 0, 0)
            if isinstance(error, SampleError):
                raise type(error)(f"sample {index}: {error}") from error
            # From a dataset that decodes images by itself.
            raise UnreadableImage(f"sample {index}: an image cannot be read ({brief(error)})") from error
        visual = _visual_tokens(self.processor, inputs)
        self._counts[index] = Counts(kind, visual, inputs["input_ids"].shape[1] - visual)
        size = sum(value.nbytes for value in inputs.values() if isinstance(value, torch.Tensor))
        if size <= self._room:
            self._room -= size
            self._kept[index] = inputs
        return dict(inputs)


class Part(Sequence[Any]):
    """Some of the prompts, each prepared when it is asked for; and what tells one from another."""

    def __init__(self, samples: Sequence[Mapping[str, Any]], indices: Sequence[int]) -> None:
        self._samples, self._indices = samples, indices
        self._digests: dict[int, tuple[str, str]] = {}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        sample = self._samples[self._indices[index]]
        if index not in self._digests:
            images = [name for name in sample if name.startswith("pixel_values")]
            self._digests[index] = digest(sample, sample), digest(sample, images) if images else ""
        return sample

    def digest(self, index: int) -> str:
        """Of all that a prompt has."""
        return self._digest(index)[0]

    def images(self, index: int) -> str:
        """Of a prompt's images; nothing if it has none."""
        return self._digest(index)[1]

    def _digest(self, index: int) -> tuple[str, str]:
        if index not in self._digests:
            self[index]
        return self._digests[index]


def digest(sample: Mapping[str, Any], names: Iterable[str]) -> str:
    """16 hexadecimal digits of a prompt's tensors of these names."""
    made = hashlib.sha256()
    for name in sorted(names):
        if isinstance(value := sample[name], torch.Tensor):
            made.update(name.encode())
            made.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


@dataclass
class Tally:
    """How many prompts there are, their visual and text tokens, and how many samples were passed over."""

    prompts: int = 0
    visual: int = 0
    text: int = 0
    skipped: int = 0

    @property
    def visual_share(self) -> float:
        """The share of the tokens that are visual."""
        return self.visual / max(1, self.visual + self.text)


def describe(prepared: Prepared) -> dict[str, Tally]:
    """What there is of each kind, and, last, of all."""
    tallies: dict[str, Tally] = {}
    total = Tally()
    for index in sorted([*prepared.indices, *prepared.skipped]):
        kind, visual, text = prepared.counts(index)
        for tally in tallies.setdefault(kind, Tally()), total:
            tally.prompts += index not in prepared.skipped
            tally.skipped += index in prepared.skipped
            tally.visual += visual
            tally.text += text
    return dict(sorted(tallies.items())) | {"all": total}


def prepare(processor: Any, sample: Any, device: torch.device | str | None = None) -> dict[str, Any]:
    """One sample (see `Prepared`) as the arguments of a model's call: `input_ids` `[1, T]` and what goes with them.

    The chat template is around it, ready to be answered; a base model's tokenizer, which has none, gets the text alone.

    Args:
        processor: the model's processor, or a text-only model's tokenizer.
        sample: in one of the forms that `Prepared` lists.
        device: where the tensors go; None leaves them on the CPU.

    Raises:
        SampleError: it has none of these forms, or an image where the model reads none.
        UnreadableImage: an image is missing, damaged or of a shape that the processor refuses.
    """
    messages = _messages(sample)
    images = any(part["type"] == "image" for message in messages for part in message["content"])
    chat = getattr(processor, "chat_template", None) is not None
    if images and not (chat and _reads_images(processor)):
        raise SampleError(f"it has an image, and {type(processor).__name__} takes none; give text-only samples, or the "
                          "processor of a vision-language model")
    try:
        if chat:
            if not _reads_images(processor):  # tokenizers' templates want a string
                messages = [{**message, "content": _text(message)} for message in messages]
            inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True,
                                                   return_dict=True, return_tensors="pt")
        else:
            inputs = processor(text=["\n".join(map(_text, messages))], return_tensors="pt")
    except TemplateError as error:
        raise SampleError(f"the chat template refuses it ({brief(error)}); begin with the user's turn and let turns "
                          "alternate") from error
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        refused = UnreadableImage if images else SampleError
        raise refused(f"the processor refuses it ({brief(error)}); give another, or leave it out") from error
    if not inputs["input_ids"].shape[1]:
        raise SampleError("its prompt is empty; leave it out")
    return dict(inputs if device is None else inputs.to(device))


def _reads_images(processor: Any) -> bool:
    return hasattr(processor, "image_processor")


def _visual_tokens(processor: Any, inputs: Mapping[str, Any]) -> int:
    for types in "mm_token_type_ids", "token_type_ids":
        if types in inputs:
            return int((inputs[types] > 0).sum())
    # Qwen3-VL's processor in transformers 4 tells no types.
    ids = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")]
    return int(torch.isin(inputs["input_ids"], torch.tensor([each for each in ids if each is not None])).sum())


# ---- forms of a sample


def _messages(sample: Any) -> Messages:
    """The sample as messages: content as lists of parts, images opened, the user's turn last."""
    given: list[Any] = []
    if isinstance(sample, str):
        turns: Any = [{"role": "user", "content": sample}]
    elif isinstance(sample, Mapping):
        some = sample["image"] if sample.get("image") is not None else sample.get("images")
        given = list(some) if isinstance(some, (list, tuple)) else [] if some is None else [some]
        if sample.get("messages"):
            turns = sample["messages"]
        elif isinstance(sample.get("question"), str):
            turns = [{"role": "user", "content": sample["question"]}]
        else:
            raise SampleError(f"it has neither messages nor a question (it has {', '.join(map(str, sample))}); rename "
                              "its column to question, and that of its image to image")
    else:
        turns = sample
    images = iter(given)
    try:
        messages = [{**turn, "content": [_part(part, images) for part in _parts(turn["content"])]} for turn in turns]
        while messages and messages[-1]["role"] == "assistant":  # an answer: the prompt ends before it
            messages.pop()
        first = next(message for message in messages if message["role"] == "user")
    except (TypeError, KeyError, AttributeError, StopIteration) as error:
        raise SampleError(f"it is no sample ({type(sample).__name__}); give messages with a user's turn, a question "
                          "with an image, or a text") from error
    first["content"][:0] = [{"type": "image", "image": opened(image)} for image in images]  # that have no place
    return messages


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _part(part: Mapping[str, Any], images: Iterator[Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] != "image":
        return dict(part)
    sources = (part.get(key) for key in ("image", "url", "path", "base64"))
    source = next((source for source in sources if source is not None), None)
    if source is None and (source := next(images, None)) is None:
        raise SampleError("its messages have a place for an image that it does not give; put the image there, or into "
                          "a column images")
    return {"type": "image", "image": opened(source)}


def opened(source: Any) -> Image.Image:
    """An image as transformers loads it: upright and in RGB."""
    try:
        if isinstance(source, Mapping):  # as `datasets` gives it undecoded
            source = Image.open(BytesIO(source["bytes"])) if source.get("bytes") else source["path"]
        return load_image(os.fspath(source) if isinstance(source, os.PathLike) else source, timeout=30)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise anything on a damaged file
        raise UnreadableImage(f"an image cannot be read ({brief(error)})") from error


def _text(message: Mapping[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


def brief(error: BaseException) -> str:
    """What an error says, in one line and not too long a one."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 160 else f"{said[:160]}..."
