"""A benchmark's rows as tables and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for each model, dtype and attention implementation, a line for each prompt and plan."""
    made = []
    for title, some in groupby(rows, _title):
        table = Table(title=title, title_justify="left",
                      caption="prefill, first token and decode: so many times as fast as the full model (median of "
                      "pairs, 95 % interval); limit: what FLOPs allow; reached: prefill's share of it; memory: of a "
                      "call, pruned over full, and the fits beside the weights", caption_justify="left")
        for column in "prompt", "plan", "prefill", "limit", "reached", "first token", "limit", "decode", "memory":
            table.add_column(column, justify="left" if column == "plan" else "right", overflow="fold")
        for row in some:
            found, limits = row["ratio"], row["limit"]
            table.add_row(_prompt(row), row["setting"]["plan"], _interval(found["prefill"]),
                          f"{limits['prefill']:.2f}x", f"{row['reached']:.0%}",
                          f"{found['first_token']['median']:.2f}x", f"{limits['first_token']:.2f}x",
                          f"{found['decode']['median']:.2f}x", _memory(row))
        made.append(table)
    return made


def pieces(rows: Sequence[Row]) -> Table:
    """The time to first token and its pieces, and how it goes on: a line for each prompt and plan."""
    table = Table(title="seconds, full > pruned (of what a plan does not touch, the full model's)",
                  title_justify="left")
    for column in ("prompt", "plan", "first token", "preprocessing", "vision", "prefill", "other", "first decode step",
                   "tokens/s"):
        table.add_column(column, justify="left" if column == "plan" else "right", overflow="fold")
    for row in rows:
        full, pruned = (row["median"][side] for side in ("full", "pruned"))
        both = {name: f"{full[name]:.3f} > {pruned[name]:.3f}"
                for name in ("first_token_s", "prefill_s", "first_decode_s")}
        table.add_row(_prompt(row), row["setting"]["plan"], both["first_token_s"], f"{full['preprocessing_s']:.3f}",
                      f"{full['vision_s']:.3f}", both["prefill_s"], f"{full['other_s']:.3f}", both["first_decode_s"],
                      f"{full['tokens_per_s']:.1f} > {pruned['tokens_per_s']:.1f}")
    return table


def plot(rows: Sequence[Row]) -> Figure:
    """Speed-up of the prefill against the prompt's length, a line for each plan, its limit dashed in its colour."""
    from matplotlib.figure import Figure  # not with the module: it takes a second to import # noqa: PLC0415
    from matplotlib.ticker import ScalarFormatter  # noqa: PLC0415

    panels: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        title = f"{_title(row)}, batch {row['setting']['batch']}"
        panels.setdefault(title, {}).setdefault(row["setting"]["plan"], []).append(row)
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    for axes, (title, of_plan) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for index, (name, unsorted) in enumerate(of_plan.items()):
            those = sorted(unsorted, key=_length)
            lengths, ratios = [_length(row) for row in those], [row["ratio"]["prefill"] for row in those]
            middle = [each["median"] for each in ratios]
            ends = [[abs(each[end] - each["median"]) for each in ratios] for end in ("low", "high")]
            axes.errorbar(lengths, middle, yerr=ends, fmt="o-", color=f"C{index}", capsize=3, markersize=4, label=name)
            axes.plot(lengths, [row["limit"]["prefill"] for row in those], "--", color=f"C{index}", linewidth=1)
        axes.plot([], [], "--", color="grey", linewidth=1, label="what its FLOPs allow")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({_length(row) for those in of_plan.values() for row in those}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("speed-up of the decoder's prefill")
        axes.set_title(title, size=10, wrap=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def can_draw(path: Path) -> bool:
    """Whether a plot can be written in the format that the file's name ends with."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    return path.suffix[1:] in Figure().canvas.get_supported_filetypes()


def _title(row: Row) -> str:
    setting = row["setting"]
    cut = f", first {setting['layers']} layers" if setting["layers"] else ""
    attention = f", {setting['attention']}" if setting["attention"] else ""
    return f"{setting['model']}{cut}, {setting['dtype']}{attention}"


def _length(row: Row) -> int:
    return row["prompt"]["visual"] + row["prompt"]["text"]


def _prompt(row: Row) -> str:
    visual, text, batch = row["prompt"]["visual"], row["prompt"]["text"], row["setting"]["batch"]
    return (f"{batch} x " if batch > 1 else "") + (f"{visual}+{text}" if visual else f"{text}")


def _interval(found: dict[str, float]) -> str:
    return f"{found['median']:.2f}x ({found['low']:.2f}-{found['high']:.2f})"


def _memory(row: Row) -> str:
    full, pruned = (row["peak_bytes"][side] for side in ("full", "pruned"))
    fits = f" + {row['fitted_bytes'] / 1e6:.0f} MB" if row["fitted_bytes"] else ""
    return "" if full is None or pruned is None else f"{pruned / full:.2f}x{fits}"
