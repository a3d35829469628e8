"""The settings of a run: the full model, plans, and the baselines of `baselines.py` and `dart.py`, each by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import baselines
import dart

import popvlm
from popvlm import PruningPlan
from popvlm.fitting import fit

FULL = "full"
BASELINES = {
    "pop": "POP as in the paper: the last layers, own KV",
    "pop-fitted": "POP with fitted KV",
    "visual": "POP for visual positions only, own KV",
    "visual-fitted": "POP for visual positions only, fitted KV",
    "no-boundary": "POP without boundary handling, computed the slow way, so not timed",
    "no-kv": "POP without independent KV projections, computed the slow way, so not timed",
    "removed": "the same layers removed from both stages",
    "shortgpt": "as many layers removed from both stages, those of the least block influence (ShortGPT)",
    "dart": "visual tokens removed by DART's rule at the embedding level, for the FLOPs of POP's prefill"}


class SettingError(ValueError):
    """A setting that there is not; the message names the fix."""


@dataclass(frozen=True)
class Setting:
    """One way to run the model.

    Args:
        name: in the report.
        put: what holds a model to it inside a block.
        record: what it is, for the report and for whoever resumes the run.
        timed: whether its time says anything: not where it computes what it throws away.
    """

    name: str
    put: Callable[[Any], AbstractContextManager[Any]]
    record: Mapping[str, Any]
    timed: bool = True


@dataclass
class Makers:
    """Makes settings; what takes a calibration is kept in `folder`, so that a resumed run goes on with the same.

    Args:
        model: without a plan.
        folder: where fitted plans and choices of layers go, those of this model and calibration.
        calibration: gives the calibration prompts, as a processor returns them; asked only where one is needed.
        lengths: the mean visual and text tokens of the prompts to come, which set DART's share.
    """

    model: Any
    folder: Path
    calibration: Callable[[], Sequence[Mapping[str, Any]]]
    lengths: tuple[int, int]

    @cached_property
    def prompts(self) -> Sequence[Mapping[str, Any]]:
        return self.calibration()

    @cached_property
    def layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    def plan(self, name: str) -> Setting:
        """A plan by its file, or "lossless" or "last-third"."""
        known = popvlm.plan_of(popvlm.accelerate(None, self.model, plan=name))  # says what is wrong with it
        popvlm.restore(self.model)
        assert known is not None
        return _planned(Path(name).name.split(".")[0], known, name)

    def baseline(self, name: str, ratio: float) -> Setting:
        """One of `BASELINES` at a share of the layers."""
        if name not in BASELINES:
            raise SettingError(f"there is no baseline {name!r}; there are {', '.join(BASELINES)}")
        plan = PruningPlan.last(self.layers, ratio)
        called = f"{ratio:.0%} {name}"
        if name in ("pop", "pop-fitted", "visual", "visual-fitted"):
            bare = plan if name.startswith("pop") else PruningPlan(self.layers, visual=plan.visual, source=plan.source)
            return _planned(called, self._fitted(called, bare) if name.endswith("fitted") else bare, BASELINES[name])
        if not baselines.SUPPORTED:
            raise SettingError(f"the baseline {name} needs transformers 5; upgrade it, or leave {name} out")
        put: Callable[[Any], AbstractContextManager[Any]]
        if name == "dart":
            share = dart.matching(self.model.config, plan, *self.lengths)
            put, what = partial(dart.dart, keep=share), {"share of visual tokens kept": share}
        else:
            layers = self._least_influence(len(plan.text)) if name == "shortgpt" else sorted(plan.text)
            kind = {"no-boundary": baselines.without_boundary, "no-kv": baselines.without_kv}.get(name,
                                                                                                  baselines.removed)
            put, what = partial(kind, layers=layers), {"layers": layers}
        return Setting(called, put, {"what": BASELINES[name], **what}, timed=name not in ("no-boundary", "no-kv"))

    def _fitted(self, name: str, plan: PruningPlan) -> PruningPlan:
        path = self.folder / f"{slug(name)}.json"
        if not path.exists():
            fit(self.model, plan, self.prompts)[0].save(path)
        return PruningPlan.load(path)

    def _least_influence(self, count: int) -> list[int]:
        path = self.folder / "block_influence.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(baselines.block_influence(self.model, self.prompts).tolist()))
        influence = json.loads(path.read_text())
        return sorted(sorted(range(len(influence)), key=influence.__getitem__)[:count])


def full() -> Setting:
    """The model as it is."""
    return Setting(FULL, nullcontext, {"what": "the full model"})


def slug(name: str) -> str:
    """A name as a file's."""
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def _planned(name: str, plan: PruningPlan, what: str) -> Setting:
    norms = {key: round(float(tensor.float().norm()), 3) for key, tensor in (plan.fitted or {}).items()}
    record = {"what": what, "plan": repr(plan), "visual": sorted(plan.visual), "text": sorted(plan.text),
              "tail": plan.tail, "kv": plan.kv, "source": plan.source}
    return Setting(name, partial(planned, plan=plan), record | ({"fitted norms": norms} if norms else {}))


class planned(AbstractContextManager[Any]):
    """A plan on the model inside the block."""

    def __init__(self, model: Any, plan: PruningPlan) -> None:
        self.model = popvlm.accelerate(None, model, plan=plan)

    def __exit__(self, *error: object) -> None:
        popvlm.restore(self.model)
