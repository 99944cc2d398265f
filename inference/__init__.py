"""Decode with Medusa heads: propose -> verify -> accept -> commit."""

if __name__ == "inference":
    raise ImportError("import medusa.inference: the bare folder would be a second copy of the package")

from .accept import Blockwise, Typical
from .combined import HeadsAndLookup
from .custom_generate import generate_with
from .decoder import MedusaDecoder
from .draft_model import DraftModel
from .draft_stats import DraftStats
from .dynamic_tree import DynamicTree
from .lookup import Lookup
from .result import DecodingStats, GenerationResult
from .step_sizes import StepSizes
from .vocabulary import check_same_vocabulary

__all__ = [
    "Blockwise",
    "DecodingStats",
    "DraftModel",
    "DraftStats",
    "DynamicTree",
    "GenerationResult",
    "HeadsAndLookup",
    "Lookup",
    "MedusaDecoder",
    "StepSizes",
    "Typical",
    "check_same_vocabulary",
    "generate_with",
]
