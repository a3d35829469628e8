"""What a user calls: accelerate, restore, full_prefill, plan_of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from torch import nn

from popvlm import prefill
from popvlm.decoders import UnsupportedModel, family_of, fingerprint, unwrapped
from popvlm.plan import PlanError, PruningPlan

Model = TypeVar("Model", bound=nn.Module)


class ProcessorError(ValueError):
    """A processor that does not belong to the model."""


def accelerate(processor: Any, model: Model, *, plan: PruningPlan | str | os.PathLike[str] | None = None,
               ratio: float | None = None, speedup: float | None = None, divergence: float | None = None,
               calibration: Any = None, kv: Literal["own", "fitted"] = "fitted") -> Model:
    """Puts Prefill-Only Pruning (arXiv 2602.03295) on the model's language decoder, in place.

    While the prompt is read, context positions skip the plan's layers, which only make keys and values of them; while
    the answer is written, the whole model runs. Weights, vision encoder, projector, embedding and head are untouched.
    Calling it again replaces the plan.

    Without further arguments the plan is `"auto"`: the one cached for this very model, or published with the package,
    or else one that is calibrated now (with a progress bar; once) on a built-in mix of drawn documents, tables, charts
    and scenes: the fastest whose first token stays within a KL of 0.01 nats of the full model's and agrees with it on
    98 % of held-out prompts. A line on standard error says which it was.

    Args:
        processor: the model's processor, its tokenizer for a text-only model; or None, where nothing has to be
            calibrated.
        model: a Qwen3-VL, Gemma-3, Llama or Qwen3 model with its language-model head, or a PEFT model around one.
        plan: `"auto"`; a `PruningPlan`; the path of a saved one; `"lossless"` (only the last layer: the full model's
            logits); or `"last-third"` (the paper's recipe, which needs no calibration).
        ratio: skip this share of the layers, 0 or more and below 1: the last ones, with their own projections, as the
            paper does; with `calibration`, fitted ones.
        speedup: calibrate for this speed-up of the decoder's prefill, as its FLOPs allow it.
        divergence: calibrate for this mean KL of the first token, in nats.
        calibration: prompts to calibrate on, in place of the built-in mix: messages, or mappings with a question and an
            image, in the forms that `datasets` and processors use (`popvlm.samples.Prepared`).
        kv: what calibration finds: fitted projections, or the layers' own.

    Returns:
        The same model object.

    Raises:
        PlanError: the plan is not for this model, or cannot be read, or would have to be calibrated without processor.
        UnsupportedModel: popvlm does not know the model's decoder.
        ProcessorError: the processor is another model's.
        SelectionError, SampleError, FittingError: the budget or the prompts cannot be used.

    Whatever it raises, the model is as it was.
    """
    inner = unwrapped(model)
    family = family_of(inner)
    this_model = fingerprint(inner)
    if getattr(inner.config.get_text_config(), "use_bidirectional_attention", None) is True:
        raise UnsupportedModel(f"{type(inner).__name__} is configured for bidirectional attention, in which every "
                               "position is read by those before it; prefill-only pruning needs a causal decoder")
    _check_processor(processor, inner)
    budget = ratio, speedup, divergence
    if plan not in (None, "auto") and (budget != (None, None, None) or calibration is not None):
        raise PlanError("plan says it all; leave out ratio, speedup, divergence and calibration, or the plan")
    if plan == "last-third" or (ratio is not None and calibration is None):
        chosen = PruningPlan.last(this_model.num_layers, 1 / 3 if ratio is None else ratio)
    elif plan == "lossless":
        chosen = PruningPlan.lossless(this_model.num_layers)
    elif isinstance(plan, PruningPlan):
        chosen = plan
    elif plan in (None, "auto"):
        from popvlm.calibrate import automatic  # noqa: PLC0415 # the rest of popvlm, which a given plan does not need
        from popvlm.selection import Budget  # noqa: PLC0415
        chosen, found = automatic(processor, inner, calibration, budget=Budget(*budget), kv=kv)
        print(f"popvlm: {chosen!r}, {found}", file=sys.stderr)
    elif isinstance(plan, (str, os.PathLike)):
        chosen = PruningPlan.load(plan)
    else:
        raise PlanError(f"plan is {plan!r}; give a PruningPlan, the path of one, 'auto', 'lossless' or 'last-third'")
    chosen.check(this_model)
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
    inner = unwrapped(model)
    family_of(inner)
    return prefill.pruned(inner)


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
