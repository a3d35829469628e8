"""What a run found, from its answers on disk: one record, as JSON, a terminal table, a plot and an HTML page."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from metrics import EXTRAS, METRICS
from paired import interval, paired
from PIL import Image
from rich.box import SIMPLE
from rich.table import Table
from settings import FULL
from tasks import Sample, Task

from popvlm.samples import UnreadableImage, opened

SHOWN = 24
"""Samples of each task that are shown where settings disagree with the full model."""
SHORT = {"the same within a point": "same", "too few to tell": "too few"}
"""Verdicts for the terminal."""
Answers = Mapping[str, Mapping[str, Any]]


def compared(task: Task, samples: Sequence[Sample], answers: Mapping[str, Answers], seed: int) -> dict[str, Any]:
    """A task's figures: every setting on the samples that all of them answered, images of the same size.

    Args:
        task: of the samples.
        samples: all that were to be asked.
        answers: by setting's name the rows that `answers.Kept` has, by key; the full model among them.
        seed: of the bootstrap.
    """
    score = METRICS[task.metric]
    failed: dict[str, str] = {}
    for sample in samples:
        rows = [settings.get(sample.key) or {"error": "it was not asked"} for settings in answers.values()]
        if error := next((row["error"] for row in rows if row.get("error")), None):
            failed[sample.key] = error
        elif len({row.get("scale", 1.0) for row in rows}) > 1:
            failed[sample.key] = "not all settings had memory for images of the same size"
    usable = [sample for sample in samples if sample.key not in failed]
    smaller = sum("scale" in answers[FULL][sample.key] for sample in usable)
    record: dict[str, Any] = {"title": task.title, "metric": task.metric, "samples": len(samples),
                              "compared": len(usable), "failed": failed, "smaller images": smaller, "settings": {}}
    if not usable:
        return record
    record["tokens"] = {"prompt": fmean(answers[FULL][sample.key]["prompt"] for sample in usable),
                        "visual": fmean(answers[FULL][sample.key]["visual"] for sample in usable)}
    scores = {name: [score(rows[sample.key]["answer"], sample.target) for sample in usable]
              for name, rows in answers.items()}
    groups = sorted({sample.group for sample in usable} - {""})
    for name, rows in answers.items():
        low, high = interval(scores[name], seed=seed)
        found: dict[str, Any] = {"score": fmean(scores[name]), "low": low, "high": high}
        if task.metric in EXTRAS:
            found["extras"] = EXTRAS[task.metric]((rows[sample.key]["answer"], sample.target) for sample in usable)
        found["groups"] = {group: fmean(mark for mark, sample in zip(scores[name], usable) if sample.group == group)
                           for group in groups}
        if name != FULL:
            same = [rows[sample.key]["answer"] == answers[FULL][sample.key]["answer"] for sample in usable]
            found["against full"] = paired(scores[FULL], scores[name], same, seed=seed).record()
        record["settings"][name] = found
    record["disagreements"] = _disagreements(usable, answers, scores)
    return record


def _disagreements(samples: Sequence[Sample], answers: Mapping[str, Answers], scores: Mapping[str, Sequence[float]]
                   ) -> list[dict[str, Any]]:
    """The samples on which settings and the full model answer differently, those first whose scores lie furthest
    apart; of all that there are, `SHOWN`."""
    found = []
    for index, sample in enumerate(samples):
        said = {name: rows[sample.key]["answer"] for name, rows in answers.items()}
        if len(set(said.values())) > 1:
            marks = {name: scores[name][index] for name in said}
            found.append({"key": sample.key, "prompt": sample.prompt, "right": _right(sample), "answers": said,
                          "scores": marks, "apart": max(abs(mark - marks[FULL]) for mark in marks.values())})
    return sorted(found, key=lambda one: -one["apart"])[:SHOWN]


def _right(sample: Sample) -> str:
    target = sample.target
    if target.box:
        return f"inside {[round(side, 3) for side in target.box]}"
    return " | ".join(dict.fromkeys(target.answers))


def averages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Each setting's mean score over the tasks, those that could be compared."""
    shown = [task["settings"] for task in tasks.values() if task["settings"]]
    return {name: fmean(settings[name]["score"] for settings in shown) for name in (shown[0] if shown else {})}


def tables(record: Mapping[str, Any]) -> list[Table]:
    """The record for the terminal, a table a task; its verdicts' reasons are in the page."""
    speedups = {name: f"{found['speedup']:.2f}x" for name, found in record["timing"][-1]["settings"].items()
                } if record["timing"] else {}
    made = []
    for task in record["tasks"].values():
        shown = Table(title=f"{task['title']}, {task['compared']} of {task['samples']} questions", title_justify="left",
                      box=SIMPLE, pad_edge=False)
        for column in "setting", "score", "diff.", "95 % interval", "p", "same", "TTFT", "verdict":
            shown.add_column(column, justify="left" if column in ("setting", "verdict") else "right",
                             no_wrap=column != "setting", overflow="fold")  # a long name takes two lines
        for name, found in task["settings"].items():
            against = found.get("against full")
            shown.add_row(name, f"{100 * found['score']:.1f}", *(
                (f"{100 * against['difference']:+.1f}", f"{100 * against['low']:+.1f} to {100 * against['high']:+.1f}",
                 f"{against['p_value']:.3f}", f"{100 * against['loyalty']:.1f}") if against else [""] * 4),
                speedups.get(name, ""), SHORT.get(said := against["verdict"].split(":")[0], said) if against else "")
        if task["failed"]:
            shown.caption = (f"{len(task['failed'])} failed and are left out; the first: "
                             f"{next(iter(task['failed'].values()))}")
        made.append(shown)
    return made


def plot(record: Mapping[str, Any]) -> Figure | None:
    """Mean score against the measured time to first token; None where nothing was timed."""
    if not record["timing"] or not record["average"]:
        return None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float, str]]] = {}
    for name, found in record["timing"][-1]["settings"].items():
        share, _, method = name.partition("% ")  # as Makers.baseline names it: "33% pop"
        lines.setdefault(method or name, []).append(
            (1000 * found["first_token_s"], 100 * record["average"][name], f"{share} %" if method else ""))
    for number, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda point: float(point[2].rstrip(" %") or 0))
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "so^vDPX*<>"[number % 10] + "-", label=method,
                  alpha=0.8)
        for x, y, share in points if len(points) > 1 else ():
            axes.annotate(share, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
    figure.legend(loc="outside right upper")
    axes.set(xlabel="time to first token, ms (median)", ylabel="score, mean over tasks",
             title=Path(record["run"]["model"]).name)
    axes.grid(alpha=0.3)
    return figure


def page(record: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]]) -> str:
    """The record as one HTML page that needs nothing else.

    Args:
        record: of the run.
        samples: by task's name, for the images of those on which settings disagree.
    """
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    pictures = {}
    for name, task in record["tasks"].items():
        by_key = {sample.key: sample for sample in samples[name]}
        pictures[name] = {one["key"]: [_thumbnail(image) for image in by_key[one["key"]].images]
                          for one in task.get("disagreements", [])}
    drawn = plot(record)
    picture = None
    if drawn is not None:
        file = BytesIO()
        drawn.savefig(file, format="svg")
        picture = _url(file.getvalue(), "svg+xml")
    return environment.get_template("report.html.jinja").render(record=record, pictures=pictures, plot=picture,
                                                                full=FULL)


def _thumbnail(image: Any, side: int = 360) -> str:
    try:
        small = opened(image)
    except UnreadableImage:
        return ""
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    file = BytesIO()
    small.save(file, "JPEG", quality=82)
    return _url(file.getvalue(), "jpeg")


def _url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
