"""Many questions about one image in one sequence: the image is read once, and no question sees another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100


@dataclass
class Packed:
    """`B` sequences of up to `T` tokens: a shared prefix (the image), then branches (a question and its answer each).

    `tokens`, `branch` and `offset` are `[B, T]`: the token, the branch it belongs to (0 the prefix, -1 padding), and
    its place as if its branch stood alone behind the prefix. `targets` is the token to predict at a position, `IGNORED`
    but where that is a word of an answer; `early` an answer's first token, where a question has named what it asks for;
    `ahead` the same at all the tokens between a question and its answer.
    `mask` `[B, 1, T, T]` is True where a query may look.
    """

    tokens: Tensor
    branch: Tensor
    offset: Tensor
    targets: Tensor
    early: Tensor
    ahead: Tensor
    mask: Tensor


Branch = tuple[list[int], list[int], list[int], int]
"""Tokens of a question, of what is between it and its answer, and of the answer; and how many of the question's tell
what it asks for, 0 where that cannot be said."""


def pack(prefixes: list[list[int]], branches: list[list[Branch]], pad: int) -> Packed:
    """Packs each prefix with its branches."""
    length = max(len(prefix) + sum(sum(map(len, branch[:3])) for branch in asked)
                 for prefix, asked in zip(prefixes, branches))
    shape = len(prefixes), length
    tokens, branch = torch.full(shape, pad), torch.full(shape, -1)
    offset, (targets, early, ahead) = torch.zeros(shape, dtype=torch.long), torch.full((3, *shape), IGNORED)
    for row, (prefix, asked) in enumerate(zip(prefixes, branches)):
        at = len(prefix)
        tokens[row, :at], branch[row, :at], offset[row, :at] = torch.tensor(prefix), 0, torch.arange(at)
        for number, (question, after, answer, telling) in enumerate(asked, 1):
            begin = at + len(question) + len(after)
            end = begin + len(answer)
            tokens[row, at:end], branch[row, at:end] = torch.tensor(question + after + answer), number
            offset[row, at:end] = torch.arange(len(prefix), len(prefix) + end - at)
            targets[row, begin - 1:end - 1] = torch.tensor(answer)
            ahead[row, at + len(question) - 1:begin - 1] = answer[0]
            if telling:
                early[row, at + telling - 1] = answer[0]
            at = end
    queries, keys = branch[:, :, None], branch[:, None, :]
    mask = ((keys == 0) | (queries == keys)) & torch.ones(length, length, dtype=torch.bool).tril()
    return Packed(tokens, branch, offset, targets, early, ahead, mask[:, None])


def right(packed: Packed, predicted: Tensor) -> list[list[bool]]:
    """For each sequence and branch, whether greedy decoding would write the whole answer, stop token included.

    `predicted` holds the likeliest token at each position with a target, in order. An answer that is right under
    teacher forcing at each of its tokens is the one that greedy decoding writes, and the other way round.
    """
    wanted = packed.targets != IGNORED
    hit = torch.ones_like(wanted)
    hit[wanted] = predicted == packed.targets[wanted]
    return [[bool(hit[branch == number].all()) for number in range(1, int(branch.max()) + 1)]
            for hit, branch in zip(hit, packed.branch)]
