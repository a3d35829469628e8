"""popvlm: vision-language models that answer sooner, by Prefill-Only Pruning (arXiv 2602.03295)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popvlm.api import ProcessorError, accelerate, full_prefill, plan_of, restore
    from popvlm.decoders import UnsupportedModel
    from popvlm.plan import PlanError, PruningPlan

__version__ = "0.1.0"
__all__ = ["PlanError", "ProcessorError", "PruningPlan", "UnsupportedModel", "accelerate", "full_prefill", "plan_of",
           "restore"]


def __getattr__(name: str) -> Any:
    """Imports torch with the first use, not before: `popvlm --help` should not wait for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"PlanError": "plan", "PruningPlan": "plan", "UnsupportedModel": "decoders"}.get(name, "api")
    return getattr(import_module(f"{__name__}.{home}"), name)
