"""Full against pruned on the same prompts: how far apart they are, and how often they say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from popvlm import prefill
from popvlm.decoders import family_of, fingerprint
from popvlm.plan import PruningPlan

# What a processor returns for a prompt's positions, and what an answer's positions have there.
OF_POSITIONS = {"attention_mask": 1, "token_type_ids": 0, "mm_token_type_ids": 0}


class QualityError(ValueError):
    """Prompts on which nothing can be compared; the message names the fix."""


@dataclass(frozen=True, eq=False)
class Reference:
    """What the full model says to one prompt: its greedy answer `[A]`, and its log-probabilities there `[A, V]`."""

    answer: Tensor
    log_probs: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Quality:
    """A plan's distance from the full model on `N` prompts.

    Args:
        first_kl: `[N]`, KL(full || pruned) of the first token's distribution, in nats, float64.
        answer_kl: `[N]`, the mean of the same over the full model's answer, token by token.
        first_agrees: `[N]`, whether both put the same token first.
        answer_agrees: `[N]`, whether the pruned model, decoding greedily, writes the full model's answer.
    """

    first_kl: Tensor
    answer_kl: Tensor
    first_agrees: Tensor
    answer_agrees: Tensor

    def __len__(self) -> int:
        return len(self.first_kl)

    def figures(self) -> dict[str, float]:
        """Means, and the 95th percentile of the first token's divergence."""
        return {"mean_kl": self.first_kl.mean().item(), "p95_kl": self.first_kl.quantile(0.95).item(),
                "mean_answer_kl": self.answer_kl.mean().item(),
                "agreement": self.first_agrees.double().mean().item(),
                "answer_agreement": self.answer_agrees.double().mean().item(), "prompts": len(self)}

    def __repr__(self) -> str:
        figures = self.figures()
        return (f"Quality({len(self)} prompts: KL {figures['mean_kl']:.4f} (95 %: {figures['p95_kl']:.4f}), first "
                f"token agrees {figures['agreement']:.1%}, answer {figures['answer_agreement']:.1%})")


@torch.no_grad()
def references(model: nn.Module, samples: Sequence[Mapping[str, Any]], *, answer_tokens: int = 8,
               progress: Callable[[range], Iterable[int]] = iter) -> list[Reference]:
    """The full model's greedy answers, whatever plan is on it, kept on the CPU: 4 A V bytes a prompt.

    Args:
        model: a transformers model with its language-model head, in eval mode.
        samples: prompts, each what a processor returns for one, `[1, T]`.
        answer_tokens: the longest answer `A`.
        progress: goes around the loop over samples.

    Raises:
        QualityError: there are no samples.
    """
    if not len(samples):
        raise QualityError("there are no prompts to compare on; give at least one")
    found = []
    with prefill.under(model, None, family_of(model)):
        for index in progress(range(len(samples))):
            prompt = placed(model, samples[index])
            length = prompt["input_ids"].shape[1]
            written: Any = model
            tokens = written.generate(**prompt, max_new_tokens=answer_tokens, do_sample=False, num_beams=1,
                                      suppress_tokens=not_written(model))
            answer = tokens[0, length:]
            found.append(Reference(answer.cpu(), _log_probs(model, prompt, answer).cpu()))
    return found


@torch.no_grad()
def measure(model: nn.Module, plan: PruningPlan, samples: Sequence[Mapping[str, Any]],
            known: Sequence[Reference], *, progress: Callable[[range], Iterable[int]] = iter) -> Quality:
    """How far `plan` takes the model from its full self, on the prompts that `known` are the references of.

    One call a prompt, of the prompt and the full model's answer: asked for the answer's logits, it prunes what
    `generate` prunes and runs the rest in full. That the pruned model puts each of the answer's tokens first is the
    same as that it writes this answer.

    The plan on the model, if any, is back on it afterwards.

    Raises:
        PlanError: the plan is another model's.
        QualityError: samples and references do not belong together.
    """
    if len(known) != len(samples):
        raise QualityError(f"there are {len(samples)} prompts and {len(known)} references; give those of the same "
                           "prompts")
    first_kl, answer_kl, first_agrees, answer_agrees = [], [], [], []
    family = family_of(model)
    plan.check(fingerprint(model))
    with prefill.under(model, plan, family):
        for index in progress(range(len(samples))):
            full = known[index].log_probs
            pruned = _log_probs(model, placed(model, samples[index]), known[index].answer).cpu()
            apart = F.kl_div(pruned.double(), full.double(), log_target=True, reduction="none").sum(-1)
            same = pruned.argmax(-1) == full.argmax(-1)
            first_kl.append(apart[0])
            answer_kl.append(apart.mean())
            first_agrees.append(same[0])
            answer_agrees.append(same.all())
    return Quality(*(torch.stack(column) for column in (first_kl, answer_kl, first_agrees, answer_agrees)))


def continued(prompt: Mapping[str, Any], answer: Tensor) -> dict[str, Any]:
    """A processor's output `[1, P]` with an answer `[A]` behind it but for its last token, which nothing follows.

    A model called with it and `logits_to_keep=A` gives the logits of every token of the answer.
    """
    written = answer[None, :-1].to(prompt["input_ids"].device)
    call = {**prompt} | {"input_ids": torch.cat([prompt["input_ids"], written], 1)}
    for name, value in OF_POSITIONS.items():
        if call.get(name) is not None:
            call[name] = F.pad(call[name], (0, written.shape[1]), value=value)
    return call


def _log_probs(model: Any, prompt: dict[str, Any], answer: Tensor) -> Tensor:
    logits = model(**continued(prompt, answer), logits_to_keep=len(answer), use_cache=False).logits[0]
    return F.log_softmax(logits.float(), dim=-1)


def not_written(model: Any) -> list[int] | None:
    """Placeholders of images, which no answer may have: nothing stands behind them. Only untrained models write any."""
    return list(family_of(model).visual_token_ids(model.config)) or None


def placed(model: Any, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with its tensors where the model takes its inputs."""
    device = model.device if model.device.type != "meta" else "cpu"  # offloaded: its hooks bring it where it must be
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in sample.items()}
