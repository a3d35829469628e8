"""Real pretrained decoders on real text, full and pruned: what each part of POP is worth, and what fits add to it.

    python eval/real_decoders.py [smollm2-135m] [gemma-3-270m] [--quick] [--out eval/results]

A setting is a share of the last layers and a method. Each prompt of a setting is read once; from its cache the true
next tokens are scored and greedy ones written, token by token, as `generate` does. A setting's result is kept as soon
as it is there, and a run that was broken off goes on with the next. Prompts are of documents that no fit saw.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache

sys.path[:0] = [str(Path(__file__).parent)]

import baselines
import decoders
import texts
from decoders import DecoderError

from popvlm import PruningPlan, cache, prefill
from popvlm.decoders import family_of
from popvlm.fitting import fit
from popvlm.importance import ImportanceProfile, plot, profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("POP, own KV", "POP, fitted KV", "no boundary handling", "no independent KV", "removed from both stages")
MEASURES = ("loss", "kl", "top1", "same")
Setting = tuple[int, float, str]
"""Tokens of the prompts, share of the layers, method."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Args:
        prompts: how many, of `texts.KINDS` in turn.
        lengths: tokens of a prompt.
        ratios: shares of the layers that are skipped.
        tokens: that are scored and written after it.
        fit_on: prompts that projections are fitted on, of the shortest length.
        score_on: prompts that importance is scored on.
        batch: prompts at once.
    """

    prompts: int = 32
    lengths: tuple[int, ...] = (512, 1024, 2048)
    ratios: tuple[float, ...] = (0.2, 0.25, 1 / 3, 0.4, 0.5, 0.6)
    tokens: int = 64
    fit_on: int = 120
    score_on: int = 16
    batch: int = 8


QUICK = Sizes(prompts=8, lengths=(512,), ratios=(1 / 3, 0.6), tokens=32, fit_on=16, score_on=2)
"""What two cores should do in under ten minutes, both decoders together."""


@dataclass(frozen=True, eq=False)
class Said:
    """What a model says to `N` prompts.

    Args:
        boundary: log-probabilities of the first token, `[N, V]`.
        losses: `[N]`, of the true next tokens, mean negative log-likelihood in nats.
        written: greedy tokens, `[N, A]`.
    """

    boundary: Tensor
    losses: Tensor
    written: Tensor


@torch.no_grad()
def said(model: Any, prompts: Tensor, following: Tensor) -> Said:
    """Reads prompts `[N, P]` once; then scores the true next tokens `[N, A]` and writes greedy ones, side by side."""
    cache = DynamicCache()  # without the model's config: keeps all of a sliding layer too, for the baselines' masks
    output = model(input_ids=prompts, logits_to_keep=1, use_cache=True, **{_cache_argument(model): cache})
    boundary = output.logits[:, -1].float().log_softmax(-1)
    losses, written = [boundary.gather(1, following[:, :1])], [boundary.argmax(-1, keepdim=True)]
    cache.batch_repeat_interleave(2)  # of each prompt, one goes on with the true tokens and one with its own
    for step in range(following.shape[1] - 1):
        tokens = torch.stack([following[:, step], written[-1][:, 0]], 1).view(-1, 1)
        output = model(input_ids=tokens, use_cache=True, **{_cache_argument(model): cache})
        logits = output.logits[:, -1].float()
        losses.append(logits[::2].log_softmax(-1).gather(1, following[:, step + 1:step + 2]))
        written.append(logits[1::2].argmax(-1, keepdim=True))
    return Said(boundary, -torch.cat(losses, 1).mean(1), torch.cat(written, 1))


def compared(got: Said, full: Said) -> dict[str, list[float]]:
    """A setting's measures, prompt by prompt: `loss`, `kl` (full || this, at the boundary), `top1` (whether the first
    token is the same) and `same` (the share of greedy tokens before the first that differs)."""
    kl = F.kl_div(got.boundary.double(), full.boundary.double(), log_target=True, reduction="none").sum(-1)
    same = (got.written == full.written).long().cumprod(1).double().mean(1)
    return {"loss": got.losses.tolist(), "kl": kl.tolist(),
            "top1": (got.written[:, 0] == full.written[:, 0]).double().tolist(), "same": same.tolist()}


def putting(model: Any, plan: PruningPlan, method: str, fitted: Callable[[PruningPlan], PruningPlan]
            ) -> AbstractContextManager[Any]:
    """What puts a method on the model, for the layers of `plan`."""
    family = family_of(model)
    if method == METHODS[0]:
        return prefill.under(model, plan, family)
    if method == METHODS[1]:
        return prefill.under(model, fitted(plan), family)
    baseline = dict(zip(METHODS[2:], (baselines.without_boundary, baselines.without_kv, baselines.removed)))[method]
    return baseline(model, sorted(plan.text))


def measure(name: str, model: Any, tokenizer: Any, sizes: Sizes, kept: Path, state: Path) -> list[dict[str, Any]]:
    """Every setting's row, those of an earlier run that are in `kept` too. `state` is where fits are kept.

    Raises:
        DecoderError: `kept` is of other prompts, or damaged.
    """
    longest, room = max(sizes.lengths), sizes.tokens
    found = texts.mixed(tokenizer, sizes.prompts, longest + room, held_out=True)
    kinds = [kind for kind, _ in found]
    digest = hashlib.sha256(torch.stack([ids for _, ids in found]).numpy().tobytes()).hexdigest()[:12]
    rows = read(kept)
    if any(row["text"] != digest for row in rows):
        raise DecoderError(f"{kept} is of other prompts than this Python and these packages have; delete it, or give "
                           "another --out")
    done = {(row["length"], row["ratio"], row["method"]) for row in rows}
    depth = model.config.num_hidden_layers
    plans = {ratio: PruningPlan(depth, text=PruningPlan.last(depth, ratio).text) for ratio in sizes.ratios}
    fits: dict[PruningPlan, PruningPlan] = {}

    def fitted(plan: PruningPlan) -> PruningPlan:
        if plan not in fits:
            shortest = min(sizes.lengths)
            some = texts.mixed(tokenizer, sizes.fit_on, shortest, held_out=False)
            samples = [{"input_ids": prompt(tokenizer, ids, shortest)[None]} for _, ids in some]
            fits[plan], _ = fit(model, plan, samples, state=state,
                                progress=lambda turns: track(turns, f"{name}: fitting", console=Console(stderr=True)))
        return fits[plan]

    for length in sizes.lengths:
        prompts = torch.stack([prompt(tokenizer, ids[:longest], length) for _, ids in found])
        following = torch.stack([ids[longest:] for _, ids in found])

        def asked(prompts: Tensor = prompts, following: Tensor = following) -> Said:
            parts = [said(model, *pair) for pair in zip(prompts.split(sizes.batch), following.split(sizes.batch))]
            return Said(*(torch.cat([getattr(part, field) for part in parts])
                          for field in Said.__dataclass_fields__))

        settings: list[Setting] = [(length, 0.0, "full")]
        settings += [(length, ratio, method) for ratio in sizes.ratios for method in METHODS]
        left = [setting for setting in settings if setting not in done]
        full = asked() if left else None  # also where its row is there: the others are compared with it
        for setting in left:
            assert full is not None
            _, ratio, method = setting
            began = time.monotonic()
            got = full
            if method != "full":
                with putting(model, plans[ratio], method, fitted):
                    got = asked()
            row = {"model": name, "length": length, "ratio": ratio, "method": method, "kinds": kinds, "text": digest,
                   **compared(got, full), "seconds": round(time.monotonic() - began, 1)}
            with kept.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
            rows.append(row)
            print(f"{name}, {length} tokens, {ratio:.0%} {method}: "
                  + ", ".join(f"{measure} {mean(row[measure]):.3f}" for measure in MEASURES), flush=True)
    return rows


def prompt(tokenizer: Any, ids: Tensor, length: int) -> Tensor:
    """The last tokens of `ids`, `length` with the one that begins a text, where the tokenizer puts one there."""
    begin = tokenizer.bos_token_id
    if begin is None or tokenizer("a")["input_ids"][0] != begin:
        return ids[-length:]
    return torch.cat([torch.tensor([begin]), ids[len(ids) - length + 1:]])


def scored(model: Any, tokenizer: Any, sizes: Sizes, path: Path) -> ImportanceProfile:
    """The importance of each layer in prefill and in decode, kept sample by sample."""
    shortest = min(sizes.lengths)
    some = texts.mixed(tokenizer, sizes.score_on, shortest, held_out=False)
    samples = [{"input_ids": prompt(tokenizer, ids, shortest)[None]} for _, ids in some]
    return profile(model, samples, path=path, max_new_tokens=sizes.tokens)


def read(kept: Path) -> list[dict[str, Any]]:
    """The rows in a file, none if there is no file.

    Raises:
        DecoderError: a line is none.
    """
    rows = []
    for number, line in enumerate(kept.read_text().splitlines() if kept.exists() else (), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DecoderError(f"line {number} of {kept} is damaged; delete that line") from error
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: a line for each model, length and method, a column for each share of the layers."""
    ratios = sorted({row["ratio"] for row in rows} - {0})
    lines = ["| model, prompt | method | " + " | ".join(f"{ratio:.0%}" for ratio in ratios) + " |",
             "|---|---|" + "---|" * len(ratios)]
    cells = {(row["model"], row["length"], row["method"], row["ratio"]): row for row in rows}
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        full = cells.get((model, length, "full", 0))
        where = f"{model}, {length} tokens" + (f" (full: {mean(full['loss']):.3f})" if full else "")
        for method in METHODS:
            shown = [cells.get((model, length, method, ratio)) for ratio in ratios]
            lines.append(f"| {where} | {method} | " + " | ".join(_cell(row) if row else "" for row in shown) + " |")
            where = ""
    return "\n".join([*lines, "", "Loss of the next tokens in nats / KL at the boundary / first token the same / share "
                      "of greedy tokens before the first that differs."])


def _cell(row: dict[str, Any]) -> str:
    return (f"{mean(row['loss']):.3f} / {mean(row['kl']):.3f} / {mean(row['top1']):.0%} / {mean(row['same']):.0%}")


def quality_plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Loss against the share of layers, for each method: a panel for each model, at its shortest prompts."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5.6 * len(models), 4.4), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models):
        length = min(row["length"] for row in rows if row["model"] == model)
        ours = [row for row in rows if row["model"] == model and row["length"] == length]
        full = [mean(row["loss"]) for row in ours if row["method"] == "full"]
        for method, style in zip(METHODS, ("o-", "s-", "^--", "v--", "x:")):
            line = sorted((row["ratio"], mean(row["loss"])) for row in ours if row["method"] == method)
            axes.plot([0] * len(full) + [100 * ratio for ratio, _ in line], full + [loss for _, loss in line], style,
                      label=method, markersize=4)
        axes.set_title(f"{model}, {length}-token prompts", size=10)
        axes.set_xlabel("layers skipped in prefill (the last, %)")
        axes.set_ylabel("loss of the next tokens (nats)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return figure


def run(names: Sequence[str], sizes: Sizes, out: Path, mark: str,
        load: Callable[[str], tuple[Any, Any]] = decoders.load) -> str:
    """Measures the named decoders, draws both plots into `out`, and returns the table.

    Args:
        names: of `decoders.SOURCES`.
        sizes: how much.
        out: the folder of the results.
        mark: set between the results' names and their endings, so that quick ones do not mix with others.
        load: gives a decoder's tokenizer and model.
    """
    if unknown := [name for name in names if name not in decoders.SOURCES]:
        raise DecoderError(f"there is no decoder {unknown[0]}; give some of {', '.join(decoders.SOURCES)}")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    profiles = []
    for name in names:
        tokenizer, model = load(name)
        profiles.append(scored(model, tokenizer, sizes, out / f"real_decoders_{name}{mark}.importance.safetensors"))
        rows += measure(name, model, tokenizer, sizes, out / f"real_decoders_{name}{mark}.jsonl",
                        cache.folder() / "moments")
    quality_plot(rows).savefig(out / f"real_decoders{mark}_quality.png", dpi=150)
    plot(*profiles).savefig(out / f"real_decoders{mark}_importance.png", dpi=150)
    made = table(rows)
    (out / f"real_decoders{mark}.md").write_text(made + "\n")
    return made


def main(names: Annotated[list[str] | None, typer.Argument(help="Decoders; all if left out.")] = None,
         quick: Annotated[bool, typer.Option("--quick", help=(
             "Few prompts of 512 tokens, 32 tokens after them, two shares of the layers."))] = False,
         out: Path = Path(__file__).parent / "results") -> None:
    try:
        print(run(names or list(decoders.SOURCES), QUICK if quick else Sizes(), out, "_quick" if quick else ""))
    except DecoderError as error:
        print(f"real_decoders: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _cache_argument(model: Any) -> str:
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


if __name__ == "__main__":
    typer.run(main)
