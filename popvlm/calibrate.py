"""A plan for this very model: found in the cache, published with the package, or calibrated now and kept."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from popvlm import __version__, cache
from popvlm.decoders import identity
from popvlm.importance import ImportanceProfile, profile
from popvlm.plan import KINDS, PlanError, PruningPlan
from popvlm.processes import gathered, place
from popvlm.samples import BuiltinMix, Part, Prepared, Tally, describe
from popvlm.selection import Budget, Choice, Track, Trial, choose, described

PROMPTS = 128
"""Of the built-in mix, where no samples are given; one in four is held out."""

PUBLISHED = Path(__file__).parent / "published"
"""Plans that come with the package, as `<name>.<identity>.json`."""

ANSWER = 32
"""The longest answer, in tokens, over which gates score the layers."""


@dataclass(frozen=True)
class Calibration:
    """What a calibration found, and what it was found from.

    Args:
        plan: with its figures in `source`.
        choice: all that was tried, and whether the budget was met.
        budget: what was asked for.
        tallies: the prompts by kind, "all" last; one in four was held out.
        profile: the gate gradients, where they were asked for.
        seconds: how long it took this time.
    """

    plan: PruningPlan
    choice: Choice
    budget: Budget
    tallies: dict[str, Tally]
    profile: ImportanceProfile | None
    seconds: float

    def record(self) -> dict[str, Any]:
        """The same in plain numbers, for JSON."""
        def row(trial: Trial) -> dict[str, Any]:
            plan = trial.plan
            return {"visual": sorted(plan.visual), "text": sorted(plan.text), "tail": plan.tail, "kv": plan.kv,
                    "speedup_limit": trial.speedup, **trial.quality.figures()}

        return {"popvlm": __version__, "budget": str(self.budget), "met": self.choice.met, "seconds": self.seconds,
                "best": row(self.choice.best), "trials": [row(trial) for trial in self.choice.trials],
                "samples": {kind: asdict(tally) | {"visual_share": tally.visual_share}
                            for kind, tally in self.tallies.items()}}


def calibrate(processor: Any, model: nn.Module, samples: Any = None, *, budget: Budget | None = None,
              kv: Literal["own", "fitted"] = "fitted", gates: bool = False,
              state: str | os.PathLike[str] | None = None, say: Callable[[Trial], None] = lambda trial: None,
              track: Track = lambda loop, what: loop) -> Calibration:
    """Finds a plan for the model by what it costs on held-out prompts.

    Where `torch.distributed` is up, the processes share the samples and all get the same plan.

    Args:
        processor: the model's processor, or a text-only model's tokenizer.
        model: with its language-model head, in eval mode. Left as it was.
        samples: prompts, in any form that `Prepared` takes; the built-in mix if none are given.
        budget: of quality or speed; by default a KL of 0.01 nats and 98 % agreement.
        kv: fitted projections, or the layers' own as in the paper.
        gates: whether to score the layers by virtual gates too and try the sets of layers that they hold cheapest.
        state: a folder of this model and these samples, with which an interrupted calibration goes on.
        say: called with each plan that was measured.
        track: goes around each loop over prompts.

    Raises:
        SampleError, SelectionError, FittingError, ProfileError, UnsupportedModel: as its parts raise them; the message
            names the fix.
    """
    began = time.monotonic()
    budget = budget or Budget()
    prepared = samples if isinstance(samples, Prepared) else Prepared(
        processor, BuiltinMix(PROMPTS) if samples is None else samples)
    rank, world = place()
    mine = Part(prepared, _dealt(prepared)[rank::world])
    scored = None
    if gates:
        path = None if state is None else Path(state) / "profile.safetensors"
        scored = _profiled(model, prepared, path, track)
    choice = choose(model, mine, budget, kv=kv, profile=scored, state=state, say=say, track=track)
    return Calibration(described(choice.best, model), choice, budget, describe(prepared), scored,
                       time.monotonic() - began)


def _dealt(prepared: Prepared) -> list[int]:
    """An order in which to deal prompts to processes: a list of samples may have a rhythm, and each process needs its
    share of those with images."""
    order = list(range(len(prepared)))
    if not isinstance(prepared.samples, BuiltinMix):  # which is shuffled
        random.Random(0).shuffle(order)
        order.sort(key=lambda index: prepared.counts(prepared.indices[index]).visual > 0)
    return order


def _profiled(model: nn.Module, samples: Sequence[Any], path: Path | None, track: Track) -> ImportanceProfile:
    def told(loop: range) -> Iterable[int]:
        return track(loop, "scoring layers by virtual gates")

    rank, world = place()
    if path is not None and world > 1:
        path = path.with_suffix(f".{rank}{path.suffix}")
    return ImportanceProfile.merge(gathered(profile(model, samples, path=path, max_new_tokens=ANSWER,
                                                    indices=range(rank, len(samples), world), progress=told)))


def automatic(processor: Any, model: nn.Module, samples: Any = None, *, budget: Budget | None = None,
              kv: Literal["own", "fitted"] = "fitted") -> tuple[PruningPlan, str]:
    """The plan for this very model and budget, and a line that says where it is from.

    In turn: the cached one; one published with the package (for the default budget, where no samples are given); or
    calibrated now, with a progress bar, and cached. An interrupted calibration goes on with the next call.

    Args:
        processor: the model's processor, or a text-only model's tokenizer; needed to calibrate only.
        model, samples, budget, kv: as `calibrate` takes them.

    Raises:
        PlanError: it has to be calibrated and there is no processor.
        SampleError, SelectionError, FittingError, UnsupportedModel: as `calibrate` raises them.
    """
    budget, name = budget or Budget(), identity(model)
    if samples is not None:
        samples = Prepared(processor, samples)
    folder = _folder(name, budget, kv, samples)
    if kept := (_published(name, budget, kv) if samples is None else None) or _cached(folder):
        return kept
    if processor is None:
        raise PlanError("there is no plan for this model yet, and to calibrate one takes its processor; give it, or "
                        "plan='last-third', the paper's recipe, which needs no calibration")
    with progress(f"popvlm: no plan for this model yet; calibrating for {budget} (once; an interrupted run goes on; "
                  "plan='last-third' needs none)") as (say, track):
        found = calibrate(processor, model, samples, budget=budget, kv=kv,
                          state=folder / "state", say=say, track=track)
    found.plan.save(folder / "plan.json")
    (folder / "record.json").write_text(json.dumps(found.record(), indent=1))
    if place()[0] == 0:
        shutil.rmtree(folder / "state", ignore_errors=True)  # gigabytes, which nothing will ask for again
    met = "" if found.choice.met else f", the nearest there is: no plan meets {budget}"
    return found.plan, f"calibrated now and kept in {folder}{met}"


def known(model: nn.Module, budget: Budget | None = None, kv: str = "fitted") -> tuple[PruningPlan, str] | None:
    """A plan for this very model that is in the cache or comes with the package, and where it is from."""
    budget, name = budget or Budget(), identity(model)
    return _published(name, budget, kv) or _cached(_folder(name, budget, kv, None))


def _published(name: str, budget: Budget, kv: str) -> tuple[PruningPlan, str] | None:
    if budget == Budget() and kv == "fitted":
        for file in PUBLISHED.glob(f"*.{name}.json"):
            return PruningPlan.load(file), f"published with popvlm for {file.name.split('.')[0]}"
    return None


def _folder(name: str, budget: Budget, kv: str, samples: Prepared | None) -> Path:
    asked = json.dumps([__version__, asdict(budget), kv, None if samples is None else digest(samples)])
    return cache.folder() / "plans" / name / hashlib.sha256(asked.encode()).hexdigest()[:16]


def _cached(folder: Path) -> tuple[PruningPlan, str] | None:
    file = folder / "plan.json"
    if not file.exists():
        return None
    try:
        return PruningPlan.load(file), f"cached in {folder}"
    except PlanError:  # half-copied, or edited: made again
        return None


def digest(samples: Prepared) -> str:
    """16 hexadecimal digits of the prompts, all of them."""
    every = Part(samples, range(len(samples)))
    return hashlib.sha256("".join(map(every.digest, range(len(every)))).encode()).hexdigest()[:16]


@contextmanager
def progress(title: str, quiet: bool = False) -> Iterator[tuple[Callable[[Trial], None], Track]]:
    """A bar for each loop on standard error, and a line for each plan that was measured: for `calibrate`."""
    console = Console(stderr=True, highlight=False, quiet=quiet)
    console.print(title, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        def track(loop: range, what: str) -> Iterable[int]:
            task = bar.add_task(what, total=len(loop))
            for item in loop:
                yield item
                bar.advance(task)
            bar.remove_task(task)

        def say(trial: Trial) -> None:
            console.print(line(trial), soft_wrap=True)

        yield say, track


def line(trial: Trial) -> str:
    """A measured plan in a line."""
    plan, figures = trial.plan, trial.quality.figures()
    tail = f", tail {plan.tail}" if plan.tail > 1 else ""
    kinds = [f"{kind} {len(skipped)}" for kind in KINDS if (skipped := getattr(plan, kind))]
    return (f"  of {plan.num_layers} layers skipped: {', '.join(kinds)}{tail}: KL "
            f"{figures['mean_kl']:.4f}, agrees {figures['agreement']:.0%}, allows {trial.speedup:.2f}x")
