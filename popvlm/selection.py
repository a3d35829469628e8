"""From a budget to a plan: candidates by what they can gain, measured against the full model on held-out prompts."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from popvlm import cost
from popvlm.decoders import family_of, fingerprint
from popvlm.fitting import fit
from popvlm.importance import ImportanceProfile
from popvlm.plan import PruningPlan
from popvlm.processes import gathered
from popvlm.quality import Quality, Reference, measure, references
from popvlm.samples import Part

HELD_OUT = 4
"""Of so many prompts one is held out: plans are measured on these, and fitted on the others."""

TAILS = 1, 16, 64
"""The tails that are tried."""

WIDTH = 5
"""Plans of a wanted speed that are tried with the first tail, between all positions alike and visual ones alone."""

Layers = frozenset[int]
Track = Callable[[range, str], Iterable[int]]
"""Goes around a loop over prompts, and is told what for."""


class SelectionError(ValueError):
    """A budget that cannot be searched for; the message names the fix."""


@dataclass(frozen=True)
class Budget:
    """What a plan may cost, or must gain: a ratio, a speed-up or, where neither is given, a divergence.

    Args:
        ratio: the share of the layers that context positions skip.
        speedup: of the decoder's prefill, as the cost model allows it on prompts of the samples' mean length.
        divergence: the largest mean KL(full || pruned) of the first token, in nats.
        agreement: beside a divergence, the least share of prompts whose first token stays the same, to the nearest
            prompt.

    Raises:
        SelectionError: two of them, or an impossible one.
    """

    ratio: float | None = None
    speedup: float | None = None
    divergence: float | None = None
    agreement: float = 0.98

    def __post_init__(self) -> None:
        given = [value for value in (self.ratio, self.speedup, self.divergence) if value is not None]
        if len(given) > 1:
            raise SelectionError("give one of ratio, speedup and divergence, not two")
        if ((self.ratio is not None and not 0 < self.ratio < 1) or (self.speedup is not None and not self.speedup >= 1)
                or (self.divergence is not None and not self.divergence >= 0) or not 0 <= self.agreement <= 1):
            raise SelectionError(f"ratio={self.ratio}, speedup={self.speedup}, divergence={self.divergence}, agreement="
                                 f"{self.agreement} is no budget; give a ratio between 0 and 1, a speedup from 1 on, "
                                 "or a divergence from 0 on and an agreement up to 1")
        if not given:
            object.__setattr__(self, "divergence", 0.01)

    def __str__(self) -> str:
        if self.ratio is not None:
            return f"ratio {self.ratio:g}"
        if self.speedup is not None:
            return f"speed-up {self.speedup:g}x"
        return f"KL at most {self.divergence:g} and agreement at least {self.agreement:.0%}"


@dataclass(frozen=True)
class Trial:
    """A plan that was measured: its distance from the full model, and the speed-up that its arithmetic allows."""

    plan: PruningPlan
    quality: Quality
    speedup: float

    @property
    def kl(self) -> float:
        """The mean KL of the first token, in nats."""
        return self.quality.figures()["mean_kl"]


@dataclass(frozen=True)
class Choice:
    """What a search found: the plan, whether it meets the budget (else it is the nearest), and all that was tried."""

    best: Trial
    met: bool
    trials: list[Trial]


@dataclass(frozen=True)
class _Search:
    model: Any
    fitting: Sequence[Mapping[str, Any]]
    held: Sequence[Mapping[str, Any]]
    known: list[Reference]
    visual: int
    text: int
    kv: Literal["own", "fitted"]
    tails: Sequence[int]
    profile: ImportanceProfile | None
    state: str | os.PathLike[str] | None
    say: Callable[[Trial], None]
    track: Track
    budget: Budget
    trials: list[Trial]

    @property
    def depth(self) -> int:
        depth: int = self.model.config.get_text_config().num_hidden_layers
        return depth

    @property
    def expected(self) -> int:
        """About how many plans will be measured."""
        if self.budget.speedup is not None:
            suffixes = WIDTH + len(self.tails)
        elif self.budget.ratio is not None:
            suffixes = 1
        else:  # by halves
            suffixes = self.depth.bit_length() * (bool(self.visual) + len(self.tails))
        return suffixes + (self.profile is not None)

    def after(self, first: int) -> Layers:
        """The layers from `first` on."""
        return frozenset(range(first, self.depth))

    def plan(self, visual: Layers, text: Layers, tail: int) -> PruningPlan:
        # Where no prompt to measure on has an image, none is pruned unmeasured.
        return PruningPlan(self.depth, visual if self.visual else frozenset(), text, tail)

    def speedup(self, visual: Layers, text: Layers, tail: int) -> float:
        return cost.limit(self.model.config, self.plan(visual, text, tail), self.visual, self.text)

    def trial(self, visual: Layers, text: Layers, tail: int = 1) -> Trial:
        plan = self.plan(visual, text, tail)
        like = [done for done in self.trials if (done.plan.visual, done.plan.text) == (plan.visual, plan.text)]
        for done in like:
            if done.plan.tail == tail:
                return done
        if self.kv == "fitted":
            # Fitted with the shortest tail, on all positions that may be context, it serves every tail.
            made = like[0].plan if like else fit(self.model, replace(plan, tail=1), self.fitting, state=self.state,
                                                 progress=self._told("fitting", plan))[0]
            plan = replace(made, tail=tail)
        quality = measure(self.model, plan, self.held, self.known, progress=self._told("measuring", plan))
        trial = Trial(plan, _of_all(quality), self.speedup(visual, text, tail))
        self.trials.append(trial)
        self.say(trial)
        return trial

    def _told(self, what: str, plan: PruningPlan) -> Callable[[range], Iterable[int]]:
        number = len(self.trials) + 1
        said = (f"plan {number} of about {max(self.expected, number)}: {what}, {len(plan.visual)} and "
                f"{len(plan.text)} of {self.depth} layers")
        return lambda loop: self.track(loop, said)


def choose(model: nn.Module, samples: Sequence[Mapping[str, Any]], budget: Budget, *,
           kv: Literal["own", "fitted"] = "fitted", tails: Sequence[int] = TAILS,
           profile: ImportanceProfile | None = None, answer_tokens: int = 8,
           state: str | os.PathLike[str] | None = None, say: Callable[[Trial], None] = lambda trial: None,
           track: Track = lambda loop, what: loop) -> Choice:
    """Searches for a plan, and measures what it costs before it is used.

    Plans are suffixes of layers, one for visual and one for text context; visual positions skip at least as many. A
    budget of quality asks for the fastest plan within it: first how deep visual positions may skip, then how deep text
    may beside them, with each of the tails. A speed asks for the plan of that speed that is nearest to the full model:
    from all positions alike to visual positions alone, as far as either goes. A ratio asks for the layers of so large
    a share that all context positions skip. With a profile, the sets of as many layers that it holds to be the cheapest
    are tried beside the best suffixes.

    Where `torch.distributed` is up, each process gives its share of the samples, and all get the same choice.

    Args:
        model: with its language-model head, in eval mode. Left as it was.
        samples: prompts, each what a processor returns for one, `[1, T]`.
        budget: what to look for.
        kv: fitted projections, or the layers' own as in the paper.
        tails: how many of a prompt's last positions may run in full; the first is the one to begin with.
        profile: of this model.
        answer_tokens: the answer over which agreement is told as well.
        state: a folder in which a fit's moments are kept, so that an interrupted search goes on.
        say: called with each trial.
        track: goes around each loop over prompts.

    Raises:
        SelectionError: too few samples.
        FittingError, PlanError, UnsupportedModel, ProfileError: as `fit` and the profile raise them.
    """
    if len(samples) < 2 * HELD_OUT:
        raise SelectionError(f"there are {len(samples)} prompts, and one in {HELD_OUT} is held out to measure on; "
                             f"give at least {2 * HELD_OUT}")
    if profile is not None:
        profile.check(fingerprint(model))
    held, fitting = split(samples)
    visual, text = mean_lengths(model, held)
    known = references(model, held, answer_tokens=answer_tokens,
                       progress=lambda loop: track(loop, "answering in full"))
    search = _Search(model, fitting, held, known, visual, text, kv, tails, profile, state, say, track, budget, [])
    if budget.speedup is not None:
        return _fastest_enough(search, budget.speedup)
    if budget.ratio is not None:
        return _of_ratio(search, budget.ratio)
    assert budget.divergence is not None
    return _within(search, budget.divergence, budget.agreement)


def split(samples: Sequence[Mapping[str, Any]]) -> tuple[Part, Part]:
    """The prompts to measure on, about one in `HELD_OUT`, and those to fit on.

    As large a share of those with images as of those without, drawn at random, as a list may have a rhythm; prompts
    with the same images stay together, or what was fitted on an image would be measured on it.
    """
    everything = Part(samples, range(len(samples)))
    by_images: dict[str, list[int]] = {}
    for index in range(len(samples)):
        by_images.setdefault(everything.images(index) or f"none {index}", []).append(index)
    held: list[int] = []
    for bare in True, False:
        some = [indices for images, indices in by_images.items() if images.startswith("none ") is bare]
        random.Random(0).shuffle(some)
        count = sum(map(len, some))
        wanted = max(1, round(count / HELD_OUT))
        for indices in some[1:]:  # the first stays to be fitted on
            if wanted > 0:
                held += indices
                wanted -= len(indices)
    return Part(samples, sorted(held)), Part(samples, sorted(set(range(len(samples))) - set(held)))


def _within(search: _Search, divergence: float, agreement: float) -> Choice:
    last, tail = search.depth - 1, search.tails[0]

    def good(trial: Trial) -> bool:
        # To the nearest prompt: 32 cannot tell 97 % from 98 %, and where two tokens tie a last bit tips one over.
        count = len(trial.quality)
        agreeing = round(trial.quality.figures()["agreement"] * count)
        return trial.kl <= divergence and agreeing >= count - math.floor((1 - agreement) * count + 0.5)

    def pair(visual: int | None, text: int, tail: int) -> bool:
        return good(search.trial(search.after(text if visual is None else visual), search.after(text), tail))

    # To skip the last layer changes nothing, and the more layers are skipped before it, the dearer.
    visual = _first(lambda layer: pair(layer, last, tail), 1, last) if search.visual else None
    text = last
    for tail in search.tails:
        text = _first(partial(pair, visual, tail=tail), 1 if visual is None else visual, text)
    if search.profile is not None:
        best = max(filter(good, search.trials), key=lambda trial: trial.speedup, default=None)
        while best is not None and _fits(search, best):  # a layer more, for as long as that holds
            more = _free(search, best, 1)
            best = more if good(more) else None
    served = [trial for trial in search.trials if good(trial)]
    nearest = min(search.trials, key=lambda trial: trial.kl)
    return Choice(max(served, key=lambda trial: trial.speedup, default=nearest), bool(served), search.trials)


def _first(good: Callable[[int], bool], first: int, last: int) -> int:
    """The first layer that is good, where all after a good one are; `last` at the latest."""
    while first < last:
        middle = (first + last) // 2
        if good(middle):
            last = middle
        else:
            first = middle + 1
    good(last)  # measured, if it was not
    return last


def _fastest_enough(search: _Search, speedup: float) -> Choice:
    last = search.depth - 1
    for number, tail in enumerate(search.tails):
        pairs: dict[int, tuple[Layers, Layers]] = {}
        for first in range(1, last + 1):
            # The fewest layers that text must skip beside these; the fewest visual ones that this many allow come last.
            for text in range(last, first - 1, -1):
                if search.speedup(search.after(first), search.after(text), tail) >= speedup:
                    pairs[text] = (search.after(first), search.after(text))
                    break
        candidates = list(pairs.values())
        if number and search.trials and candidates:  # another tail: only about as deep in text as was best
            text = len(min(search.trials, key=lambda trial: trial.kl).plan.text)
            candidates = [min(candidates, key=lambda pair: abs(len(pair[1]) - text))]
        for pair in candidates[:-1:max(1, -(-len(candidates) // WIDTH))] + candidates[-1:]:
            search.trial(*pair, tail)
    if not search.trials:
        one = search.after(1)
        return Choice(search.trial(one, one, search.tails[0]), False, search.trials)
    if search.profile is not None:
        _free(search, min(search.trials, key=lambda trial: trial.kl))
    enough = [trial for trial in search.trials if trial.speedup >= speedup]
    return Choice(min(enough, key=lambda trial: trial.kl), True, search.trials)


def _of_ratio(search: _Search, ratio: float) -> Choice:
    count = len(PruningPlan.last(search.depth, ratio).text)
    if not 0 < count < search.depth:
        raise SelectionError(f"ratio={ratio:g} of {search.depth} layers is {count}; give one that skips some of them "
                             "and leaves some")
    suffix = search.after(search.depth - count)
    best = search.trial(suffix, suffix, search.tails[0])
    if search.profile is not None:
        _free(search, best)
    return Choice(min(search.trials, key=lambda trial: trial.kl), True, search.trials)


def _fits(search: _Search, trial: Trial) -> bool:
    return max(len(trial.plan.visual), len(trial.plan.text)) + 1 < search.depth


def _free(search: _Search, trial: Trial, more: int = 0) -> Trial:
    """The sets that the profile holds cheapest, of as many layers as a plan has, or so many more."""
    assert search.profile is not None
    by_text = search.profile.cheapest(len(trial.plan.text) + more, ["text"])
    by_visual = (search.profile.cheapest(len(trial.plan.visual) + more, ["visual"], text=by_text) if search.visual
                 else by_text)
    return search.trial(by_visual, by_text, trial.plan.tail)


def mean_lengths(model: Any, samples: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Mean numbers of visual and text tokens of a prompt."""
    tokens = family_of(model).visual_token_ids(model.config)
    visual = total = 0
    for index in range(len(samples)):
        ids: Tensor = samples[index]["input_ids"]
        visual += sum(int((ids == token).sum()) for token in tokens)
        total += ids.numel()
    visual, total, count = (sum(each) for each in zip(*gathered((visual, total, len(samples)))))
    return round(visual / count), round((total - visual) / count)


def _of_all(quality: Quality) -> Quality:
    """That of all processes' prompts."""
    every = gathered(quality)
    return Quality(*(torch.cat([getattr(one, name) for one in every]) for name in Quality.__dataclass_fields__))


def described(trial: Trial, model: Any) -> PruningPlan:
    """The trial's plan with its figures in its source, for this model."""
    figures = trial.quality.figures()
    source = (f"calibrated; on the {len(trial.quality)} held-out prompts that chose it KL {figures['mean_kl']:.4f} "
              f"(95 %: {figures['p95_kl']:.4f}), first token agrees {figures['agreement']:.1%}, answer "
              f"{figures['answer_agreement']:.1%}; allows {trial.speedup:.2f}x")
    return replace(trial.plan, source=source, fingerprint=fingerprint(model))
