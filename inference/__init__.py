"""Decode with Medusa heads: propose -> verify -> accept -> commit."""

if __name__ == "inference":
    raise ImportError("import medusa.inference: the bare folder would be a second copy of the package")

from .accept import Typical
from .decoder import MedusaDecoder
from .draft_model import DraftModel
from .draft_stats import DraftStats
from .dynamic_tree import DynamicTree
from .result import DecodingStats, GenerationResult
from .vocabulary import check_same_vocabulary

__all__ = [
    "DecodingStats",
    "DraftModel",
    "DraftStats",
    "DynamicTree",
    "GenerationResult",
    "MedusaDecoder",
    "Typical",
    "check_same_vocabulary",
]
