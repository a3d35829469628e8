"""Fitted KV projections: least squares from the pruned model's states to the full model's keys and values."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from popvlm import prefill, processes
from popvlm.decoders import Family, family_of, fingerprint, identity
from popvlm.plan import KINDS, Kind, PruningPlan, replacing
from popvlm.quality import placed
from popvlm.samples import Part

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""The ridge strengths that are tried, as shares of the mean square of the scaled states."""

HELD_OUT = 5
"""Of so many prompts that have a kind of position one is held out: these choose the ridge and are the report's. Those
with the same images stay together."""

FEW = 1e-2
"""The ridge where too few prompts have a kind of position to hold one out."""

SAVE_SECONDS = 60.0
"""The least time between two savings of the moments (4 GB for the last third of Qwen3-VL-8B)."""

ROWS = 1024
"""Positions that are added at a time: bounds what float64 copies of a long prompt take."""


class FittingError(ValueError):
    """Projections that cannot be fitted; the message names the fix."""


@dataclass(eq=False)
class Moments:
    """Second moments, in float64, of scaled states and of the keys and values that `layers` have at them.

    All that ridge regression asks of its data, so that prompts need not be kept: sums over positions, to which more are
    added, or those of another process.

    Args:
        layers: the `M` layers whose keys and values are fitted, in order.
        xtx: `[D + 1, D + 1]`, of the states and, last, a constant 1. So its last entry is the number of positions.
        xty: `[D + 1, M 2GK]`, of those with the keys and values: for each layer its `GK` keys, then its `GK` values.
        yty: `[M 2GK]`, the sum of each key's and value's square.
        prompts: how many went in.
    """

    layers: tuple[int, ...]
    xtx: Tensor
    xty: Tensor
    yty: Tensor
    prompts: int = 0

    @classmethod
    def zeros(cls, layers: tuple[int, ...], width: int, outputs: int) -> Moments:
        """Of no positions yet: states `[D]` of this width, and `2GK` outputs a layer."""
        zeros = partial(torch.zeros, dtype=torch.float64)
        columns = len(layers) * outputs
        return cls(layers, zeros(width + 1, width + 1), zeros(width + 1, columns), zeros(columns))

    @property
    def count(self) -> int:
        """The number of positions."""
        return round(self.xtx[-1, -1].item())

    def update(self, x: Tensor, y: Tensor) -> None:
        """Adds a prompt: its scaled states `[N, D]`, and their keys and values `[N, M 2GK]`. Moves to their device."""
        if x.device.type == "mps":  # has no float64
            x = x.cpu()
        self.xtx, self.xty, self.yty = (sums.to(x.device) for sums in (self.xtx, self.xty, self.yty))
        for start in range(0, len(x), ROWS):
            states = F.pad(x[start:start + ROWS].double(), (0, 1), value=1.0)
            made = y[start:start + ROWS].to(x.device).double()
            self.xtx.addmm_(states.T, states)
            self.xty.addmm_(states.T, made)
            self.yty += made.square().sum(0)
        self.prompts += 1

    def to(self, device: torch.device) -> Moments:
        """The same on a device."""
        return replace(self, xtx=self.xtx.to(device), xty=self.xty.to(device), yty=self.yty.to(device))

    def __add__(self, other: Moments) -> Moments:
        """The moments of both, over the same layers."""
        if self.layers != other.layers:
            raise FittingError(f"moments of layers {list(self.layers)} and of {list(other.layers)} have no sum; take "
                               "those that both have with only()")
        device = self.xtx.device
        return Moments(self.layers, self.xtx + other.xtx.to(device), self.xty + other.xty.to(device),
                       self.yty + other.yty.to(device), self.prompts + other.prompts)

    def only(self, layers: Iterable[int]) -> Moments:
        """Those of some of the layers."""
        layers = tuple(layers)
        if layers == self.layers:
            return self
        index = torch.tensor([self.layers.index(layer) for layer in layers], device=self.xty.device)
        xty = self.xty.view(len(self.xty), len(self.layers), -1)[:, index].flatten(1)
        return replace(self, layers=layers, xty=xty, yty=self.yty.view(len(self.layers), -1)[index].flatten())

    def solve(self, ridge: float, toward: Tensor | None = None) -> Tensor:
        """The projections `[D + 1, M 2GK]`, the bias last, that minimise squared error plus a ridge penalty.

        The penalty on the square of a weight's distance from `toward` is `ridge` times the mean of `xtx`'s diagonal: as
        scaled states have mean square 1, about `ridge` times the number of positions. The bias has none.

        Args:
            ridge: 0 or more.
            toward: what to stay near where the data say little, of the same shape; zero if not given.

        Raises:
            FittingError: the system is singular: too few positions for so small a ridge.
        """
        system = self.xtx.clone()
        diagonal = system.diagonal()[:-1]
        diagonal += ridge * diagonal.mean()
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed:
            raise FittingError(f"{self.count} positions do not determine a fit with ridge={ridge:g}; give more samples "
                               "or a larger ridge")
        if toward is None:
            return torch.cholesky_solve(self.xty, factor)
        return toward + torch.cholesky_solve(self.xty - self.xtx @ toward, factor)

    def error(self, weights: Tensor) -> Tensor:
        """`[M, 2]`: the share of the variance of each layer's keys, and values, that `weights` (as of `solve`) miss.

        That is 1 - R^2: 0 is exact, 1 no better than the mean of these very positions.
        """
        missed = self.yty - 2 * (weights * self.xty).sum(0) + (weights * (self.xtx @ weights)).sum(0)
        spread = self.yty - self.xty[-1].square() / self.xtx[-1, -1]
        missed, spread = (part.view(len(self.layers), 2, -1).sum(-1) for part in (missed, spread))
        return missed.clamp_min(0) / spread.clamp_min(torch.finfo(spread.dtype).tiny)


class LayerFit(NamedTuple):
    """What a fit bought, for one kind of position at one layer.

    Errors are shares of the variance that are missed (`Moments.error`) on held-out prompts: `own` by the layer's own
    projections of the state that reaches it, `fitted` by those fitted on the other prompts. nan where none were held
    out. The plan's projections are then fitted on all.
    """

    kind: Kind
    layer: int
    positions: int
    ridge: float
    own_keys: float
    own_values: float
    fitted_keys: float
    fitted_values: float


def fit(model: nn.Module, plan: PruningPlan, samples: Sequence[Mapping[str, Any]], *, ridge: float | None = None,
        state: str | os.PathLike[str] | None = None, progress: Callable[[range], Iterable[int]] = iter,
        ) -> tuple[PruningPlan, list[LayerFit]]:
    """Fits the keys and values of a plan's skipped positions to those that the full model has, in closed form.

    For each kind of position and layer that it skips: ridge regression from the state that reaches the layer in the
    pruned model, divided by its root mean square, to the keys and values that the full model has there, before key
    norm and rotary. A position that skips a layer has the same state at the next, so layers skipped one after
    another share one factorisation. Where that state depends on other fits (text that reads fitted visual keys), those
    are found first and the pruned model runs with them; otherwise all is gathered in one pass of the full model and at
    most one of the pruned. Kin, with gradient training instead: KV Prediction (arXiv 2410.08391), SwiftKV (2410.03960).

    Where `torch.distributed` is up, each process gives its share of the samples, every kind among them; the moments are
    summed and all get the same plan.

    Args:
        model: a transformers model with its language-model head, in eval mode. It is left as it was.
        plan: which positions skip which layers; its fitted projections, if any, are fitted anew.
        samples: prompts, each the arguments of a forward call as a processor returns them, `[B, T]`, left-padded
            where B is more than 1. Gone through once for each turn of fits, so a sequence, not a generator.
        ridge: its strength (`Moments.solve`); None chooses it from `RIDGES` on held-out prompts, for each kind and
            layer, and takes `FEW` where there are too few to hold one out.
        state: a folder for the moments. A run that was interrupted continues there, and what was gathered serves other
            ridges, more samples after these, fewer layers and other plans with the same states, without another pass.
            Moments of other weights, samples or processes are left alone, or gathered anew.
        progress: goes around the loop over samples, such as `tqdm` or `rich.progress.track`.

    Returns:
        The plan with its fitted projections, on the CPU, in the decoder's dtype: the run rounds them to it anyway.
        Of a model that reads no images it skips text only: all its positions are. And what each fit bought.

    Raises:
        FittingError: no samples, nothing skipped, a kind that no sample has, or a model whose states overflow.
        PlanError: the plan is another model's.
        UnsupportedModel: popvlm does not know the model's decoder.
    """
    family, this_model = family_of(model), fingerprint(model)
    plan.check(this_model)
    kinds: tuple[Kind, ...] = KINDS if family.visual_token_ids(model.config) else ("text",)
    visual = plan.visual if "visual" in kinds else frozenset()
    plan = replace(plan, visual=visual, fitted=None, fingerprint=this_model)
    if not plan.visual | plan.text:
        raise FittingError("the plan skips no layer of this model, so there is nothing to fit; give one that does, "
                           "such as PruningPlan.last(num_layers, 1 / 3)")
    if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
        raise FittingError(f"samples is a {type(samples).__name__}, and a fit may go through them more than once; give "
                           "a list")
    if not len(samples):
        raise FittingError("there are no samples; give at least a few prompts to fit on")
    if ridge is not None and not 0 <= ridge < math.inf:
        raise FittingError(f"ridge is {ridge!r}; give a number from 0 on, such as 1e-3, or None to choose it")
    if model.training:
        raise FittingError("the model is in training mode, in which dropout changes its states; call model.eval() "
                           "first")
    everything = samples if isinstance(samples, Part) else Part(samples, range(len(samples)))
    weights = "" if state is None else identity(model)
    fitted: dict[str, Tensor] = {}
    report = []
    with prefill.under(model, None, family), torch.no_grad():
        waiting = _groups(model, family, plan, samples)
        while waiting:
            # Context positions read others' fitted keys only in a layer that one kind skips and the other does not.
            # (And in an image that Gemma reads both ways, if the tail begins inside it; that is left out here.)
            unknown = [layer for layer in range(plan.num_layers) if 0 < len(plan.skips(layer)) < len(kinds)
                       and any(_names(kind, layer)[0] not in fitted for kind in plan.skips(layer))]
            ready = [group for group in waiting if not unknown or group.layers[0] <= unknown[0]]
            waiting = [group for group in waiting if group not in ready]
            gathered = [_Gathered.begin(group, plan, fitted, everything, weights, state) for group in ready]
            _gather(model, family, _filled(plan, fitted), everything, gathered, progress)
            for group, found in zip(ready, gathered):
                tensors, lines = found.solve(group, ridge, family.text_model(model))
                fitted |= tensors
                report += lines
    source = f"{plan.source or 'given layers'}, KV fitted on {len(samples)} samples"
    return replace(plan, fitted=fitted, source=source), sorted(report)


@dataclass(frozen=True)
class _Group:
    """Layers, one after another, in which a kind of position has one state: they share their factorisation."""

    kind: Kind
    layers: tuple[int, ...]


@dataclass(eq=False)
class _Gathered:
    """The moments of a group, of the prompts that it is fitted on and of those held out, and how far they have come."""

    group: _Group
    fit: Moments
    held: Moments
    seen: list[str]
    """Digests of the samples that were looked at."""
    sides: dict[str, bool]
    """Whether it is held out, by a prompt's images, or by its number where it has none."""
    path: Path | None

    @classmethod
    def begin(cls, group: _Group, plan: PruningPlan, fitted: Mapping[str, Tensor], samples: Part, weights: str,
              folder: str | os.PathLike[str] | None) -> _Gathered:
        """With what the folder has for this group: gathered from the same samples, at least of its layers."""
        model = plan.fingerprint
        assert model is not None
        shape = group.layers, model.hidden_size, 2 * model.num_key_value_heads * model.head_dim
        found = cls(group, Moments.zeros(*shape), Moments.zeros(*shape), [], {}, None)
        if folder is None:
            return found
        # What the state depends on: all that is skipped before it, and how.
        before = [sorted(layer for layer in getattr(plan, kind) if layer < group.layers[0]) for kind in KINDS]
        depends = [asdict(model), weights, group.kind, group.layers[0], plan.tail, before, processes.place()]
        digest = hashlib.sha256(json.dumps(depends).encode())
        for name in sorted(name for name in fitted if int(name.split(".")[1]) < group.layers[0]):
            digest.update(fitted[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.path = Path(folder) / f"{group.kind}.{group.layers[0]}.{digest.hexdigest()[:16]}.safetensors"
        return found._loaded(samples) if found.path.is_file() else found

    def _loaded(self, samples: Part) -> _Gathered:
        assert self.path is not None
        fit, held, about = _kept(self.path)
        seen = about["seen"]
        if (not set(self.group.layers) <= set(fit.layers) or len(seen) > len(samples)
                or any(digest != samples.digest(index) for index, digest in enumerate(seen))):
            return self
        return _Gathered(replace(self.group, layers=fit.layers), fit, held, seen, about["sides"], self.path)

    def save(self) -> None:
        """Writes the file whole or not at all, so that both parts are of the same prompts."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{part}.{name}": getattr(getattr(self, part), name).contiguous().cpu()
                   for part in ("fit", "held") for name in ("xtx", "xty", "yty")}
        about = {"layers": list(self.group.layers), "prompts": [self.fit.prompts, self.held.prompts],
                 "seen": self.seen, "sides": self.sides}
        with replacing(self.path) as temporary:
            save_file(tensors, temporary, {name: json.dumps(value) for name, value in about.items()})

    def add(self, images: str, x: Tensor, y: Tensor) -> None:
        """Adds a prompt to the one part or the other: of each `HELD_OUT` one is held out, drawn at random, as samples
        may have a rhythm; but with the images of an earlier prompt it goes where that went."""
        number = len(self.sides)
        turn, place = divmod(number, HELD_OUT)
        held = self.sides.setdefault(images or str(number), place == random.Random(turn).randrange(HELD_OUT))
        (self.held if held else self.fit).update(x, y)

    def solve(self, wanted: _Group, ridge: float | None, decoder: Any) -> tuple[dict[str, Tensor], list[LayerFit]]:
        """The fitted tensors of `wanted`, whose layers the moments cover, and what they bought."""
        layers = wanted.layers
        fit, held = (_reduced(part, decoder.device).only(layers) for part in (self.fit, self.held))
        # On the accelerator if either is: the other may be loaded, or have had no prompt.
        device = fit.xtx.device if fit.xtx.device.type != "cpu" else held.xtx.device
        fit, held = fit.to(device), held.to(device)
        # The layers' own projections are nearly right, so what is fitted is the difference: on SmolLM2-135M with 8
        # prompts a KL of 0.136, where a penalty on the weights themselves gives 0.231.
        own = torch.cat([own_projections(decoder.layers[layer], decoder.dtype, held.xtx) for layer in layers], dim=1)
        enough = fit.prompts and held.prompts
        ridges = (ridge,) if ridge is not None else RIDGES if enough else (FEW,)
        own_missed = torch.full((len(layers), 2), math.nan)
        missed = own_missed.expand(len(ridges), -1, -1)
        if enough:
            own_missed, missed = held.error(own), torch.stack([held.error(fit.solve(each, own)) for each in ridges])
        # A ridge for each layer: it costs no pass, and the first layer of a run, whose own projections may be exact,
        # bears far less of it than the last.
        chosen = missed.mean(2).argmin(0).tolist()
        both, outputs = fit + held, own.shape[1] // len(layers)
        tensors, report = {}, []
        for choice, each in enumerate(ridges):
            rows = [row for row in range(len(layers)) if chosen[row] == choice]
            if not rows:
                continue
            near = own.view(len(own), len(layers), outputs)[:, rows].flatten(1)
            made = both.only(layers[row] for row in rows).solve(each, near).to(decoder.dtype).cpu()
            for row, projection in zip(rows, made.chunk(len(rows), dim=1)):
                weight, bias = _names(wanted.kind, layers[row])
                tensors[weight], tensors[bias] = projection[:-1].T.contiguous(), projection[-1].clone()
                report.append(LayerFit(wanted.kind, layers[row], both.count, each, *own_missed[row].tolist(),
                                       *missed[choice, row].tolist()))
        return tensors, report


def kept_moments(path: Path) -> tuple[Moments, Moments]:
    """What `fit` left in a file of its `state` folder: the moments of the prompts fitted on and of those held out.

    Raises:
        FittingError: the file is damaged.
    """
    return _kept(path)[:2]


def _kept(path: Path) -> tuple[Moments, Moments, dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            about = {name: json.loads(value) for name, value in file.metadata().items()}
            # Cloned: as they lie in the file they may be unaligned, and a product's last bits then differ.
            fit, held = (Moments(tuple(about["layers"]), prompts=prompts, **{
                name: file.get_tensor(f"{part}.{name}").clone() for name in ("xtx", "xty", "yty")})
                         for part, prompts in zip(("fit", "held"), about["prompts"]))
            return fit, held, {"seen": list(about["seen"]), "sides": dict(about["sides"])}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FittingError(f"the moments in {path} are damaged ({error}); delete that file, and they are gathered "
                           "again") from error


def _names(kind: Kind, layer: int) -> tuple[str, str]:
    return f"{kind}.{layer}.weight", f"{kind}.{layer}.bias"


def _filled(plan: PruningPlan, fitted: Mapping[str, Tensor]) -> PruningPlan:
    """The plan with the fits found so far, and zeros for keys and values that no context position will read."""
    model = plan.fingerprint
    assert model is not None
    outputs = 2 * model.num_key_value_heads * model.head_dim
    filled = {}
    for kind in KINDS:
        for layer in getattr(plan, kind):
            for name, shape in zip(_names(kind, layer), ((outputs, model.hidden_size), (outputs,))):
                filled[name] = fitted.get(name, torch.zeros(()).expand(shape))
    return replace(plan, fitted=filled)


def _groups(model: nn.Module, family: Family, plan: PruningPlan, samples: Sequence[Mapping[str, Any]]) -> list[_Group]:
    """The groups of each kind, in the order of their first layers.

    Found by looking, on the first sample that has the kind: between two skipped layers a model may still add to the
    states, as Qwen3-VL adds image features to its first ones (DeepStack).
    """
    filled = _filled(plan, {})
    prefill.prune(model, filled, family)
    groups = []
    for kind in KINDS:
        layers = getattr(plan, kind)
        if not layers:
            continue
        for index in range(len(samples)):
            call = _call(model, samples[index])
            mask = _context(model, call)[kind]
            if mask.any():
                break
        else:
            fix = "with images" if kind == "visual" else "with text, longer than the tail"
            raise FittingError(f"{kind} positions skip layers {sorted(layers)} and no sample has {kind} context "
                               f"positions; give some {fix}, or a plan with {kind}=()")
        groups += [_Group(kind, tuple(run)) for run in _runs(model, family, call, mask, layers)]
    return sorted(groups, key=lambda group: (group.layers[0], group.kind))


def _runs(model: nn.Module, family: Family, call: dict[str, Any], mask: Tensor, layers: frozenset[int],
          ) -> list[list[int]]:
    runs: list[list[int]] = []
    last: Tensor | None = None

    def see(layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal last
        states = args[0][mask.to(args[0].device)]
        if last is not None and runs[-1][-1] == layer - 1 and torch.equal(states, last.to(states.device)):
            runs[-1].append(layer)
        else:
            runs.append([layer])
        last = states

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(family.text_model(model).layers[layer].register_forward_pre_hook(partial(see, layer)))
        model(**call)
    return runs


def _gather(model: nn.Module, family: Family, plan: PruningPlan, samples: Part,
            gathered: list[_Gathered], progress: Callable[[range], Iterable[int]]) -> None:
    """Brings the groups' moments to the end of the samples. `plan` has the fits that their states depend on."""
    prefill.prune(model, plan, family)
    saved = time.monotonic()
    for index in progress(range(min(len(found.seen) for found in gathered), len(samples))):
        call = _call(model, samples[index])
        masks = _context(model, call)
        behind = [found for found in gathered if len(found.seen) <= index]
        present = [found for found in behind if masks[found.group.kind].any()]
        seen = _observe(model, family, plan, call, masks, [found.group for found in present])
        for found, (x, y) in zip(present, seen):
            if not (x.isfinite().all() and y.isfinite().all()):
                raise FittingError(f"sample {index} has states, keys or values that are no finite numbers at the "
                                   f"{found.group.kind} positions of layers {list(found.group.layers)}; load the model "
                                   "in bfloat16 or float32, or leave that sample out")
        for found, (x, y) in zip(present, seen):
            found.add(samples.images(index), x, y)
        for found in behind:
            found.seen.append(samples.digest(index))
        if index + 1 == len(samples) or time.monotonic() - saved > SAVE_SECONDS:
            for found in behind:
                found.save()
            saved = time.monotonic()


def _call(model: Any, sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as `generate` calls the model with it."""
    return placed(model, sample) | {"logits_to_keep": 1, "use_cache": False}


def _context(model: nn.Module, call: dict[str, Any]) -> dict[Kind, Tensor]:
    """The masks `[B, T]` of the context positions of each kind, without padding, under the plan on the model."""
    replacement = prefill.pruned(model)
    assert replacement is not None
    tokens = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    batch, length = tokens.shape[:2]
    real = torch.zeros(batch, length, dtype=torch.bool, device=tokens.device)
    visual = None
    if length > replacement.plan.tail:
        positions = replacement.positions(call)
        if positions is None or not isinstance(positions.answers, int):
            raise FittingError("the model cannot serve these samples pruned (it has warned why), so there is nothing "
                               "to fit; mend that first, and give samples without labels")
        real[:, :-positions.answers] = True
        visual = positions.visual
    if call.get("attention_mask") is not None:
        real &= call["attention_mask"][:, -length:].bool()
    if visual is None:
        visual = torch.zeros_like(real)
    return {"visual": real & visual, "text": real & ~visual}


def _observe(model: nn.Module, family: Family, plan: PruningPlan, call: dict[str, Any], masks: dict[Kind, Tensor],
             groups: list[_Group]) -> list[tuple[Tensor, Tensor]]:
    """For each group, scaled states `[N, D]` of the pruned model, and keys and values `[N, M 2GK]` of the full one."""
    layers = family.text_model(model).layers
    states: dict[_Group, Tensor] = {}
    made: dict[tuple[_Group, int, str], Tensor] = {}

    def state(group: _Group, module: nn.Module, args: tuple[Any, ...]) -> None:
        states[group] = prefill.scaled(args[0][masks[group.kind].to(args[0].device)])

    def output(key: tuple[_Group, int, str], module: nn.Module, args: Any, output: Tensor) -> None:
        made[key] = output[masks[key[0].kind].to(output.device)]

    def watch(hooks: ExitStack, some: list[_Group]) -> None:
        for group in some:
            hooks.enter_context(layers[group.layers[0]].register_forward_pre_hook(partial(state, group)))

    # Where nothing is skipped before, the state is the full model's.
    changed = [group for group in groups if min(plan.visual | plan.text) < group.layers[0]]
    if changed:
        with ExitStack() as hooks:
            watch(hooks, changed)
            model(**call)
    replacement = prefill.pruned(model)
    assert replacement is not None
    if groups:
        with ExitStack() as hooks, prefill.full(replacement):
            watch(hooks, [group for group in groups if group not in changed])
            for group in groups:
                for layer in group.layers:
                    for name in "k_proj", "v_proj":
                        projection = getattr(layers[layer].self_attn, name)
                        hooks.enter_context(projection.register_forward_hook(partial(output, (group, layer, name))))
            model(**call)
    return [(states[group], torch.cat([made[group, layer, name].to(states[group].device) for layer in group.layers
                                       for name in ("k_proj", "v_proj")], dim=-1)) for group in groups]


def own_projections(layer: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    """A layer's own projections of a scaled state, as weights `[D + 1, 2GK]` of the form that `solve` gives.

    Asked of the modules, as their weights may be quantized, sharded or adapted: a norm without a mean and a linear map
    are linear in the scaled state, so what they make of each axis, both ways, says it all.
    """
    width = like.shape[0] - 1
    device = next(layer.input_layernorm.parameters()).device
    axes = torch.eye(width, dtype=dtype, device=like.device if device.type == "meta" else device) * width ** 0.5
    normed = layer.input_layernorm(torch.stack((axes, -axes)))
    made = [getattr(layer.self_attn, name)(normed).to(like.device).double() for name in ("k_proj", "v_proj")]
    ahead, back = torch.cat(made, dim=-1)
    return torch.cat(((ahead - back) / (2 * width ** 0.5), ((ahead + back) / 2).mean(0, keepdim=True)))


def _reduced(moments: Moments, device: torch.device) -> Moments:
    """The sum of all processes' moments, where there are several."""
    if processes.place()[1] == 1:
        return moments
    prompts = torch.tensor(moments.prompts, dtype=torch.float64)
    xtx, xty, yty, prompts = (part.to(device, copy=True) for part in (moments.xtx, moments.xty, moments.yty, prompts))
    for part in xtx, xty, yty, prompts:
        torch.distributed.all_reduce(part)
    return Moments(moments.layers, xtx, xty, yty, round(prompts.item()))
