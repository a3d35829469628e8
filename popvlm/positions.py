"""The positions of one forward call: which are active at a layer, and how to take them and put them back."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from popvlm.plan import KINDS, Kind, PruningPlan

Kept = dict[tuple[Kind, int], Tensor]
"""What is made of the states of skipped positions of a kind, from a position on."""

Index = tuple[Tensor, Tensor] | tuple[slice, slice]


class Suffix:
    """The last `count` positions of every sample: views, no gather."""

    def __init__(self, count: int) -> None:
        self.count = count

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The active part of `x` along its position dimension."""
        return x.narrow(dim, x.shape[dim] - self.count, self.count)

    def context(self, x: Tensor) -> Tensor:
        """The part of `x` `[B, T, ...]` for which a layer must make keys and values: the positions before."""
        return x[:, :-self.count]

    def splice(self, context: Tensor, active: Tensor) -> Tensor:
        """Keys or values `[B, G, T, K]` of all positions, from those of `context` and of the active positions."""
        return torch.cat((context, active), dim=2)

    def put(self, hidden: Tensor, active: Tensor) -> None:
        """Writes the active positions' states `[B, A, D]` into `hidden` `[B, T, D]`."""
        hidden[:, -self.count:] = active

    def index(self, length: int, device: torch.device) -> Tensor:
        """The active positions as indices, `[1, A]`."""
        return torch.arange(length - self.count, length, device=device)[None]


class Gather:
    """Any positions, each sample its own.

    Args:
        index: `[B, A]`, no position twice in a sample.
        valid: `[B, A]`: where a sample has fewer active positions than another, its row is filled up with others, which
            run through the layer too and leave nothing behind. So no sample's answer depends on who shares its batch.
            None where every entry is active.
    """

    def __init__(self, index: Tensor, valid: Tensor | None) -> None:
        self._index, self._valid = index, valid
        self.count = index.shape[1]

    def _pairs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._index.device != device:
            self._index = self._index.to(device)
            self._valid = None if self._valid is None else self._valid.to(device)
        return torch.arange(self._index.shape[0], device=device)[:, None], self._index

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        samples, index = self._pairs(x.device)
        x = x.expand(index.shape[0], *x.shape[1:])  # masks and rotary may be shared by the batch
        return x.movedim(dim, 1)[samples, index].movedim(1, dim)

    def context(self, x: Tensor) -> Tensor:
        # All of it: the context lies between the active positions, and to gather it would copy the prompt's states.
        return x

    def splice(self, context: Tensor, active: Tensor) -> Tensor:
        if context.requires_grad:  # what made it may need it as it is, to go backward
            context = context.clone()
        self.put(context.transpose(1, 2), active.transpose(1, 2))
        return context

    def put(self, hidden: Tensor, active: Tensor) -> None:
        pairs = self._pairs(hidden.device)
        if self._valid is not None:
            valid = self._valid.view(*self._valid.shape, *[1] * (active.ndim - 2))
            active = torch.where(valid, active, hidden[pairs])
        hidden[pairs] = active

    def index(self, length: int, device: torch.device) -> Tensor:
        return self._pairs(device)[1]


class Positions:
    """The answer, visual and text positions of one forward call of `B` samples and `T` positions.

    Args:
        plan: the plan that the call runs under; only its own layers heed these positions.
        shape: `(B, T)`.
        answers: the answer positions: the last `answers` of each sample, or a mask `[B, T]`. The last position is
            always one.
        visual: mask `[B, T]` of image and video tokens; None where there are none or no layer asks.
        in_place: whether a pruned layer may write into a tensor that the pruned layer before it made.
        most: with a mask, the most answer positions that a sample has, where that is known without asking the device.
    """

    def __init__(self, plan: PruningPlan, shape: tuple[int, int], answers: int | Tensor, visual: Tensor | None,
                 in_place: bool, most: int | None = None) -> None:
        self.plan = plan
        self.shape = shape
        self.answers = answers
        self.visual = visual
        self.in_place = in_place
        self.owned: Tensor | None = None
        """The hidden states that the last pruned layer made, if nobody else can hold them."""
        self._version: int | None = None
        self._kept: Kept = {}
        self._most = most
        self._selections: dict[frozenset[Kind], Suffix | Gather | None] = {}
        self._rows: dict[frozenset[Kind], tuple[Any, Any]] = {}
        self._context: dict[tuple[Kind, int], Index] = {}

    def own(self, hidden: Tensor, skipping: frozenset[Kind]) -> None:
        """Takes the states that a pruned layer made, in which positions of the kinds `skipping` are as they were."""
        self.owned = hidden if self.in_place else None
        # Tensors made in inference mode do not count what is written into them.
        self._version = None if self.owned is None or hidden.is_inference() else hidden._version
        self._kept = {key: made for key, made in self._kept.items() if key[0] in skipping}

    def kept(self, hidden: Tensor) -> Kept:
        """What the pruned layers before made of skipped positions' states, while these are as they were.

        Qwen3-VL adds image features to the states between its first layers (DeepStack), in place in transformers 4.
        """
        if hidden is not self.owned or self._version is None or hidden._version != self._version:
            self._kept = {}
        return self._kept

    def active(self, skipping: frozenset[Kind]) -> Suffix | Gather | None:
        """The active positions of a layer that `skipping` kinds of context skip; None where that is all of them."""
        if skipping not in self._selections:
            self._selections[skipping] = self._select(skipping)
        return self._selections[skipping]

    def _select(self, skipping: frozenset[Kind]) -> Suffix | Gather | None:
        length = self.shape[1]
        if len(skipping) == len(KINDS) or (self.visual is None and "text" in skipping):
            if isinstance(self.answers, int):
                return Suffix(self.answers)
            active, most = self.answers, self._most
        elif self.visual is None:  # only visual positions skip, and there are none
            return None
        else:
            active, most = self._answer_mask | (self.visual if "text" in skipping else ~self.visual), None
        counts = active.sum(1, keepdim=True)
        fewest = 0
        if most is None:
            # A question to the device: `prepare` has it asked before the model runs, when there is nothing to wait for.
            fewest, most = torch.stack(counts.aminmax()).tolist()
            if fewest == length:
                return None
        index = (~active).int().argsort(dim=1, stable=True)[:, :most]  # the active ones first, in order
        valid = None if fewest == most else torch.arange(most, device=index.device) < counts
        return Gather(index, valid)

    @cached_property
    def _answer_mask(self) -> Tensor:
        if isinstance(self.answers, Tensor):
            return self.answers
        assert self.visual is not None
        return (torch.arange(self.shape[1], device=self.visual.device) >= self.shape[1] - self.answers)[None]

    def prepare(self, skipped: set[tuple[frozenset[Kind], int | None]]) -> None:
        """Asks the device what the layers will need, before the model gives it other work.

        Args:
            skipped: the kinds that skip a layer, and its sliding window, of all layers.
        """
        for skipping, window in skipped:
            active = self.active(skipping)
            if active is not None and self.plan.fitted is not None and self.visual is not None:
                for kind in skipping:
                    self.context(kind, self.visual.device, self.first_seen(active, window))

    def first_seen(self, active: Suffix | Gather, window: int | None) -> int:
        """The first position whose keys an active query, or a later token, sees in a layer with a sliding window."""
        if window is None or isinstance(active, Gather):
            return 0
        return max(0, self.shape[1] - active.count - window + 1)

    def context(self, kind: Kind, device: torch.device, start: int = 0) -> Index:
        """The context positions of a kind from `start` on, counted from there, as an index `(samples, positions)`.

        Slices, which copy nothing, where a single sample has them side by side: one image, say.
        """
        found = self._context.get((kind, start))
        if found is None:
            mask = self.visual if kind == "visual" else None if self.visual is None else ~self.visual
            if mask is None:
                assert isinstance(self.answers, Tensor)
                mask = torch.ones_like(self.answers)
            samples, places = (mask & ~self._answer_mask)[:, start:].nonzero(as_tuple=True)
            found = samples, places
            if self.shape[0] == 1 and len(places):
                first, last = places[[0, -1]].tolist()
                if last - first + 1 == len(places):
                    found = slice(None), slice(first, last + 1)
        if isinstance(found[0], Tensor) and found[0].device != device:
            found = found[0].to(device), found[1].to(device)
        self._context[kind, start] = found
        return found

    def mask_rows(self, mask: Any, skipping: frozenset[Kind], device: torch.device) -> Any:
        """The rows of an attention mask that belong to the active queries of a layer.

        Args:
            mask: as the model hands it to the layer: `[B or 1, 1, T, S + T]`, added or boolean (eager, sdpa), a
                `BlockMask` (flex), `[B, S + T]` (flash attention: padding only), or None, which to sdpa means
                causal, from the first column on.
            skipping: the kinds of context that skip the layer.
            device: the layer's.
        """
        source, rows = self._rows.get(skipping, (self, None))
        if source is not mask:  # the layers of a kind share their mask
            selection = self.active(skipping)
            assert selection is not None
            if mask is None:
                rows = _causal_rows(selection, self.shape[1], device)
            elif isinstance(mask, Tensor):
                rows = mask if mask.ndim == 2 or mask.shape[2] == 1 else selection.take(mask, dim=2)
            else:
                rows = _block_mask_rows(mask, selection, self.shape)
            self._rows[skipping] = mask, rows
        # A mask comes on the layer's device; the rows made for None may be from a layer on another.
        return rows.to(device) if mask is None and rows is not None else rows


def _causal_rows(selection: Suffix | Gather, length: int, device: torch.device) -> Tensor | None:
    """What None means to sdpa for the active queries: `[B or 1, 1, A, T]`, or None where they see everything."""
    if isinstance(selection, Suffix) and selection.count == 1:
        return None
    return torch.arange(length, device=device) <= selection.index(length, device)[:, None, :, None]


def _block_mask_rows(mask: Any, selection: Suffix | Gather, shape: tuple[int, int]) -> Any:
    device = mask.kv_num_blocks.device
    index = selection.index(shape[1], device)
    index = index.expand(shape[0], -1)

    def rows(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.mask_mod(sample, head, index[sample, query], key)

    return create_block_mask(rows, shape[0], None, selection.count, mask.seq_lengths[1], device=device)
