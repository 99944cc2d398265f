"""Decode with Medusa heads: propose -> verify -> accept -> commit."""

if __name__ == "inference":
    raise ImportError("import medusa.inference: the bare folder would be a second copy of the package")

from .accept import Typical
from .decoder import MedusaDecoder
from .result import DecodingStats, GenerationResult

__all__ = ["DecodingStats", "GenerationResult", "MedusaDecoder", "Typical"]
