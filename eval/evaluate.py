"""Full against pruned on benchmarks: what a plan costs in accuracy and buys in time, on your model and your task.

    python eval/evaluate.py --model tiny-qwen3-vl --tasks easy-vqa,scenes --plan last-third --limit 200
    python eval/evaluate.py --model Qwen/Qwen3-VL-8B-Instruct --tasks textvqa,docvqa --plan plan.json --baselines all
    accelerate launch eval/evaluate.py ...     # a replica of the model on each GPU

Answers are kept as they come: the same command goes on where a run was broken off. `report.html` in the output folder
shows it all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

sys.path.insert(0, str(Path(__file__).parent))

import report
import timing
from answers import AnswerError, Kept, ask_all, batches, prepared
from settings import BASELINES, FULL, Makers, Setting, SettingError, full, slug
from tasks import NAMES, Sample, Task, TaskError, digest, find, load

from popvlm import PlanError, answer, embedded
from popvlm.benchmark import processor_name
from popvlm.decoders import UnsupportedModel, family_of, identity
from popvlm.fitting import FittingError
from popvlm.plan import replacing
from popvlm.samples import BuiltinMix, Prepared, SampleError, UnreadableImage, opened

ERRORS = (AnswerError, FittingError, PlanError, SampleError, SettingError, TaskError, UnsupportedModel,
          answer.ModelError, embedded.EmbeddedModelError)
"""All of them a sentence for the user."""
PACKAGES = "popvlm", "torch", "transformers", "datasets", "scipy", "numpy", "pillow"
LISTED = "Several with commas between: "


class RunError(ValueError):
    """A run that cannot be; the message names the fix."""


def main(
    model: Annotated[str, typer.Option(help="A model's folder, a name on the hub, or an embedded model.")],
    tasks: Annotated[str, typer.Option(help=LISTED + f"{', '.join(NAMES)}; NAME:SPLIT; a task's YAML file; a CSV or "
                                       "JSON lines file of image, question, answers.")],
    plan: Annotated[list[str] | None, typer.Option(help=(
        "A plan's file, last-third or lossless; may be given again. Without it and --baselines: last-third."))] = None,
    names: Annotated[str, typer.Option("--baselines", help=LISTED + f"{', '.join(BASELINES)}, or all.")] = "",
    ratios: Annotated[str, typer.Option(help="Shares of the layers for --baselines, commas between.")] = "0.3333",
    limit: Annotated[int | None, typer.Option(min=1, help="Draw so many samples of each task; else all.")] = None,
    out: Annotated[Path, typer.Option(help="Where answers and report go.")] = Path("evaluation"),
    data: Annotated[list[str] | None, typer.Option(help=(
        "TASK=PATH: a folder or file with the task's columns, in place of the hub; may be given again."))] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Read the hub row by row, download no more.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the draw of samples and of the bootstrap.")] = 0,
    timed: Annotated[int, typer.Option("--time", min=0, help="Prompts to time each setting on; 0 times none.")] = 8,
    calibrate: Annotated[int, typer.Option(min=1, help="Prompts for what is fitted or chosen.")] = 64,
    calibrate_on: Annotated[str, typer.Option(help="mix (drawn), or tasks, as easy-vqa:train,scenes:train.")] = "mix",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto (one model over all devices), cpu, cuda:1, ...")] = "auto",
    attention: Annotated[str | None, typer.Option(help="sdpa, eager, ...; transformers' choice if left out.")] = None,
) -> None:
    console = Console(stderr=True)
    try:
        _run(console, model, tasks, plan or [], names, ratios, limit, out, data or [], stream, batch, seed, timed,
             calibrate, calibrate_on, dtype, device, attention)
    except (*ERRORS, RunError) as error:
        console.print(f"[bold red]evaluate:[/] {error}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


def _run(console: Console, name: str, tasks: str, plans: list[str], baselines: str, ratios: str, limit: int | None,
         out: Path, data: list[str], stream: bool, batch: int, seed: int, timed: int, calibrate: int,
         calibrate_on: str, dtype: str, device: str, attention: str | None) -> None:
    local = _local_data(data)
    chosen = [find(task, local.pop(task, None)) for task in tasks.split(",")]
    if local:
        raise RunError(f"--data names {next(iter(local))}, which is not in --tasks; name it there too")
    if len({task.name for task in chosen}) < len(chosen):
        raise RunError("--tasks has two tasks of one name; give each once")
    shares = _shares(ratios)
    wanted = list(BASELINES) if baselines == "all" else [each for each in baselines.split(",") if each]
    if unknown := [each for each in wanted if each not in BASELINES]:
        raise RunError(f"there is no baseline {unknown[0]!r}; there are {', '.join(BASELINES)}, and all")

    # Processes may be hours apart when they meet.
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    state = PartialState(**{"cpu": True} if device == "cpu" else {}, **{"timeout": timedelta(days=7)} if many else {})
    checkpoint = answer.find(name, console.print)
    if not checkpoint.reads_images:
        raise RunError(f"{name} reads text only; give a vision-language model")
    samples = {task.name: load(task, limit, seed=seed, stream=stream, model_type=checkpoint.config.model_type)
               for task in chosen}
    processor, model = answer.load(checkpoint, dtype=dtype, attention=attention,
                                   device=str(state.device) if many and device == "auto" else device)
    processor.tokenizer.padding_side = "left"
    run = {"model": name, "weights": identity(model), "dtype": str(model.dtype),
           "attention": model.config._attn_implementation, "batch": batch, "seed": seed, "limit": limit,
           "calibration": f"{calibrate} of {calibrate_on}"}
    lengths = _lengths(processor, model, [sample for some in samples.values() for sample in some])
    ours = hashlib.sha256(json.dumps([run["weights"], run["dtype"], run["calibration"], seed]).encode()).hexdigest()[:8]
    makers = Makers(model, out / "plans" / ours, partial(_calibration, processor, calibrate, calibrate_on, seed),
                    lengths)
    with state.main_process_first():  # which fits, and keeps what it fitted
        settings = [full(), *(makers.plan(each) for each in plans),
                    *(makers.baseline(each, share) for share in shares for each in wanted)]
        if len(settings) == 1:
            settings.append(makers.plan("last-third"))
    if len({slug(setting.name) for setting in settings}) < len(settings):
        raise RunError("two settings have one name; give each plan once, in a file of another name")

    kept: dict[str, dict[str, Kept]] = {task.name: {} for task in chosen}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not state.is_main_process) as progress:
        for task in chosen:
            asked, these = _as_asked(task), digest(samples[task.name])
            planned = batches(samples[task.name], batch)[state.process_index::state.num_processes]
            for setting in settings:
                header = run | {"task": asked, "samples": these, "setting": setting.record}
                file = Kept(out / "answers", f"{slug(task.name)}.{slug(setting.name)}", header, state.process_index)
                kept[task.name][setting.name] = file
                bar = progress.add_task(f"{task.title}: {setting.name}", total=sum(map(len, planned)))
                with setting.put(model):
                    ask_all(model, processor, planned, file, task.max_new_tokens, partial(progress.advance, bar))
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    for files in kept.values():
        for file in files.values():
            file.read()
    found = {task.name: report.compared(task, samples[task.name],
                                        {name: file.rows for name, file in kept[task.name].items()}, seed)
             for task in chosen}
    record = {"run": run | {"processes": state.num_processes, "rounds": timing.ROUNDS, "hardware": hardware(model),
                            "versions": versions(), "command": " ".join(sys.argv)},
              "settings": {setting.name: setting.record for setting in settings}, "tasks": found,
              "average": report.averages(found), "timing": []}
    _write(record, samples, out)  # should the timing break off
    times = _timed(model, processor, settings, chosen, samples, kept, timed, console)
    record["timing"] = timing.summary(times)
    _write(record, samples, out)
    for table in report.tables(record):
        Console().print(table)
    for task_found in found.values():
        if not task_found["settings"]:
            raise RunError(f"of {task_found['samples']} samples of {task_found['title']} none was answered; the first: "
                           f"{next(iter(task_found['failed'].values()))}")
    Console().print(f"{out / 'report.html'} shows it with the samples where settings disagree", soft_wrap=True)


def _local_data(data: Sequence[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in data]
    if wrong := [each for each, (_, equals, path) in zip(data, pairs) if not equals or not path]:
        raise RunError(f"--data is {wrong[0]!r}; write TASK=PATH")
    return {task: path for task, _, path in pairs}


def _shares(ratios: str) -> list[float]:
    try:
        return [float(ratio) for ratio in ratios.split(",")]
    except ValueError:
        raise RunError(f"--ratios is {ratios!r}; give numbers from 0 to 1 with commas between") from None


def _as_asked(task: Task) -> dict[str, Any]:
    """What decides on a task's answers; its metric may change between runs."""
    return {"name": task.name, "from": task.dataset or task.path or task.drawn, "config": task.config,
            "split": task.split, "prompt": task.prompt, "max_new_tokens": task.max_new_tokens}


def _lengths(processor: Any, model: Any, samples: Sequence[Sample], count: int = 16) -> tuple[int, int]:
    """The mean visual and text tokens of a few of the prompts."""
    ids = torch.tensor(family_of(model).visual_token_ids(model.config))
    seen = []
    for sample in random.Random(0).sample(list(samples), min(count, len(samples))):
        try:
            tokens = prepared(processor, [sample], [[opened(image) for image in sample.images]])["input_ids"]
        except (UnreadableImage, ValueError, TypeError, IndexError):  # will be told when it is asked
            continue
        seen.append((int(torch.isin(tokens, ids).sum()), tokens.shape[1]))
    visual, whole = (sum(each) // max(1, len(seen)) for each in (zip(*seen) if seen else ((0,), (1,))))
    return visual, max(1, whole - visual)


def _calibration(processor: Any, count: int, source: str, seed: int) -> Prepared:
    if source == "mix":
        return Prepared(processor, BuiltinMix(count, seed))
    some: list[Sample] = []
    names = source.split(",")
    for number, name in enumerate(names):
        some += load(find(name), max(1, (count + number) // len(names)), seed=seed)
    return Prepared(processor, [{"images": list(sample.images), "question": sample.prompt} for sample in some])


def _timed(model: Any, processor: Any, settings: Sequence[Setting], tasks: Sequence[Task],
           samples: Mapping[str, Sequence[Sample]], kept: Mapping[str, Mapping[str, Kept]], count: int,
           console: Console) -> list[timing.Row]:
    """Times prompts from the shortest to the longest of all tasks."""
    known = [(row["prompt"], row["visual"], sample, task.max_new_tokens) for task in tasks
             for sample in samples[task.name]
             if (row := kept[task.name][FULL].rows.get(sample.key)) and not any(
                 file.rows.get(sample.key, {"error": ""}).keys() & {"error", "scale"}
                 for file in kept[task.name].values())]
    known.sort(key=lambda one: one[0])
    count = min(count, len(known))
    chosen = [known[round(step * (len(known) - 1) / max(1, count - 1))] for step in range(count)]
    progress = partial(track, description="timing", console=console)
    # Prompts of several tasks may have one key.
    return [row for _, visual, sample, longest in progress(chosen)
            for row in timing.measure(model, processor, [each for each in settings if each.timed], [sample], [visual],
                                      longest)]


def _write(record: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]], out: Path) -> None:
    with replacing(out / "report.json") as path:
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8", errors="backslashreplace")
    with replacing(out / "report.html") as path:
        path.write_text(report.page(record, samples), encoding="utf-8", errors="backslashreplace")
    if (drawn := report.plot(record)) is not None:
        drawn.savefig(out / "plot.png", dpi=150)


def hardware(model: Any) -> dict[str, Any]:
    """What a model runs on."""
    device = torch.device(model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return {"device": f"{name} ({device})", "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "system": platform.platform()}


def versions() -> dict[str, str]:
    """Of Python and the packages that a score depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # popvlm itself, run from its checkout
            found[package] = getattr(sys.modules.get(package), "__version__", "unknown")
    return found


if __name__ == "__main__":
    typer.run(main)
