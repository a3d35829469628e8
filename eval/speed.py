"""Time to first token on shapes of real models with random weights, in full and pruned, beside what FLOPs allow.

    python eval/speed.py cpu      # Qwen3-VL-2B and Gemma-3-4B shapes, 512 to 2,048 tokens, float32; hours of two cores
    python eval/speed.py short    # prompts of 68 to 256 tokens: below which length does pruning not pay?
    python eval/speed.py growth   # lengths to 8,192 and batches to 8 on a shape cut to 6 layers
    python eval/speed.py gpu      # Qwen3-VL-8B and Gemma-3-12B, 2,048 and 8,192 tokens; minutes of one GPU of 80 GB

Each row is kept in eval/results as soon as it is there; the same command goes on where a run was broken off. With
`--layers 2 --device cpu --length 128` a small machine tries any of them. `popvlm benchmark` measures a model by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers.utils import is_flash_attn_2_available

from popvlm import benchmark, benchmark_report
from popvlm.benchmark import BenchmarkError, Plans, Setting, candidates, from_shape

TEXT = 64
"""Tokens of the question."""


@dataclass(frozen=True)
class Part:
    """What is timed of one shape: every plan at every length and batch.

    Args:
        shape: of `popvlm.shapes`.
        lengths, batches: of the prompts.
        plans: shares of the layers, who skips them, and whose keys and values, as `candidates` takes them.
        whole: with the vision encoder; else the decoder alone.
        layers: to which the shape is cut; None for all.
        dtype: of the weights. float32 where a CPU has no bfloat16 arithmetic.
        rounds: pairs of runs.
    """

    shape: str
    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    plans: tuple[tuple[float, ...], tuple[str, ...], tuple[str, ...]] = ((1 / 3, 0.6), ("all",), ("own", "fitted"))
    whole: bool = False
    layers: int | None = None
    dtype: str = "float32"
    rounds: int = 5


VISUAL = (1 / 3, 0.6), ("visual",), ("own", "fitted")
SETS = {
    "cpu": [part for shape in ("qwen3-vl-2b", "gemma-3-4b") for part in (
        Part(shape, (1024, 512, 2048)), Part(shape, (1024, 512, 2048), plans=VISUAL),
        Part(shape, (1024,), plans=((1 / 3, 0.6), ("all",), ("fitted",)), whole=True, rounds=3))],
    "short": [Part("qwen3-vl-2b", (68, 96, 128, 256), layers=14, rounds=11)],
    "growth": [Part("qwen3-vl-2b", (256, 512, 1024, 2048, 4096, 8192), layers=6, rounds=3),
               Part("qwen3-vl-2b", (512,), (2, 4, 8), layers=6, rounds=3)],
    "gpu": [part for shape in ("qwen3-vl-8b", "gemma-3-12b") for part in (
        Part(shape, (2048, 8192), dtype="bfloat16", whole=True),
        Part(shape, (2048, 8192), (8,), dtype="bfloat16", rounds=3))]}


def main(name: Annotated[str, typer.Argument(metavar="|".join(SETS))],
         layers: Annotated[int | None, typer.Option(help="Cut the shapes to their first layers.")] = None,
         length: Annotated[list[int] | None, typer.Option(help="In place of the set's lengths.")] = None,
         device: str = "auto", out: Path = Path(__file__).parent / "results") -> None:
    console = Console(stderr=True)
    try:
        if name not in SETS:
            raise BenchmarkError(f"there is no set {name!r}; give one of {', '.join(SETS)}")
        rows = [row for part in SETS[name] for row in measured(
            replace(part, layers=layers or part.layers, lengths=tuple(length or part.lengths)), device,
            out / f"speed_{name}.jsonl", console)]
    except BenchmarkError as error:
        console.print(f"speed: {error}")
        raise typer.Exit(2) from None
    for table in (*benchmark_report.tables(rows), benchmark_report.pieces(rows)):
        Console().print(table)
    benchmark_report.plot([row for row in rows if not row["setting"]["whole"]] or rows).savefig(
        out / f"speed_{name}.png", dpi=110)


def measured(part: Part, device: str, kept: Path, console: Console) -> list[dict[str, Any]]:
    """The part's rows, those of an earlier run too."""
    plans: Plans = candidates(*part.plans, TEXT)
    settings = [Setting(part.shape, part.layers, part.dtype, attention, device, length, TEXT, batch, plan, part.whole,
                        "", 16, part.rounds, benchmark.machine(device))
                for attention in attentions() for plan in plans for batch in part.batches for length in part.lengths]

    def load(dtype: str, attention: str | None) -> tuple[None, Any]:
        return None, from_shape(part.shape, part.layers, dtype, attention, device)

    return benchmark.run(load, settings, plans, kept=kept, say=lambda step: console.print(f"{part.shape}: {step}"))


def attentions() -> Iterator[str]:
    """sdpa, and flash attention where it is installed."""
    yield "sdpa"
    if torch.cuda.is_available() and is_flash_attn_2_available():
        yield "flash_attention_2"


if __name__ == "__main__":
    typer.run(main)
