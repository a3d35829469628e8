"""Six experiments on calibration, one command each; results as JSON and a plot in calibration/results.

    python calibration/experiments.py predicted tiny-qwen3-vl     # what gates predict against what plans cost
    python calibration/experiments.py frontier tiny-qwen3-vl      # speed-up against divergence, agreement and accuracy
    python calibration/experiments.py travel tiny-qwen3-vl        # fitted on one kind of prompt, tested on the others
    python calibration/experiments.py enough tiny-qwen3-vl        # how many prompts a fit and a profile need
    python calibration/experiments.py expense tiny-qwen3-vl       # time and memory of calibrating beside a plain pass
    python calibration/experiments.py smaller tiny-qwen3-vl       # fits of less memory: scale and shift, low rank

Models: the embedded VLMs (tiny-qwen3-vl, gemma-3-270m-vision), and the real decoders (smollm2-135m, gemma-3-270m) of
eval/real_decoders.py.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import spearmanr

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "eval"), str(ROOT / "eval" / "training")]

from popvlm import PruningPlan, cost, fitting, prefill
from popvlm.decoders import family_of
from popvlm.fitting import Moments, fit
from popvlm.importance import TENSORS, ImportanceProfile, plot, profile
from popvlm.quality import continued, measure, placed, references
from popvlm.samples import BuiltinMix, Prepared
from popvlm.selection import mean_lengths

RESULTS = Path(__file__).parent / "results"
DECODERS = "smollm2-135m", "gemma-3-270m"
LENGTH = 256
"""Tokens of a decoder's prompt."""
app = typer.Typer(help=__doc__, no_args_is_help=True)
Samples = Sequence[Mapping[str, Any]]


@dataclass
class Subject:
    """A model, and its prompts by kind: `prompts(kind, split, count)`, and `answers` to those that have one."""

    name: str
    model: Any
    kinds: tuple[str, ...]
    prompts: Callable[[str, str, int], Samples]
    answers: Callable[[str, int], list[torch.Tensor]] | None = None

    @property
    def depth(self) -> int:
        depth: int = self.model.config.get_text_config().num_hidden_layers
        return depth

    def mix(self, split: str, count: int) -> Samples:
        """Of all kinds in turn; fewer where a kind has no more."""
        turns = -(-count // len(self.kinds))
        each = [self.prompts(kind, split, turns) for kind in self.kinds]
        return [some[turn] for turn in range(turns) for some in each if turn < len(some)][:count]


def subject(name: str) -> Subject:
    if name in DECODERS:
        return decoder(name)
    from data import easy
    from scenes import SIZES, SQUARE, scene
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from popvlm import embedded
    path = embedded.folder(name, print)
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    square = name.startswith("gemma")
    own = ("easy", "shapes", "signs", "table", "chart", "diagram")
    drawn = {"documents": ("document", "dense text"), "photographs": ("scene",), "screenshots": ("screenshot",),
             "text": ("text",), "code": ("code",)}

    def asked(kind: str, split: str, index: int) -> tuple[Any, Any]:
        rng = random.Random(f"{kind}-{split}-{index}")
        if kind == "easy":
            picture: Any = rng.choice(easy("test" if split == "test" else "train"))
        else:
            picture = scene(f"calibration-{split}", index, kind, 1, SQUARE if square else SIZES)
        return picture.image, rng.choice(picture.questions)

    def prompts(kind: str, split: str, count: int) -> Samples:
        if kind in own:
            pairs = [asked(kind, split, index) for index in range(count)]
            made: Any = [{"image": image, "question": one.text} for image, one in pairs]
        else:
            made = BuiltinMix(count, seed=int(split == "test"), largest=512, kinds=drawn[kind])
        return list(Prepared(processor, made))

    def answers(split: str, count: int) -> list[torch.Tensor]:
        stop = model.generation_config.eos_token_id
        end = stop[-1] if isinstance(stop, list) else stop
        asked_for = [asked(own[index % len(own)], split, index // len(own))[1] for index in range(count)]
        return [torch.tensor([*processor.tokenizer(one.answer, add_special_tokens=False)["input_ids"], end])
                for one in asked_for]

    return Subject(name, model, (*own, *drawn), prompts, answers)


def decoder(name: str) -> Subject:
    import decoders
    import texts
    tokenizer, model = decoders.load(name)

    def prompts(kind: str, split: str, count: int) -> Samples:
        some = texts.chunks(tokenizer, kind, LENGTH, held_out=split == "test")[:count]
        return [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])} for ids in some]

    return Subject(name, model, texts.KINDS, prompts)


def own_mix(it: Subject, split: str, count: int) -> Samples:
    """Of the kinds that the model answers well: of a VLM its own six, of a decoder all."""
    kinds = it.kinds[:6] if it.answers else it.kinds
    return Subject(it.name, it.model, kinds, it.prompts).mix(split, count)


def correct(model: Any, plan: PruningPlan | None, samples: Samples, answers: list[torch.Tensor]) -> float:
    """The share of prompts whose answer, greedily decoded, is the right one."""
    right = 0
    with torch.no_grad(), prefill.under(model, plan, family_of(model)):
        for sample, answer in zip(samples, answers):
            logits = model(**continued(placed(model, sample), answer), logits_to_keep=len(answer), use_cache=False
                           ).logits[0]
            right += bool((logits.argmax(-1) == answer).all())
    return right / len(samples)


def keep(name: str, it: Subject, record: dict[str, Any], figure: Figure | None, table: Table) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}_{it.name}.json").write_text(json.dumps(record, indent=1))
    if figure is not None:
        figure.savefig(RESULTS / f"{name}_{it.name}.png", dpi=110)
    Console().print(table)


@app.command()
def predicted(name: str, plans: int = 44, prompts: int = 48, held: int = 24, fits: int = 44) -> None:
    """1. The cost that gates predict for a plan against its measured divergence; `fits` of the plans fitted as well."""
    it = subject(name)
    own = own_mix(it, "train", prompts)
    scores = profile(it.model, own, max_new_tokens=16, progress=told("gates"))
    scores.save(RESULTS / f"profile_{name}.safetensors")
    plot(scores).savefig(RESULTS / f"importance_{name}.png", dpi=110)
    test = own_mix(it, "test", held)
    known = references(it.model, test)
    tried = varied(it, plans)
    depth = it.depth
    diagonal = {kind: scores.importance(kind) for kind in ("visual", "text")}
    rows: list[dict[str, Any]] = []
    for number, plan in enumerate(track(tried, "plans")):
        row = {
            "visual": sorted(plan.visual), "text": sorted(plan.text),
            "joint": scores.removal_cost(plan.visual, plan.text),
            "diagonal": sum(float(diagonal[kind][layer]) for kind in ("visual", "text")
                            for layer in getattr(plan, kind)) / 2,
            "depth": sum(depth - layer for kind in ("visual", "text") for layer in getattr(plan, kind)),
            "own_kl": measure(it.model, plan, test, known).figures()["mean_kl"]}
        if number * fits % len(tried) < fits:  # spread over all kinds of plan
            fitted, _ = fit(it.model, plan, own)
            row["fitted_kl"] = measure(it.model, fitted, test, known).figures()["mean_kl"]
        rows.append(row)
    table = Table("score", "own projections", "fitted", title=f"{name}: Spearman with measured KL, {len(rows)} plans")
    tested = {kl: [row for row in rows if kl in row] for kl in ("own_kl", "fitted_kl")}
    rank = {}
    for score in "joint", "diagonal", "depth":
        rank[score] = [float(spearmanr([row[score] for row in some], [row[kl] for row in some]).statistic)
                       for kl, some in tested.items()]
        table.add_row(score, *(f"{one:.3f}" for one in rank[score]))
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for (kl, some), mark in zip(tested.items(), "o^"):
        axes.loglog([max(row["joint"], 1e-9) for row in some], [max(row[kl], 1e-9) for row in some], mark,
                    label=kl.replace("_kl", " projections"), alpha=0.7)
    axes.set(xlabel="predicted by gates, jointly (nats)", ylabel="measured KL of the first token (nats)", title=name)
    axes.legend()
    keep("predicted", it, {"spearman": rank, "prompts": prompts, "held": held, "plans": rows}, figure, table)


def varied(it: Subject, count: int) -> list[PruningPlan]:
    """Suffixes of all lengths, for all positions and for one kind; random sets; different sets for each kind."""
    rng, depth, visual = random.Random(0), it.depth, it.answers is not None
    firsts = list(range(1, depth - 1))
    firsts = firsts[::max(1, len(firsts) // (count // 4))]
    made = [PruningPlan(depth, range(first, depth), range(first, depth)) for first in firsts]
    if visual:
        made += [PruningPlan(depth, visual=range(first, depth)) for first in firsts]
    while len(made) < count:
        layers = [rng.sample(range(depth), rng.randint(1, depth // 2)) for _ in range(2)]
        made.append(PruningPlan(depth, layers[0], layers[rng.random() < 0.5 and visual]))
    return made[:count]


@app.command()
def frontier(name: str, prompts: int = 96, held: int = 96, tails: str = "1,16,64,128",
             ratios: str = "0.2,0.25,0.3333,0.4,0.5,0.6,0.75") -> None:
    """2. Speed-up against divergence, agreement and accuracy: own and fitted, all positions and visual only."""
    it = subject(name)
    own, test = own_mix(it, "train", prompts), own_mix(it, "test", held)
    known = references(it.model, test)
    right = it.answers("test", held) if it.answers else None
    lengths = mean_lengths(it.model, test)
    rows = [{"setting": "full", "accuracy": correct(it.model, None, test, right) if right else None}]
    for ratio in map(float, ratios.split(",")):
        last = PruningPlan.last(it.depth, ratio)
        settings = {"all": last} | ({"visual only": PruningPlan(it.depth, visual=last.visual)} if right else {})
        for which, plan in settings.items():
            for kv in "own", "fitted":
                made = plan if kv == "own" else fit(it.model, plan, own, progress=told(f"{ratio:.0%} {which}"))[0]
                for tail in map(int, tails.split(",")):
                    if tail > 1 and which == "visual only":
                        continue
                    one = replace(made, tail=tail)
                    row = {"setting": f"{which}, {kv}", "ratio": ratio, "tail": tail,
                           "speedup_limit": cost.limit(it.model.config, one, *lengths),
                           **measure(it.model, one, test, known).figures(),
                           "accuracy": correct(it.model, one, test, right) if right else None}
                    rows.append(row)
    table = Table("setting", "layers", "tail", "allows", "KL", "agrees", "answer", "accuracy",
                  title=f"{name}: {held} held-out prompts of {lengths[0]} visual and {lengths[1]} text tokens")
    for row in rows:
        if "ratio" in row:
            table.add_row(row["setting"], f"{row['ratio']:.0%}", str(row["tail"]), f"{row['speedup_limit']:.2f}x",
                          f"{row['mean_kl']:.4f}", f"{row['agreement']:.3f}", f"{row['answer_agreement']:.3f}",
                          "" if row["accuracy"] is None else f"{row['accuracy']:.3f}")
        elif row["accuracy"] is not None:
            table.add_row("full", "", "", "1.00x", "0", "1", "1", f"{row['accuracy']:.3f}")
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, middle = figure.subplots(1, 2)
    for setting in dict.fromkeys(row["setting"] for row in rows if "ratio" in row):
        some = [row for row in rows if row["setting"] == setting and row["tail"] == 1]
        speeds = [row["speedup_limit"] for row in some]
        left.semilogy(speeds, [max(row["mean_kl"], 1e-7) for row in some], "o-", label=setting, markersize=4)
        middle.plot(speeds, [row["agreement"] for row in some], "o-", label=setting, markersize=4)
    left.set(xlabel="speed-up that the plan allows", ylabel="KL of the first token (nats)", title=name)
    middle.set(xlabel="speed-up that the plan allows", ylabel="first token agrees")
    middle.axhline(0.98, color="gray", lw=1, ls="--")
    left.legend()
    keep("frontier", it, {"prompts": prompts, "held": held, "lengths": lengths, "rows": rows}, figure, table)


@app.command()
def travel(name: str, prompts: int = 48, held: int = 24, ratio: float = 1 / 3, kinds: str = "") -> None:
    """3. Fitted on one kind of prompt, tested on each: mean KL."""
    it = subject(name)
    plan = PruningPlan.last(it.depth, ratio)
    chosen = tuple(kinds.split(",")) if kinds else it.kinds
    tests = {kind: it.prompts(kind, "test", held) for kind in chosen}
    known = {kind: references(it.model, test) for kind, test in tests.items()}
    rows: dict[str, dict[str, float]] = {}

    def tested(label: str, made: PruningPlan) -> None:
        rows[label] = {kind: measure(it.model, made, tests[kind], known[kind]).figures()["mean_kl"] for kind in chosen}

    tested("own", plan)
    for kind in track(chosen, "kinds"):
        samples = it.prompts(kind, "train", prompts)
        there = plan if it.answers is None or kind not in ("text", "code") else PruningPlan(it.depth, text=plan.text)
        made, _ = fit(it.model, there, samples)
        tested(kind if there is plan else f"{kind} (text positions only)", made)
    everything = Subject(it.name, it.model, chosen, it.prompts).mix("train", prompts)
    tested("mix", fit(it.model, plan, everything)[0])
    for ridge in 1e-2, 1e-1:
        tested(f"mix, ridge {ridge:g}", fit(it.model, plan, everything, ridge=ridge)[0])
    table = Table("fitted on", *chosen, title=f"{name}: KL, the last {ratio:.0%} of layers, {prompts} prompts a fit")
    for label, row in rows.items():
        table.add_row(label, *(f"{row[kind]:.4f}" for kind in chosen))
    keep("travel", it, {"prompts": prompts, "held": held, "ratio": ratio, "rows": rows}, None, table)


@app.command()
def enough(name: str, most: int = 500, held: int = 48, ratio: float = 1 / 3) -> None:
    """4. Divergence of a fit, and of the layers that gates choose, over the number of prompts."""
    it = subject(name)
    sizes = [size for size in (8, 16, 32, 64, 128, 200, 500) if size <= most]
    samples, test = own_mix(it, "train", sizes[-1]), own_mix(it, "test", held)
    known = references(it.model, test)
    last = PruningPlan.last(it.depth, ratio)
    rows = []
    scores = profile(it.model, samples[:200], max_new_tokens=16, progress=told("gates"))
    for size in track(sizes, "sizes"):
        fitted, report = fit(it.model, last, samples[:size])
        row = {"prompts": size, "fitted": measure(it.model, fitted, test, known).figures(),
               "held_out_error": sum(line.fitted_keys + line.fitted_values for line in report) / 2 / len(report)}
        if size <= len(scores):
            layers = first(scores, size).cheapest(len(last.text), ["visual", "text"])
            row["gates"] = {"layers": sorted(layers)} | measure(
                it.model, PruningPlan(it.depth, layers, layers), test, known).figures()
        rows.append(row)
    own = measure(it.model, last, test, known).figures()
    table = Table("prompts", "fitted KL", "error of keys and values", "layers that gates choose, own KL",
                  title=f"{name}: {ratio:.0%} of the layers; the last ones, own: {own['mean_kl']:.4f}")
    for row in rows:
        table.add_row(str(row["prompts"]), f"{row['fitted']['mean_kl']:.4f}", f"{row['held_out_error']:.3f}",
                      f"{row['gates']['mean_kl']:.4f}" if "gates" in row else "")
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.loglog([row["prompts"] for row in rows], [row["fitted"]["mean_kl"] for row in rows], "o-", label="fitted")
    some = [row for row in rows if "gates" in row]
    axes.loglog([row["prompts"] for row in some], [row["gates"]["mean_kl"] for row in some], "s-",
                label="own, layers that gates choose")
    axes.axhline(own["mean_kl"], color="gray", ls="--", label="own, the last layers")
    axes.set(xlabel="calibration prompts", ylabel="KL of the first token (nats)", title=name)
    axes.legend()
    keep("enough", it, {"held": held, "ratio": ratio, "own": own, "rows": rows}, figure, table)


def first(scores: ImportanceProfile, count: int) -> ImportanceProfile:
    """Of the first samples only."""
    return replace(scores, **{name: getattr(scores, name)[:count] for name in TENSORS})


@app.command()
def expense(name: str, prompts: int = 24, part: str = "") -> None:
    """5. Seconds and peak memory of gates and of fits beside a plain forward pass of the same prompts."""
    if part:
        it = subject(name)
        samples = own_mix(it, "train", prompts)
        with torch.no_grad():
            it.model(**placed(it.model, samples[0]), logits_to_keep=1)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        if part == "forward":
            with torch.no_grad():
                for sample in samples:
                    it.model(**placed(it.model, sample), logits_to_keep=1, use_cache=False)
        elif part == "gates":
            profile(it.model, samples, max_new_tokens=16)
        else:
            fit(it.model, PruningPlan.last(it.depth, 1 / 3), samples)
        seconds = time.monotonic() - began
        print(json.dumps({"seconds": seconds, "above_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                          / 1024}))
        return
    rows = {}
    for one in "forward", "gates", "fit":
        done = subprocess.run([sys.executable, __file__, "expense", name, "--prompts", str(prompts), "--part", one],
                              capture_output=True, text=True, check=True)
        rows[one] = json.loads(done.stdout.splitlines()[-1])
    table = Table("", "seconds", "times a forward pass", "memory above the model",
                  title=f"{name}, {prompts} prompts")
    for one, row in rows.items():
        table.add_row(one, f"{row['seconds']:.1f}", f"{row['seconds'] / rows['forward']['seconds']:.1f}",
                      f"{row['above_mib']:.0f} MiB")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"expense_{name}.json").write_text(json.dumps({"prompts": prompts, "rows": rows}, indent=1))
    Console().print(table)


@app.command()
def smaller(name: str, prompts: int = 48, held: int = 24, ratio: float = 1 / 3, ranks: str = "8,32,128") -> None:
    """6. What fits of less memory would do: the layer's own projections with their outputs scaled and shifted, or with
    a correction of low rank, each the best for the same moments."""
    it = subject(name)
    own, test = own_mix(it, "train", prompts), own_mix(it, "test", held)
    known = references(it.model, test)
    plan = PruningPlan.last(it.depth, ratio)
    layers = family_of(it.model).text_model(it.model).layers
    wanted = [int(rank) for rank in ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = fit(it.model, plan, own, state=folder)
        assert whole.fitted is not None
        made: dict[str, dict[str, torch.Tensor]] = {}
        sizes: dict[str, int] = {}
        for path in Path(folder).glob("*.safetensors"):
            fitted_on, held_out = fitting.kept_moments(path)
            moments = fitted_on + held_out
            kind = path.name.split(".")[0]
            for layer in moments.layers:
                weight, bias = f"{kind}.{layer}.weight", f"{kind}.{layer}.bias"
                full = torch.cat([whole.fitted[weight].T, whole.fitted[bias][None]]).double()
                mine = fitting.own_projections(layers[layer], it.model.dtype, moments.xtx)
                for label, (projection, numbers) in lighter(mine, full, moments.only([layer]), wanted).items():
                    rounded = projection.to(whole.fitted[bias].dtype)
                    made.setdefault(label, {}).update({weight: rounded[:-1].T.contiguous(), bias: rounded[-1]})
                    sizes[label] = sizes.get(label, 0) + numbers
    plans = {"own": plan} | {label: replace(whole, fitted=tensors) for label, tensors in made.items()}
    rows = {label: {"numbers": sizes.get(label, 0)} | measure(it.model, one, test, known).figures()
            for label, one in track(plans.items(), "kinds of fit")}
    table = Table("keys and values", "numbers kept", "KL", "first token agrees", "answer agrees",
                  title=f"{name}: the last {ratio:.0%} of layers, {prompts} prompts")
    for label, row in rows.items():
        table.add_row(label, f"{row['numbers']:,}", f"{row['mean_kl']:.4f}", f"{row['agreement']:.3f}",
                      f"{row['answer_agreement']:.3f}")
    keep("smaller", it, {"prompts": prompts, "held": held, "ratio": ratio, "rows": rows}, None, table)


def lighter(own: torch.Tensor, full: torch.Tensor, moments: Moments, ranks: Sequence[int]
            ) -> dict[str, tuple[torch.Tensor, int]]:
    """Projections `[D + 1, 2GK]` of a layer, and how many numbers each takes beside the layer's own.

    Args:
        own: the layer's.
        full: the fitted ones.
        moments: of the layer, from which those were fitted.
        ranks: of corrections; each is the one that leaves the least squared error between it and `full`.
    """
    xtx, xty = moments.xtx, moments.xty
    count, mean = xtx[-1, -1], xtx[-1] @ own
    square, cross = (own * (xtx @ own)).sum(0), (own * xty).sum(0)
    scale = (cross - mean * xty[-1] / count) / (square - mean.square() / count)
    scaled = own * scale
    scaled[-1] += (xty[-1] - scale * mean) / count
    made = {"own, scaled and shifted": (scaled, 2 * own.shape[1])}
    correction = full - own
    directions = torch.linalg.eigh(correction.T @ xtx @ correction).eigenvectors.flip(1)  # outputs' principal ones
    for rank in ranks:
        if rank < min(own.shape):
            best = directions[:, :rank]
            made[f"own, corrected with rank {rank}"] = (own + correction @ best @ best.T, rank * sum(own.shape))
    return made | {"fitted": (full, full.numel())}


def told(what: str) -> Callable[[range], Iterable[int]]:
    return lambda loop: track(loop, what)


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    app()
