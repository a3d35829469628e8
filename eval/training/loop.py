"""The training loop of the small models: seeded, resumable, logged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by Newton-Schulz (Keller Jordan, 2024), for matrices only.

    torch has one too, in bfloat16: on this CPU, without bfloat16 instructions, it took 10 s a step, and this one less
    than 1 s. Equal shapes run as one batch. The update's size is that of AdamW, so one learning rate serves both.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, dict(lr=lr, momentum=0.95, decay=0.01))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                updates = []
                for matrix in matrices:
                    moved = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                    moved.lerp_(matrix.grad, 1 - group["momentum"])
                    updates.append(matrix.grad.lerp(moved, group["momentum"]))
                size = 0.2 * max(shape) ** 0.5 * group["lr"]
                for matrix, update in zip(matrices, orthogonal(torch.stack(updates))):
                    matrix.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=size)


def orthogonal(batch: Tensor) -> Tensor:
    """The matrices `[N, R, C]` with singular values drawn to about 1."""
    flip = batch.shape[1] > batch.shape[2]
    batch = batch.mT if flip else batch
    batch = batch / batch.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = batch @ batch.mT
        batch = 3.4445 * batch + (-4.7750 * square + 2.0315 * square @ square) @ batch
    return batch.mT if flip else batch


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, norms, biases and convolutions."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = parameter.ndim == 2 and "embed" not in name and "head" not in name and "lora" not in name
            (matrices if matrix else others).append(parameter)
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr, betas=(0.9, 0.98), weight_decay=0.0)]
    return made + [Muon(matrices, lr)] if matrices else made


def train(module: nn.Module, loss_of: Callable[[int], tuple[Tensor, dict[str, Any]]], *, steps: int, lr: float,
          folder: Path, name: str, warmup: int = 100, cooldown: float = 0.3,
          check: Callable[[], dict[str, Any]] | None = None, every: int = 200) -> None:
    """Trains the module's parameters that require gradients, and goes on from `folder` where it was broken off.

    Args:
        module: what is trained; only its trained parameters are kept in checkpoints.
        loss_of: the loss of a step and figures for the log; all randomness must come from the step.
        steps: how many in all; the learning rate rises for `warmup` steps and falls to 0 over the last `cooldown`.
        check: figures on held-out examples for the log, `every` so many steps and at the end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved, log = folder / f"{name}.pt", folder / f"{name}.jsonl"
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    opts = optimizers(module, lr)
    done, seconds = 0, 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        for key, parameter in trained.items():
            parameter.data.copy_(state["parameters"][key])
        for opt, held in zip(opts, state["optimizers"]):
            opt.load_state_dict(held)
        done, seconds = state["step"], state["seconds"]

    def save() -> None:
        state = {"step": done, "seconds": seconds, "optimizers": [opt.state_dict() for opt in opts],
                 "parameters": {key: parameter.data for key, parameter in trained.items()}}
        torch.save(state, saved.with_suffix(".new"))
        saved.with_suffix(".new").replace(saved)

    kept = time.monotonic()
    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
               TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns) as bar, log.open("a") as lines:
        task = bar.add_task(name, total=steps, completed=done, loss="")
        while done < steps:
            began = time.monotonic()
            rate = lr * min(1, (done + 1) / warmup, (steps - done) / (steps * cooldown))
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = rate
            loss, figures = loss_of(done)
            loss.backward()
            nn.utils.clip_grad_norm_(trained.values(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            done += 1
            seconds += time.monotonic() - began
            bar.update(task, completed=done, loss=f"{float(loss.detach()):.3f}")
            row: dict[str, Any] = {"step": done, "seconds": round(seconds, 1), "lr": rate,
                                   "loss": round(float(loss.detach()), 4), **figures}
            if check and (done % every == 0 or done == steps):
                row |= check()
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            if time.monotonic() - kept > 120 or done == steps:
                save()
                kept = time.monotonic()
