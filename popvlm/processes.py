"""The processes that share a calibration, where `torch.distributed` is up; elsewhere there is one."""

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def place() -> tuple[int, int]:
    """This process's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: Value) -> list[Value]:
    """What each process gives, in their order, for all of them."""
    _, world = place()
    if world == 1:
        return [value]
    every: list[Value] = [value] * world
    dist.all_gather_object(every, value)
    return every
