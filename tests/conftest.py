"""What all tests share: one seed, few threads, and models built once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import popvlm
from models import build

torch.set_num_threads(1)  # a process a core
_built = cache(build)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """Builds a family's model, or hands out the one built before, without a plan."""
    used = []

    def made(family: str, attention: str = "sdpa", seed: int = 0) -> Any:
        used.append(_built(family, attention, seed))
        return used[-1]

    yield made
    for model in used:
        popvlm.restore(model)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Away from the plans that this machine's user has calibrated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POPVLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
