"""Real text of several kinds that is on every machine: what comes with Python and with the packages popvlm needs."""

from __future__ import annotations

import random
import re
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = ("prose", "code", "licence", "table")
PACKAGES = ("torch", "numpy", "pillow", "transformers", "matplotlib", "scipy", "safetensors", "rich", "typer",
            "tokenizers", "datasets", "accelerate", "jinja2", "pyyaml", "pandas", "pyarrow", "requests", "fonttools",
            "tqdm", "psutil", "regex", "sympy", "networkx", "fsspec", "aiohttp", "pip", "torchvision", "qwen-vl-utils")
LONGEST = 60_000
"""Characters of a document that are used, so that no kind is one long file."""


def documents(kind: str) -> list[str]:
    """The documents of a kind, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    if kind == "prose":
        from pydoc_data.topics import topics  # the language reference

        pages = [topics[name] for name in sorted(topics)]
        # In runs of pages, so that each is long enough for a prompt.
        texts = ["\n\n".join(pages[start:start + 12]) for start in range(0, len(pages), 12)]
        return _apart([text[:LONGEST] for text in [*texts, *(_description(name) for name in PACKAGES)]])
    if kind == "code":
        names = ("argparse", "tarfile", "threading", "typing", "ssl", "doctest", "inspect", "difflib", "shutil",
                 "zipfile/__init__", "ipaddress", "statistics", "asyncio/base_events", "http/client", "json/decoder",
                 "logging/__init__", "unittest/mock", "email/message", "subprocess", "_pydecimal")
        paths = [library / f"{name}.py" for name in names]
    elif kind == "licence":
        paths = [library / "LICENSE.txt", *(path for name in PACKAGES for path in _licences(name))]
    else:
        import matplotlib
        import scipy

        drawn, science = Path(matplotlib.get_data_path()), Path(scipy.__file__).parent
        fonts = Path(distribution("fonttools").locate_file("fontTools"))
        names = ("html/entities", "encodings/cp037", "encodings/mac_greek", "locale", "mimetypes", "encodings/aliases",
                 "stringprep")
        paths = [*(library / f"{name}.py" for name in names),
                 science / "constants" / "_codata.py", drawn.parent / "_color_data.py", drawn.parent / "_cm_listed.py",
                 *(fonts / f"{name}.py" for name in ("agl", "unicodedata/Scripts", "unicodedata/Blocks")),
                 *sorted((drawn / "sample_data").glob("*.csv"))]
    return _apart([path.read_text(errors="replace")[:LONGEST] for path in paths if path.is_file()])


def _apart(found: list[str]) -> list[str]:
    """Those that are long and say something new: half of all packages have one and the same licence."""
    seen: set[str] = set()
    kept = []
    for text in found:
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) > 30}
        if len(text) > 4000 and len(lines & seen) <= len(lines) / 4:
            kept.append(text)
            seen |= lines
    return kept


def chunks(tokenizer: Any, kind: str, length: int, *, held_out: bool) -> list[Tensor]:
    """Stretches `[length]` of tokens, without overlap, of a kind's documents, in random order.

    Held-out stretches are of other documents than those to fit on.
    """
    found: list[Tensor] = []
    for text in documents(kind)[0 if held_out else 1::2]:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        found += [ids[start:start + length] for start in range(0, len(ids) - length + 1, length)]
    random.Random(0).shuffle(found)
    return found


def mixed(tokenizer: Any, count: int, length: int, *, held_out: bool) -> list[tuple[str, Tensor]]:
    """`count` stretches, of the kinds in turn, with their kinds; fewer where a kind has no more."""
    by_kind = {kind: chunks(tokenizer, kind, length, held_out=held_out) for kind in KINDS}
    each = -(-count // len(KINDS))
    turns = [(kind, by_kind[kind][turn]) for turn in range(each) for kind in KINDS if turn < len(by_kind[kind])]
    return turns[:count]


def _description(name: str) -> str:
    try:
        text = str(distribution(name).metadata.get_payload())
    except PackageNotFoundError:
        return ""
    return re.sub(r"<[^>]+>|\[!\[.*", "", text)  # badges and other marks of web pages


def _licences(name: str) -> list[Path]:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files
            if re.search(r"licen|copying|notice", file.name, re.IGNORECASE) and ".dist-info" in str(file)]
