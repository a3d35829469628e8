"""popvlm: vision-language models that answer sooner, by Prefill-Only Pruning (arXiv 2602.03295)."""

from popvlm.api import ProcessorError, accelerate, full_prefill, plan_of, restore
from popvlm.decoders import UnsupportedModel
from popvlm.plan import PlanError, PruningPlan

__version__ = "0.1.0"
__all__ = ["PlanError", "ProcessorError", "PruningPlan", "UnsupportedModel", "accelerate", "full_prefill", "plan_of",
           "restore"]
