"""Calibrates an embedded model, on the kinds of image that it was trained on and on others, and puts the plan into the
package.

    python calibration/publish.py tiny-qwen3-vl

The plan is found by `popvlm.accelerate(processor, model)` from then on. Run it again after a model was trained anew.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
import typer

sys.path.insert(0, str(Path(__file__).parent))

from experiments import subject

from popvlm.calibrate import PUBLISHED, line, progress
from popvlm.decoders import identity
from popvlm.quality import measure, references
from popvlm.selection import Budget, choose, described, split


def main(name: str, prompts: int = 132, tails: str = "1,16") -> None:
    it = subject(name)
    samples = it.mix("train", prompts)
    with progress(f"calibrating {name}") as (say, track):
        choice = choose(it.model, samples, Budget(), tails=tuple(map(int, tails.split(","))), say=say, track=track)
    assert choice.met, "nothing is published that does not meet the default budget"
    fitted = choice.best.plan.fitted
    assert fitted is not None
    # Measured again as it is published: half the size, in bfloat16.
    plan = replace(choice.best.plan, fitted={key: value.to(torch.bfloat16) for key, value in fitted.items()})
    held, _ = split(samples)
    trial = replace(choice.best, plan=plan, quality=measure(it.model, plan, held, references(it.model, held)))
    print(line(trial))
    plan = described(trial, it.model)
    plan = replace(plan, source=f"calibration/publish.py: {plan.source}",
                   fingerprint=plan.fingerprint and replace(plan.fingerprint, checkpoint=name))
    for old in PUBLISHED.glob(f"{name}.*"):
        old.unlink()
    PUBLISHED.mkdir(exist_ok=True)
    plan.save(PUBLISHED / f"{name}.{identity(it.model)}.json")


if __name__ == "__main__":
    typer.run(main)
