"""Decode with Medusa heads: propose -> verify -> accept -> commit."""

if __name__ == "inference":
    raise ImportError("import medusa.inference: the bare folder would be a second copy of the package")

from .decoder import DecodingStats, GenerationResult, MedusaDecoder

__all__ = ["DecodingStats", "GenerationResult", "MedusaDecoder"]
