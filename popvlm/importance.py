"""Which layers matter to which positions: gate gradients of samples, and the Fisher information that they make."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from popvlm import prefill
from popvlm.decoders import family_of, fingerprint, unwrapped
from popvlm.gates import BRANCHES, virtual_gates
from popvlm.plan import Fingerprint, replacing
from popvlm.quality import continued, not_written, placed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS = ("visual", "text", "answer")
"""Positions whose gradients are summed: visual and text context, and the last prompt token with the written ones."""

Stage = Literal["prefill", "decode", "visual", "text"]
STAGES: dict[str, slice] = {"prefill": slice(0, 2), "decode": slice(2, 3), "visual": slice(0, 1), "text": slice(1, 2)}
"""The groups that belong to each stage."""

FORMAT = 1
TENSORS = ("gradients", "indices", "positions", "losses")

class ProfileError(ValueError):
    """Samples or a profile that cannot be used; the message names the fix."""


@dataclass(frozen=True, eq=False, repr=False)
class ImportanceProfile:
    """The gate gradients of `N` samples, from which every score of importance is computed.

    A sample's loss is the negative log-likelihood, in nats, of a whole answer that the model itself wrote, so the mean
    of a squared gradient is the Fisher information of the gates, and half of it is to second order the divergence
    KL(full || pruned) of the answer's distribution when gates go from one to zero.

    Args:
        fingerprint: the model's.
        seed: that the answers were drawn with, together with each sample's index.
        max_new_tokens: the longest that an answer could be.
        gradients: `[N, 3, L, 2]`, float64: sums over visual context, text context and answer positions, for each layer
            and branch (attention, MLP).
        indices: `[N]`, ascending: which samples these are.
        positions: `[N, 3]`: how many positions of each group a sample had.
        losses: `[N]`, float64.
    """

    fingerprint: Fingerprint
    seed: int
    max_new_tokens: int
    gradients: Tensor
    indices: Tensor
    positions: Tensor
    losses: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        visual, text, answer = self.positions.double().mean(0).tolist()
        return (f"ImportanceProfile({self.fingerprint.checkpoint or self.fingerprint.family}, {self.num_layers} "
                f"layers: {len(self)} samples of {visual:.0f} visual, {text:.0f} text and {answer:.0f} answer "
                f"positions on average; seed {self.seed})")

    @property
    def num_layers(self) -> int:
        """Decoder layers `L`."""
        return self.fingerprint.num_layers

    def fisher(self, stage: Stage) -> Tensor:
        """The Fisher information between layers, `[L, L]` float64, one gate a layer, in nats.

        `x @ fisher @ x / 2` predicts the divergence when layer `l`'s gate goes from 1 to `1 - x[l]` at the positions of
        `stage`: the context (`prefill`), only its `visual` or `text` positions, or the answer (`decode`).
        """
        layers = self.gradients[:, STAGES[stage]].sum((1, 3))
        return layers.T @ layers / len(self)

    def importance(self, stage: Stage) -> Tensor:
        """The paper's score of each layer, E[(dL/dg)^2], `[L]` float64 (arXiv 2602.03295): the diagonal of `fisher`.

        Samples without such positions (text only, for `visual`) count as zero.
        """
        return self.fisher(stage).diagonal()

    def removal_cost(self, visual: Iterable[int] = (), text: Iterable[int] = ()) -> float:
        """The divergence in nats, to second order, when visual and text context positions skip these layers.

        Half the mean over samples of the squared sum of the removed gates' gradients: how layers add up or cancel
        counts. A prediction for a plan's own KV projections: `removal_cost(plan.visual, plan.text)`.
        """
        removed = torch.zeros(2, self.num_layers, dtype=torch.float64)
        for kind, layers in enumerate((visual, text)):
            for layer in layers:
                if not 0 <= layer < self.num_layers:
                    raise ProfileError(f"there is no layer {layer}; the profile has layers 0 to {self.num_layers - 1}")
                removed[kind, layer] = 1
        sums = (self.gradients[:, :2].sum(3) * removed).sum((1, 2))
        return sums.square().mean().item() / 2

    def cheapest(self, count: int, kinds: Sequence[Literal["visual", "text"]], *,
                 text: Iterable[int] = ()) -> frozenset[int]:
        """So many layers whose removal for the context of `kinds` costs least, found one by one: the next is the one
        with which all so far cost least together. Never the first layer: without it nothing of a prompt would be left.

        Args:
            count: how many, fewer than there are layers.
            kinds: whose context skips them.
            text: layers that text context skips beside them, where it is none of `kinds`.
        """
        found: set[int] = set()
        while len(found) < count:
            costs = {layer: self.removal_cost(**{"text": text} | {kind: {*found, layer} for kind in kinds})
                     for layer in range(1, self.num_layers) if layer not in found}
            found.add(min(costs, key=costs.__getitem__))
        return frozenset(found)

    def check(self, model: Fingerprint) -> None:
        """Whether the profile is of a model of this architecture.

        Raises:
            ProfileError: it is not; the message says how they differ.
        """
        if wrong := self.fingerprint.differences(model):
            raise ProfileError(f"the profile is of another model ({self.fingerprint.checkpoint or 'unnamed'}: "
                               f"{', '.join(wrong)}); profile this one")

    @classmethod
    def merge(cls, profiles: Iterable[ImportanceProfile]) -> ImportanceProfile:
        """One profile of all samples, whichever order they come in: of the processes that shared the work, say.

        Raises:
            ProfileError: there are none, two have a sample in common, or they are of different models, seeds or answer
                lengths.
        """
        profiles = list(profiles)
        if not profiles:
            raise ProfileError("there is no profile to merge; give at least one")
        first = profiles[0]
        for other in profiles[1:]:
            first.check(other.fingerprint)
            first._check_drawn(other.seed, other.max_new_tokens)
        order = torch.cat([profile.indices for profile in profiles]).argsort()
        joined = {name: torch.cat([getattr(profile, name) for profile in profiles])[order] for name in TENSORS}
        indices = joined["indices"]
        if (twice := indices[1:][indices[1:] == indices[:-1]]).numel():
            raise ProfileError(f"sample {twice[0]} is in more than one profile; give each process its own indices")
        # The name is for reading only: which one is kept must not hang on the order.
        name = min(profile.fingerprint.checkpoint for profile in profiles)
        return cls(replace(first.fingerprint, checkpoint=name), first.seed, first.max_new_tokens, **joined)

    def _check_drawn(self, seed: int, max_new_tokens: int) -> None:
        for name, ours, theirs in (("seed", self.seed, seed),
                                   ("max_new_tokens", self.max_new_tokens, max_new_tokens)):
            if ours != theirs:
                raise ProfileError(f"the profile was made with {name}={ours}, not {theirs}; use the same, or start "
                                   "another profile")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, whole or not at all; makes its folder if there is none.

        Raises:
            ProfileError: there is a folder at `path`.
        """
        path = Path(path)
        if path.is_dir():
            raise ProfileError(f"{path} is a folder; give the path of a file, such as {path / 'profile.safetensors'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        record = {"format": FORMAT, "fingerprint": asdict(self.fingerprint), "seed": self.seed,
                  "max_new_tokens": self.max_new_tokens, "groups": GROUPS, "branches": BRANCHES,
                  "sha256": _digest(tensors)}
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"popvlm_importance": json.dumps(record)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ImportanceProfile:
        """Reads a profile that `save` wrote.

        Raises:
            ProfileError: the file is missing, damaged, no profile, or of a newer format.
        """
        path = Path(path)
        if not path.is_file():
            raise ProfileError(f"there is no profile at {path}; give the path of one that ImportanceProfile.save wrote")
        try:
            with safe_open(path, framework="pt") as file:
                record = json.loads((file.metadata() or {})["popvlm_importance"])
                if record["format"] > FORMAT:
                    raise ProfileError(f"{path} has profile format {record['format']} and this popvlm reads up to "
                                       f"{FORMAT}; upgrade popvlm")
                tensors = {name: file.get_tensor(name) for name in TENSORS}
            if _digest(tensors) != record["sha256"]:
                raise ProfileError(f"{path} is damaged: its tensors are not those that were written; copy it again, or "
                                   "delete it and profile again")
            return cls(Fingerprint(**record["fingerprint"]), record["seed"], record["max_new_tokens"], **tensors)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ProfileError):
                raise
            raise ProfileError(f"{path} is damaged or no importance profile ({error}); copy it again, or delete it and "
                               "profile again") from error


def profile(model: nn.Module, samples: Sequence[Mapping[str, Any]], *, path: str | os.PathLike[str] | None = None,
            seed: int = 0, max_new_tokens: int = 128, indices: Iterable[int] | None = None,
            progress: Callable[[range], Iterable[int]] = iter) -> ImportanceProfile:
    """Scores a model's layers on samples: it answers each, and one backward pass gives the gradient of every gate.

    The full model runs, in evaluation mode, whatever plan or mode it is in. Answers are sampled from its own
    distribution (temperature 1, nothing cut off, its generation settings aside from the end token ignored), so the mean
    of squared gradients is the true Fisher information.

    Args:
        model: a model of one of popvlm's families, or PEFT's or another wrapper around one.
        samples: each what the processor (or tokenizer) returns for one chat prompt, with its images, ready to be
            answered: `input_ids` `[1, P]` and what goes with them, unpadded. Read one at a time, when its turn comes.
        path: where the profile is kept as it grows, sample by sample. If there is one, samples that are in it are not
            run again; so an interrupted run goes on with the same call, and its result equals an unbroken one's.
        seed: of the answers. Each depends on it and on its sample's index only.
        max_new_tokens: of an answer.
        indices: the samples to run; all, if not given. For process `r` of `n`: `range(r, len(samples), n)`, with a
            `path` for each process; `ImportanceProfile.merge` joins them.
        progress: goes around the loop over samples.

    Returns:
        The profile of these samples, and of all others that `path` had.

    Raises:
        ProfileError: there are no samples; one is batched, padded or carries what fits its prompt only; one's loss or
            gradients are no finite numbers (samples done before are at `path`); `path` has a profile of another model,
            seed or `max_new_tokens`, or a damaged one.
        UnsupportedModel: popvlm does not know the decoder, or its layers pass no gradient back.
    """
    inner = unwrapped(model)
    family_of(inner)
    this_model = fingerprint(inner)
    wanted = list(range(len(samples)) if indices is None else indices)
    if not wanted:
        raise ProfileError("there are no samples to profile; give at least one")
    for index in wanted:
        if not 0 <= index < len(samples):
            raise ProfileError(f"there is no sample {index}; indices go from 0 to {len(samples) - 1}")
    found = ImportanceProfile.load(path) if path is not None and os.path.exists(path) else None
    if found is not None:
        found.check(this_model)
        found._check_drawn(seed, max_new_tokens)
    done = set() if found is None else set(found.indices.tolist())
    with _as_it_answers(inner):
        for index in (wanted[place] for place in progress(range(len(wanted)))):
            if index in done:
                continue
            gradients, positions, loss = _gradients(inner, samples[index], index, seed, max_new_tokens)
            one = ImportanceProfile(this_model, seed, max_new_tokens, gradients[None], torch.tensor([index]),
                                    positions[None], torch.tensor([loss], dtype=torch.float64))
            found = one if found is None else ImportanceProfile.merge([found, one])
            done.add(index)
            if path is not None:
                found.save(path)
    assert found is not None
    return found


def plot(*profiles: ImportanceProfile) -> Figure:
    """Importance over depth on a log scale: prefill against decode, and visual against text where there are images.

    A panel for each profile. A score of exactly zero (the last layer's in prefill, always) has no place on the scale
    and is left out.
    """
    from matplotlib.figure import Figure  # not with the module: it takes a second to import # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(7 * len(profiles), 4.2), layout="constrained")
    for axes, profile in zip(figure.subplots(1, len(profiles), squeeze=False)[0], profiles):
        lines: list[tuple[Stage, str, str, str]] = [("decode", "decode: answer", "tab:red", "s-"),
                                                    ("prefill", "prefill: context", "tab:blue", "o-")]
        if profile.positions[:, 0].any():
            lines += [("visual", "visual context", "tab:green", "^--"), ("text", "text context", "tab:purple", "v--")]
        for stage, label, colour, style in lines:
            scores = profile.importance(stage)
            axes.plot(scores.where(scores > 0, torch.nan).numpy(), style, color=colour, label=label, markersize=4)
        axes.set_yscale("log")
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("importance E[(dL/dg)²]  (nats)")
        axes.set_title(f"{profile.fingerprint.checkpoint or profile.fingerprint.family}, {len(profile)} samples",
                       size=10)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    return figure


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in TENSORS:
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _as_it_answers(model: Any) -> Iterator[None]:
    """The full model in evaluation mode, which writes what its own distribution says; after it, as it was."""
    plan, settings = prefill.pruned(model), model.generation_config
    training = [module for module in model.modules() if module.training]
    # In place of the model's own, which `generate` would fill ours up with (penalties, suppressed tokens, ...).
    end = settings.eos_token_id
    pad = settings.pad_token_id if settings.pad_token_id is not None else end[0] if isinstance(end, list) else end
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=pad,
        suppress_tokens=not_written(model))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # what it writes is part of what the loss goes back through
        if plan is not None:
            stack.enter_context(prefill.full(plan))
        model.eval()
        try:
            yield
        finally:
            model.generation_config = settings
            for module in training:
                module.training = True


def _gradients(model: Any, sample: Mapping[str, Any], index: int, seed: int,
               max_new_tokens: int) -> tuple[Tensor, Tensor, float]:
    """A sample's gradients `[3, L, 2]` and positions `[3]` in the three groups, and its loss."""
    prompt = _checked(model, sample, index)
    try:
        answer = _written(model, prompt, seed, index, max_new_tokens)
        gates, loss = _gate_gradients(model, prompt, answer)
    except FloatingPointError as error:
        raise _no_numbers(index, "logits") from error
    if not gates.isfinite().all():
        raise _no_numbers(index, "gate gradients")
    length, total = prompt["input_ids"].shape[1], gates.shape[-1]
    tokens = torch.tensor(family_of(model).visual_token_ids(model.config), dtype=torch.long)
    visual = F.pad(torch.isin(prompt["input_ids"][0].cpu(), tokens), (0, total - length))
    answers = torch.arange(total) >= length - 1
    groups = torch.stack([visual & ~answers, ~visual & ~answers, answers])
    return torch.einsum("gt,lbt->glb", groups.double(), gates.double()), groups.sum(1), loss


def _no_numbers(index: int, what: str) -> ProfileError:
    return ProfileError(f"sample {index}'s {what} are not all finite numbers; load the model in bfloat16 or float32, "
                        "or leave that sample out with `indices`")


def _checked(model: Any, sample: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The sample as arguments of the model, on its device."""
    ids = sample.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        shape = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ProfileError(f"sample {index} has input_ids {shape}, not one prompt [1, P]; give what the processor "
                           "returns for one prompt with return_tensors='pt'")
    mask = sample.get("attention_mask")
    if mask is not None and not mask.all():
        raise ProfileError(f"sample {index} is padded; process each prompt by itself, without padding")
    for name in "position_ids", "inputs_embeds", "labels":
        if sample.get(name) is not None:
            raise ProfileError(f"sample {index} has {name}, which fit the prompt and not the answer to come; leave "
                               "them out")
    return placed(model, sample)


def _written(model: Any, prompt: dict[str, Any], seed: int, index: int, max_new_tokens: int) -> Tensor:
    """The answer `[A]` that the model writes to a prompt, drawn by `seed` and `index` alone."""
    devices = {weight.device for weight in model.parameters()}
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        torch.manual_seed(random.Random(f"{seed}:{index}").getrandbits(63))
        tokens = model.generate(**prompt, max_new_tokens=max_new_tokens,
                                logits_processor=LogitsProcessorList([_FiniteLogits()]))
    return tokens[0, prompt["input_ids"].shape[1]:]


class _FiniteLogits(LogitsProcessor):
    """Stops before NaN reaches the sampling, which on a GPU would end the process."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.isnan().any() or scores.isposinf().any() or not scores.isfinite().any():  # suppressed ones are -inf
            raise FloatingPointError("the model's logits are not all finite")
        return scores


def _gate_gradients(model: Any, prompt: dict[str, Any], answer: Tensor) -> tuple[Tensor, float]:
    """The gradients `[L, 2, T]` of the answer's negative log-likelihood for every gate, and that loss.

    The `T` positions are the prompt's and the answer's but its last, which nothing follows: its logits are not asked
    for, and in `generate` it is never read.
    """
    call = continued(prompt, answer)
    with virtual_gates(model, *call["input_ids"].shape) as gates:
        logits = model(**call, logits_to_keep=len(answer), use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits, answer.to(logits.device), reduction="sum")
        if not loss.isfinite():
            raise FloatingPointError(f"the loss is {loss.item()}")
        (gradients,) = torch.autograd.grad(loss, gates)
    return gradients[:, :, 0], loss.item()
