"""Medusa heads for Hugging Face causal language models: train them, measure them, decode with them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import MedusaConfig
    from .model import MedusaModel
    from .tree import CandidateTree

__all__ = ["CandidateTree", "MedusaConfig", "MedusaModel"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `medusa --help` does not wait for torch."""
    if name == "CandidateTree":
        from .tree import CandidateTree

        return CandidateTree
    if name == "MedusaConfig":
        from .config import MedusaConfig

        return MedusaConfig
    if name == "MedusaModel":
        from .model import MedusaModel

        return MedusaModel
    raise AttributeError(f"module 'medusa' has no attribute {name!r}; it exports {', '.join(__all__)}")
