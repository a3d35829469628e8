"""PruningPlan: which context positions skip which decoder layers, and where their keys and values come from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Kind = Literal["visual", "text"]
KINDS: tuple[Kind, ...] = ("visual", "text")
FORMAT = 1


class PlanError(ValueError):
    """A plan, or its file, that cannot be used; the message names the fix."""


@dataclass(frozen=True)
class Fingerprint:
    """The model that a plan was made for. `checkpoint` is a name to read; it decides nothing."""

    family: str
    num_layers: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int
    checkpoint: str = ""

    def differences(self, other: Fingerprint) -> list[str]:
        """What makes `other` another architecture, in words; empty where a plan for one serves the other."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {ours[name]}, not {theirs[name]}" for name in ours
                if name != "checkpoint" and ours[name] != theirs[name]]


@dataclass(frozen=True, eq=False, repr=False)
class PruningPlan:
    """Which kinds of context position skip each decoder layer in prefill (POP, arXiv 2602.03295, section 3).

    Args:
        num_layers: decoder layers `L` of the model.
        visual: layers that visual context positions (image and video tokens) skip.
        text: layers that text context positions skip.
        tail: the prompt's last `tail` positions run in full; 1 is the paper's boundary handling.
        fitted: fitted KV projections, or None for the layers' own. For each kind and each layer that it skips, a
            `"{kind}.{layer}.weight"` of shape `[2GK, D]` and a `"{kind}.{layer}.bias"` of shape `[2GK]`: from the
            state that reaches the layer, divided by its root mean square, to the `GK` keys and then the `GK` values,
            before key norm and rotary. Active positions and every decode step use the layer's own weights.
        fingerprint: the model that it was made for, if known. Not compared.
        source: where the plan came from, in words. Not compared.

    Raises:
        PlanError: a layer out of range, a tail below 1, or a skipped layer without its fitted tensors.
    """

    num_layers: int
    visual: frozenset[int] = frozenset()
    text: frozenset[int] = frozenset()
    tail: int = 1
    fitted: Mapping[str, Tensor] | None = None
    fingerprint: Fingerprint | None = None
    source: str = field(default="")

    def __post_init__(self) -> None:
        if not _is_int(self.num_layers) or self.num_layers < 1:
            raise PlanError(f"num_layers is {self.num_layers!r}; give the model's number of decoder layers, at least 1")
        if not isinstance(self.fingerprint, (Fingerprint, type(None))):
            raise PlanError(f"fingerprint is {self.fingerprint!r}; give a Fingerprint, or leave it out: accelerate "
                            "fills it in")
        for kind in KINDS:
            object.__setattr__(self, kind, _layer_set(getattr(self, kind), kind, self.num_layers))
        if not _is_int(self.tail) or self.tail < 1:
            raise PlanError(f"tail is {self.tail!r}; the last prompt position must run in full, so give 1 or more")
        if self.fitted is not None:
            if not isinstance(self.fitted, Mapping):
                raise PlanError(f"fitted is a {type(self.fitted).__name__}; give a mapping from names to tensors")
            object.__setattr__(self, "fitted", dict(self.fitted))
            _check_fitted(self)

    @classmethod
    def last(cls, num_layers: int, ratio: float, tail: int = 1) -> PruningPlan:
        """The last `ratio` of the layers, to the nearest whole layer, for both kinds (the paper's fixed recipe).

        At least one layer stays, so a ratio just below 1 leaves the first.
        """
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
            raise PlanError(f"ratio is {ratio!r}; give the share of layers that prefill skips, 0 or more and below 1")
        count = min(int(ratio * num_layers + 0.5), num_layers - 1)
        layers = frozenset(range(num_layers - count, num_layers))
        return cls(num_layers, layers, layers, tail, source=f"last {ratio:.3g} of the layers")

    @classmethod
    def lossless(cls, num_layers: int) -> PruningPlan:
        """Only the last layer, whose output at a context position nobody reads: the full model's logits."""
        layers = frozenset({num_layers - 1})
        return cls(num_layers, layers, layers, source="lossless")

    @classmethod
    def from_layers(cls, num_layers: int, layers: Iterable[int], tail: int = 1) -> PruningPlan:
        """Any set of layers, skipped by visual and text context positions alike."""
        layers = _layer_set(layers, "layers", num_layers)
        return cls(num_layers, layers, layers, tail, source="given layers")

    @property
    def kv(self) -> Literal["own", "fitted"]:
        """How skipped positions get their keys and values."""
        return "own" if self.fitted is None else "fitted"

    def skips(self, layer: int) -> frozenset[Kind]:
        """The kinds of context position that skip `layer`."""
        return frozenset(kind for kind in KINDS if layer in getattr(self, kind))

    def check(self, model: Fingerprint) -> None:
        """Whether the plan fits a model.

        Raises:
            PlanError: the plan is another model's; the message says how they differ.
        """
        if self.num_layers != model.num_layers:
            raise PlanError(f"the plan is for {self.num_layers} decoder layers and this model has {model.num_layers}; "
                            f"make one with num_layers={model.num_layers}")
        if self.fingerprint and (wrong := self.fingerprint.differences(model)):
            raise PlanError(f"the plan was made for another model ({self.fingerprint.checkpoint or 'unnamed'}: "
                            f"{', '.join(wrong)}); make one for this model")
        shape = [2 * model.num_key_value_heads * model.head_dim, model.hidden_size]
        for name, tensor in (self.fitted or {}).items():
            if name.endswith(".weight") and list(tensor.shape) != shape:
                raise PlanError(f"the plan's {name} has shape {list(tensor.shape)} and this model needs {shape}; "
                                "fit the plan on this model")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; fitted projections go beside it, into a file of its name and `.safetensors`.

        Makes the folder if there is none. Each file appears whole or not at all.

        Raises:
            PlanError: there is a folder at `path`.
        """
        path = Path(path)
        if path.is_dir():
            raise PlanError(f"{path} is a folder; give the path of a file, such as {path / 'plan.json'}")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.safetensors")
        record: dict[str, Any] = {
            "format": FORMAT,
            "num_layers": self.num_layers,
            "visual": sorted(self.visual),
            "text": sorted(self.text),
            "tail": self.tail,
            "kv": self.kv,
            "fingerprint": asdict(self.fingerprint) if self.fingerprint else None,
            "source": self.source,
        }
        if self.fitted is not None:
            tensors = {name: tensor.contiguous().cpu() for name, tensor in self.fitted.items()}
            with replacing(beside) as temporary:
                save_file(tensors, temporary)
            record |= {"fitted_file": beside.name, "fitted_sha256": _sha256(beside)}
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(record, indent=1) + "\n")
        if self.fitted is None:
            beside.unlink(missing_ok=True)  # of the plan that was here

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PruningPlan:
        """Reads a plan that `save` wrote.

        Raises:
            PlanError: the file is missing, damaged or of a newer format, or its fitted projections are.
        """
        path = Path(path)
        try:
            record = json.loads(path.read_text())
        except OSError as error:
            raise PlanError(f"there is no plan to read at {path} ({error.strerror}); give the path of one that "
                            "PruningPlan.save wrote (to accelerate also 'lossless' or 'last-third')") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a plan: it is damaged or not JSON ({error}); save it again") from error
        if not isinstance(record, dict) or not _is_int(record.get("format")):
            raise PlanError(f"{path} is JSON but not a plan: it has no format version; save it again")
        if record["format"] > FORMAT:
            raise PlanError(f"{path} has plan format {record['format']} and this popvlm reads up to {FORMAT}; "
                            "upgrade popvlm")
        try:
            fingerprint = Fingerprint(**record["fingerprint"]) if record["fingerprint"] else None
            plan = {name: record[name] for name in ("num_layers", "visual", "text", "tail", "source")}
            if record["kv"] not in ("own", "fitted"):
                raise PlanError(f"its kv is {record['kv']!r}, and it must be 'own' or 'fitted'; save it again")
            fitted = _load_fitted(path, record) if record["kv"] == "fitted" else None
            return cls(**plan, fitted=fitted, fingerprint=fingerprint)
        except PlanError as error:
            raise PlanError(f"{path} is not a usable plan: {error}") from error
        except (KeyError, TypeError) as error:
            raise PlanError(f"{path} is a damaged plan ({error}); save it again") from error

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PruningPlan):
            return NotImplemented
        if self._structure() != other._structure():
            return False
        ours, theirs = self.fitted or {}, other.fitted or {}
        return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name].to(ours[name].device))
                                                    for name in ours)

    def __hash__(self) -> int:
        return hash(self._structure())

    def _structure(self) -> tuple[Any, ...]:
        return self.num_layers, self.visual, self.text, self.tail, self.kv

    def __repr__(self) -> str:
        if self.visual == self.text:
            skipped = f"context skips {_ranges(self.visual, self.num_layers)}"
        else:
            skipped = (f"visual skips {_ranges(self.visual, self.num_layers)}, "
                       f"text skips {_ranges(self.text, self.num_layers)}")
        return f"PruningPlan({self.num_layers} layers: {skipped}; {self.kv} KV; tail {self.tail})"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _layer_set(layers: Iterable[int], name: str, num_layers: int) -> frozenset[int]:
    try:
        found = frozenset(layers)
    except TypeError as error:
        raise PlanError(f"{name} is {layers!r}; give a set of layer indices") from error
    if odd := [layer for layer in found if not _is_int(layer)]:
        raise PlanError(f"{name} has {odd[0]!r}, which is no layer index; give whole numbers from 0 to "
                        f"{num_layers - 1}")
    if wrong := sorted(layer for layer in found if not 0 <= layer < num_layers):
        raise PlanError(f"{name} names layers {wrong}, and the model has layers 0 to {num_layers - 1}; "
                        "leave those out")
    return found


def _check_fitted(plan: PruningPlan) -> None:
    assert plan.fitted is not None
    wanted: set[str] = set()
    for kind in KINDS:
        for layer in getattr(plan, kind):
            names = f"{kind}.{layer}.weight", f"{kind}.{layer}.bias"
            wanted.update(names)
            if missing := [name for name in names if name not in plan.fitted]:
                raise PlanError(f"{kind} positions skip layer {layer} and the fitted projections have no {missing[0]}; "
                                "fit that layer too, or leave it out")
            weight, bias = (plan.fitted[name] for name in names)
            if not (isinstance(weight, Tensor) and isinstance(bias, Tensor)):
                raise PlanError(f"{names[0]} and its bias must be tensors; give torch tensors")
            if weight.ndim != 2 or bias.shape != weight.shape[:1] or len(bias) % 2:
                raise PlanError(f"{names[0]} has shape {list(weight.shape)} and its bias {list(bias.shape)}; "
                                "they must be [2GK, D] and [2GK]")
            if not (weight.isfinite().all() and bias.isfinite().all()):
                raise PlanError(f"{names[0]} or its bias has values that are no finite numbers; fit it again")
    if extra := sorted(plan.fitted.keys() - wanted):
        raise PlanError(f"the fitted projections have {extra[0]}, and no such position skips that layer; leave it out")


def _load_fitted(path: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    beside = path.with_name(Path(record["fitted_file"]).name)
    if not beside.is_file():
        raise PlanError(f"its fitted projections {beside.name} are not beside it; put them there")
    if _sha256(beside) != record["fitted_sha256"]:
        raise PlanError(f"its fitted projections {beside.name} are damaged or another plan's; copy both files again")
    try:
        return load_file(beside)
    except SafetensorError as error:
        raise PlanError(f"its fitted projections {beside.name} cannot be read ({error}); save it again") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


class replacing:
    """A path to write to, which takes the place of `path` if the block ends well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


def _ranges(layers: frozenset[int], num_layers: int) -> str:
    """`{18, 19, 20, 25}` of 36 as `18-20,25 (11 %)`."""
    if not layers:
        return "none"
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    named = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{named} ({len(layers) / num_layers:.0%})".replace("%)", " %)")
