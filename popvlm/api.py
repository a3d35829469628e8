"""What a user calls: accelerate, restore, full_prefill, plan_of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from popvlm import prefill
from popvlm.decoders import UnsupportedModel, family_of, fingerprint
from popvlm.plan import PlanError, PruningPlan

Model = TypeVar("Model", bound=nn.Module)


class ProcessorError(ValueError):
    """A processor that does not belong to the model."""


def accelerate(processor: Any, model: Model, *, ratio: float | None = None,
               plan: PruningPlan | str | os.PathLike[str] | None = None) -> Model:
    """Puts Prefill-Only Pruning (arXiv 2602.03295) on the model's language decoder, in place.

    While the prompt is read, context positions skip the plan's layers, which only make keys and values of them; while
    the answer is written, the whole model runs. Weights, vision encoder, projector, embedding and head are untouched.
    Calling it again replaces the plan.

    Args:
        processor: the model's processor, its tokenizer for a text-only model, or None.
        model: a Qwen3-VL, Gemma-3, Llama or Qwen3 model with its language-model head, or a PEFT model around one.
        ratio: skip this share of the layers, the last ones, 0 or more and below 1.
        plan: a `PruningPlan`, the path of a saved one, `"lossless"` (only the last layer: the full model's logits) or
            `"last-third"` (the paper's recipe, and what is used where neither `ratio` nor `plan` is given).

    Returns:
        The same model object.

    Raises:
        PlanError: the plan is not for this model, or cannot be read.
        UnsupportedModel: popvlm does not know the model's decoder.
        ProcessorError: the processor is another model's.

    Whatever it raises, the model is as it was.
    """
    inner = _unwrap(model)
    family = family_of(inner)
    this_model = fingerprint(inner)
    if getattr(inner.config.get_text_config(), "use_bidirectional_attention", None) is True:
        raise UnsupportedModel(f"{type(inner).__name__} is configured for bidirectional attention, in which every "
                               "position is read by those before it; prefill-only pruning needs a causal decoder")
    if ratio is not None and plan is not None:
        raise PlanError("give either ratio or plan, not both")
    if plan is None or plan == "last-third":
        chosen = PruningPlan.last(this_model.num_layers, 1 / 3 if ratio is None else ratio)
    elif plan == "lossless":
        chosen = PruningPlan.lossless(this_model.num_layers)
    elif isinstance(plan, PruningPlan):
        chosen = plan
    elif isinstance(plan, (str, os.PathLike)):
        chosen = PruningPlan.load(plan)
    else:
        raise PlanError(f"plan is {plan!r}; give a PruningPlan, the path of one, 'lossless' or 'last-third'")
    chosen.check(this_model)
    _check_processor(processor, inner)
    prefill.prune(inner, chosen if chosen.fingerprint else replace(chosen, fingerprint=this_model), family)
    return model


def plan_of(model: nn.Module) -> PruningPlan | None:
    """The plan on the model, also while `full_prefill` holds it back; None if there is none.

    Raises:
        UnsupportedModel: this is no model that popvlm prunes (a part of one, or its processor, say).
    """
    replacement = _pruned(model)
    return replacement.plan if replacement else None


def restore(model: Model) -> Model:
    """Takes the plan off: the model is as it was before `accelerate`. Returns the same model object.

    Raises:
        UnsupportedModel: this is no model that popvlm prunes.
    """
    if replacement := _pruned(model):
        prefill.unprune(replacement.module)
    return model


@contextmanager
def full_prefill(model: Model) -> Iterator[Model]:
    """Runs the full model inside the block, in this thread and in threads started there; others keep the plan.

    A thread that streams is in full while the block is open, so read its stream, or join it, inside.

    It holds back the plan that is on the model, and one that replaces it inside; a plan put on a model that had none
    is in force at once.

    Raises:
        UnsupportedModel: this is no model that popvlm prunes.
    """
    replacement = _pruned(model)
    if replacement is None:
        yield model
    else:
        with prefill.full(replacement):
            yield model


def _pruned(model: Any) -> prefill.PrunedModel | None:
    inner = _unwrap(model)
    family_of(inner)
    return prefill.pruned(inner)


def _unwrap(model: Any) -> Any:
    """The transformers model inside what PEFT, torch.compile or data parallelism put around it."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _check_processor(processor: Any, model: Any) -> None:
    if processor is None:
        return
    names = f"{type(processor).__name__} does not belong to this {type(model).__name__}"
    fix = "load both from the same checkpoint"
    ours, theirs = (getattr(owner, "image_token_id", None) for owner in (processor, model.config))
    # transformers 5's Gemma-3 processor names the token that begins an image, 4's the one that stands for its features.
    if ours is not None and ours not in (theirs, getattr(model.config, "boi_token_index", None)):
        model_has = "no image token" if theirs is None else f"{theirs}"
        raise ProcessorError(f"{names}: its image token is {ours} and the model has {model_has}; {fix}")
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "vocab_size") or not hasattr(tokenizer, "decode"):
        raise ProcessorError(f"{type(processor).__name__} is neither a processor nor a tokenizer; give the model's "
                             "own, or None")
    if theirs is not None and tokenizer is processor:
        raise ProcessorError(f"{names}: a model that reads images needs its processor, not only a tokenizer; load it "
                             "with AutoProcessor")
    # Without the tokens added to it: Gemma's tokenizer has an image token also where the model, text-only, has not.
    rows, tokens = model.get_input_embeddings().num_embeddings, tokenizer.vocab_size
    if tokens > rows:
        raise ProcessorError(f"{names}: it has {tokens} tokens and the model embeds {rows}; {fix}")
