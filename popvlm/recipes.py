"""Calibration recipes: which public or local datasets to draw prompts from, and how often from each."""

from __future__ import annotations

import csv
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import fsspec
import yaml

from popvlm.samples import SampleError, brief

SHUFFLED = 200
"""How many rows are held at a time, of which the next is drawn."""

FILES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""The files that `datasets` reads, and what it calls them."""

IMAGES = ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"

ASKED = ("What is shown here?", "Describe this image in detail.", "What text can be read in it?",
         "What is the most important thing in this image, and where is it?")
"""What is asked about images that come without questions."""


@dataclass(frozen=True)
class Source:
    """One entry of a recipe: where rows come from, and which columns make a prompt.

    Args:
        name: what `describe` counts its prompts as.
        prompt: the question, with the names of columns in braces: `"{question}"`, `"{texts[0][user]}"`.
        dataset: a name on the Hugging Face hub; or else
        path: a folder, or a parquet, CSV or JSON lines file; relative to the recipe. Paths of images in a CSV or JSON
            lines file are relative to it.
        config, split: of the dataset.
        image: the column that has the image, or a list of them; None for text.
        weight: how often it is drawn from, compared with the others.
        stream: whether to read a dataset from the hub row by row; if not, it is downloaded whole, once.
        at_least: shorter prompts, in characters, are left out.
    """

    name: str
    prompt: str
    dataset: str | None = None
    path: str | None = None
    config: str | None = None
    split: str = "train"
    image: str | None = None
    weight: float = 1
    stream: bool = True
    at_least: int = 1


def load(recipe: str | os.PathLike[str], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Draws samples by a recipe, the same for the same seed; fewer than `count` where its sources have no more.

    Args:
        recipe: a YAML file with a list of `Source`s; or a parquet, CSV or JSON lines file with columns question and
            image; or a folder of images, each of which is asked the questions of `ASKED` in turn.
        count: how many.
        seed: of the rows' order and of the sources'.

    Returns:
        Samples for `Prepared`, with images as the bytes that the dataset has: a damaged one shows there, not here.

    Raises:
        SampleError: the recipe cannot be used, a dataset cannot be had, a column is missing, or there is no sample.
    """
    recipe = Path(recipe)
    if recipe.is_dir():
        return _folder(recipe, count, seed)
    if recipe.suffix in FILES:
        sources = [Source(recipe.stem, "{question}", path=recipe.name, image="image")]
    else:
        sources = _sources(recipe)
    rng = random.Random(f"recipe {seed}")
    live = [(source, _rows(source, recipe.parent, seed)) for source in sources]
    samples: list[dict[str, Any]] = []
    # Not datasets.interleave_datasets: it wants the same columns and types everywhere.
    while live and len(samples) < count:
        (chosen,) = rng.choices(live, [source.weight for source, _ in live])
        if (sample := next(chosen[1], None)) is None:
            live.remove(chosen)
        else:
            samples.append(sample)
    if not samples:
        raise SampleError(f"the recipe {recipe} gives no sample; ask for at least one, and lower at_least if it is set")
    return samples


def _folder(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    images = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGES)
    if not images:
        raise SampleError(f"the folder {folder} has no image ({', '.join(IMAGES)}); give a folder of images, a recipe, "
                          "or a parquet, CSV or JSON lines file with columns question and image")
    random.Random(f"folder {seed}").shuffle(images)
    return [{"kind": folder.name, "image": path, "question": ASKED[number % len(ASKED)]}
            for number, path in enumerate(images[:count])]


def _sources(recipe: Path) -> list[Source]:
    try:
        entries = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SampleError(f"the recipe {recipe} cannot be read ({brief(error)}); give a YAML file") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries) or not entries:
        raise SampleError(f"the recipe {recipe} is no list of sources; begin each with '- name: ...'")
    known = [field.name for field in fields(Source)]
    for entry in entries:
        about = f"source {entry.get('name', entries.index(entry) + 1)!r} of {recipe}"
        if unknown := [key for key in entry if key not in known]:
            raise SampleError(f"{about} has a key {unknown[0]!r}; the keys are {', '.join(known)}")
        if not isinstance(entry.get("name"), str) or not isinstance(entry.get("prompt"), str):
            raise SampleError(f"{about} needs a name and a prompt, such as prompt: \"{{question}}\"")
        if ("dataset" in entry) == ("path" in entry):
            raise SampleError(f"{about} needs either a dataset, of the hub, or a path")
        weight = entry.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise SampleError(f"{about} has weight {weight!r}; give a number above 0")
    return [Source(**entry) for entry in entries]


def _rows(source: Source, folder: Path, seed: int) -> Iterator[dict[str, Any]]:
    """The samples of one source, shuffled."""
    where = source.dataset or folder / Path(source.path or "").expanduser()
    stream = source.stream or isinstance(where, Path)
    rows = iter(undecoded(dataset(where, source.config, source.split, stream)).shuffle(seed=seed, buffer_size=SHUFFLED))
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # whatever a connection or a file breaks with
            raise SampleError(f"reading {where} broke off ({brief(error)}); check the network or the file, and try "
                              "again") from error
        if row is None:
            return
        prompt, images = _fields(source, row)
        if len(prompt.strip()) >= source.at_least:
            yield {"kind": source.name, "images": [fetched(image, where) for image in images], "question": prompt}


def _fields(source: Source, row: dict[str, Any]) -> tuple[str, list[Any]]:
    """The prompt and the images of a row; no prompt where a list that it is taken from is empty."""
    try:
        prompt = source.prompt.format_map({name: "" if value is None else value for name, value in row.items()})
        images = row[source.image] if source.image else []
    except IndexError:
        return "", []
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        asked = " and ".join(filter(None, (f"the prompt {source.prompt!r}", source.image)))
        raise SampleError(f"{source.name} has columns {', '.join(row)}, and not all of {asked} ({brief(error)}); name "
                          "those that it has, a prompt's in braces") from error
    return prompt, images if isinstance(images, list) else [] if images in (None, "") else [images]


def fetched(image: Any, where: str | Path) -> Any:
    """An image of a row as `popvlm.samples` reads it: what lies on the hub or in an archive is fetched."""
    if isinstance(image, dict) and not image.get("bytes") and "://" in str(image.get("path")):
        try:
            with fsspec.open(image["path"]) as file:
                return {"bytes": file.read(), "path": image["path"]}
        except Exception:  # it is then counted as an image that cannot be read
            return image
    if isinstance(image, str) and isinstance(where, Path) and not image.startswith(("http://", "https://", "data:")):
        return str(where.parent / image if where.is_file() else where / image)
    return image


def dataset(where: str | Path, config: str | None, split: str, stream: bool) -> Any:
    """A split as `datasets` loads it: a name on the hub, a folder, or a parquet, CSV or JSON lines file.

    What is local needs not be laid out as on the hub: where it lacks the config it is taken without one, and where it
    has one split only, that is it.

    Raises:
        SampleError: it cannot be had.
    """
    from datasets import get_dataset_config_names, load_dataset  # takes seconds to import # noqa: PLC0415

    try:
        if isinstance(where, str):
            return load_dataset(where, config, split=split, streaming=stream)
        if where.is_file() and where.suffix in FILES:
            # A CSV's cells are texts: as numbers 007 and 1.50 would not come back, as missing values NA would not.
            texts = {"features": _texts(where), "keep_default_na": False} if where.suffix == ".csv" else {}
            return load_dataset(FILES[where.suffix], data_files=str(where), split="train", streaming=stream, **texts)
        if where.is_dir():
            config = config if config in get_dataset_config_names(str(where)) else None
            splits = load_dataset(str(where), config, streaming=stream)
            return splits[split] if split in splits or len(splits) > 1 else next(iter(splits.values()))
    except Exception as error:  # datasets, the hub and file systems raise many kinds
        fix = "check its name, config and split, the network, and your login if it is gated"
        raise SampleError(f"the dataset {where} cannot be had ({brief(error)}); {fix}") from error
    raise SampleError(f"there is no data at {where}; give a folder, or a file that ends in {', '.join(FILES)}")


def _texts(path: Path) -> Any:
    """The columns of a CSV file, all of them texts."""
    from datasets import Features, Value  # noqa: PLC0415

    with path.open(encoding="utf-8-sig", newline="") as file:
        return Features({name: Value("string") for name in next(csv.reader(file), [])})


def undecoded(data: Any) -> Any:
    """The same, row by row, with images as the bytes or paths that they are, so that a damaged one stops nothing."""
    rows = data.to_iterable_dataset() if hasattr(data, "to_iterable_dataset") else data
    return rows.decode(False) if rows.features else rows  # those of a CSV file, say, show row by row
