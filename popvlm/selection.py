"""From a budget to a plan: candidates by what they can gain, measured against the full model on held-out prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from popvlm import cost
from popvlm.decoders import family_of, fingerprint
from popvlm.fitting import fit
from popvlm.plan import PruningPlan
from popvlm.quality import Quality, Reference, measure, references

HELD_OUT = 4
"""Of the prompts, every fourth is held out: plans are measured on them and fitted on the others."""


class SelectionError(ValueError):
    """A budget that cannot be searched for; the message names the fix."""


@dataclass(frozen=True)
class Trial:
    """A plan that was measured: its distance from the full model, and the speed-up that its arithmetic allows."""

    plan: PruningPlan
    quality: Quality
    speedup: float


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
    tail: int
    state: str | os.PathLike[str] | None
    say: Callable[[Trial], None]
    trials: list[Trial]

    @property
    def depth(self) -> int:
        depth: int = self.model.config.get_text_config().num_hidden_layers
        return depth

    def plan(self, visual: int, text: int) -> PruningPlan:
        """Visual context skips the layers from `visual` on, text context those from `text` on."""
        visual = visual if self.visual else text  # of prompts without images both say the same
        by_visual, by_text = (frozenset(range(first, self.depth)) for first in (visual, text))
        return PruningPlan(self.depth, by_visual, by_text, self.tail)

    def speedup(self, visual: int, text: int) -> float:
        return cost.limit(self.model.config, self.plan(visual, text), self.visual, self.text)

    def trial(self, visual: int, text: int) -> Trial:
        plan = self.plan(visual, text)
        for done in self.trials:
            if (done.plan.visual, done.plan.text) == (plan.visual, plan.text):
                return done
        if self.kv == "fitted":
            plan, _ = fit(self.model, plan, self.fitting, state=self.state)
        made = Trial(plan, measure(self.model, plan, self.held, self.known), self.speedup(visual, text))
        self.trials.append(made)
        self.say(made)
        return made


def choose(model: nn.Module, samples: Sequence[Mapping[str, Any]], *, divergence: float | None = None,
           agreement: float = 0.98, speedup: float | None = None, kv: Literal["own", "fitted"] = "fitted",
           tail: int = 1, answer_tokens: int = 8, state: str | os.PathLike[str] | None = None,
           say: Callable[[Trial], None] = lambda trial: None) -> Choice:
    """Searches for a plan, and measures what it costs before it is used.

    Plans are suffixes of layers, one for visual and one for text context; visual positions skip at least as many. A
    budget of quality asks for the fastest plan within it: first how deep visual positions may skip, then how deep text
    may beside them. A speed asks for the plan of that speed that is nearest to the full model: from all positions alike
    to visual positions alone, as far as either goes.

    Args:
        model: with its language-model head, in eval mode. Left as it was.
        samples: prompts, each what a processor returns for one, `[1, T]`.
        divergence: the largest mean KL(full || pruned) of the first token, in nats; 0.01 if no speed-up is asked for.
        agreement: beside it, the least share of prompts whose first token stays the same.
        speedup: of the decoder's prefill, as the cost model allows it on prompts of the samples' mean length.
        kv: fitted projections, or the layers' own as in the paper.
        tail: the last positions of a prompt that run in full.
        answer_tokens: the answer over which agreement is told as well.
        state: a folder in which a fit's moments are kept, so that an interrupted search goes on.
        say: called with each trial.

    Raises:
        SelectionError: two budgets, an impossible one, or too few samples.
        FittingError, PlanError, UnsupportedModel: as `fit` raises them.
    """
    if speedup is not None and divergence is not None:
        raise SelectionError("give a speedup or a divergence, not both")
    if (speedup is not None and speedup < 1) or (divergence is not None and divergence < 0) or not 0 <= agreement <= 1:
        raise SelectionError(f"a speedup of {speedup}, a divergence of {divergence} and an agreement of {agreement} "
                             "are no budget; give a speedup from 1 on, or a divergence from 0 on and an agreement "
                             "up to 1")
    if len(samples) < 2 * HELD_OUT:
        raise SelectionError(f"there are {len(samples)} prompts, and every {HELD_OUT}th is held out to measure on; "
                             f"give at least {2 * HELD_OUT}")
    held, fitting = ([samples[index] for index in range(len(samples)) if (index % HELD_OUT == HELD_OUT - 1) is which]
                     for which in (True, False))
    visual, text = _mean_lengths(model, held)
    known = references(model, held, answer_tokens=answer_tokens)
    search = _Search(model, fitting, held, known, visual, text, kv, tail, state, say, [])
    if speedup is not None:
        return _fastest_enough(search, speedup)
    return _within(search, 0.01 if divergence is None else divergence, agreement)


def _within(search: _Search, divergence: float, agreement: float) -> Choice:
    last = search.depth - 1

    def good(trial: Trial) -> bool:
        figures = trial.quality.figures()
        return figures["mean_kl"] <= divergence and figures["agreement"] >= agreement

    # To skip the last layer changes nothing, and the more layers are skipped before it, the dearer.
    first = _first(lambda layer: good(search.trial(layer, last)), 1, last) if search.visual else None
    _first(lambda layer: good(search.trial(layer if first is None else first, layer)), first or 1, last)
    served = [trial for trial in search.trials if good(trial)]
    nearest = min(search.trials, key=lambda trial: trial.quality.figures()["mean_kl"])
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


def _fastest_enough(search: _Search, speedup: float, most: int = 5) -> Choice:
    last = search.depth - 1
    pairs: dict[int, tuple[int, int]] = {}
    for visual in range(1, last + 1):
        # The fewest layers that text must skip beside these; the fewest visual ones that this many allow come last.
        for text in range(last, visual - 1, -1):
            if search.speedup(visual, text) >= speedup:
                pairs[text] = (visual, text)
                break
    if not pairs:
        return Choice(search.trial(1, 1), False, search.trials)
    candidates = list(pairs.values())
    for pair in {*candidates[::max(1, -(-len(candidates) // most))], candidates[-1]}:
        search.trial(*pair)
    return Choice(min(search.trials, key=lambda trial: trial.quality.figures()["mean_kl"]), True, search.trials)


def _mean_lengths(model: Any, samples: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Mean numbers of visual and text tokens of a prompt."""
    tokens = family_of(model).visual_token_ids(model.config)
    visual = total = 0
    for sample in samples:
        ids: Tensor = sample["input_ids"]
        visual += sum(int((ids == token).sum()) for token in tokens)
        total += ids.numel()
    return round(visual / len(samples)), round((total - visual) / len(samples))


def described(trial: Trial, model: Any) -> PruningPlan:
    """The trial's plan with its figures in its source, for this model."""
    figures = trial.quality.figures()
    source = (f"{trial.plan.source or 'suffixes'}; on {len(trial.quality)} held-out prompts KL "
              f"{figures['mean_kl']:.4f} (95 %: {figures['p95_kl']:.4f}), first token agrees "
              f"{figures['agreement']:.1%}, answer {figures['answer_agreement']:.1%}; allows {trial.speedup:.2f}x")
    return replace(trial.plan, source=source, fingerprint=fingerprint(model))
