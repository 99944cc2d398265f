"""A backbone with heads."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
)

from .backbone import Backbone
from .checkpoint import (
    ADAPTER_FOLDER,
    BACKBONE_FOLDER,
    CONFIG_FILE,
    HEADS_FILE,
    PROVENANCE_FILE,
    atomic_directory,
    heads_config,
    read_config,
    read_heads,
    tokenizer_size,
    write_heads,
)
from .compatibility import backbone_facts, check_backbone, template_fact
from .config import MedusaConfig
from .formats import is_native, match_backbone, read_published
from .heads import MedusaHeads
from .hydra_files import check_embedding
from .loading import fold_adapter, found_from_everywhere, load_backbone, local_directory
from .tensor_checks import check_counts, check_tensors
from .tree_search import TREE_FILE, SearchedTree

if TYPE_CHECKING:
    from peft import PeftModel


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that a checkpoint needs."""

    chat_template: str | None

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the tokenizer's files."""


class MedusaModel(nn.Module):
    """A causal LM and the heads that guess ahead of it."""

    def __init__(self, backbone: Backbone, heads: MedusaHeads, searched_tree: SearchedTree | None = None) -> None:
        super().__init__()
        self.model = backbone.model
        self.heads = heads
        self.backbone = backbone
        self.searched_tree = searched_tree
        """The tree found for these heads, if one was."""
        self.known_tokens = backbone.vocab_size
        """Ids from here on are padding of the vocabulary: never guessed, never emitted. See `limit_tokens`."""

    @property
    def config(self) -> MedusaConfig:
        """The heads' architecture."""
        return self.heads.config

    def limit_tokens(self, known_tokens: int) -> None:
        """Say that the tokenizer has no ids from `known_tokens` on, where the LM head was padded to a round size.

        Raises:
            ValueError: there are not so many.
        """
        if not 1 <= known_tokens <= self.backbone.vocab_size:
            raise ValueError(
                f"the tokenizer has ids up to {known_tokens - 1}, but the backbone's LM head has "
                f"{self.backbone.vocab_size} rows; use the tokenizer of this backbone"
            )
        self.known_tokens = known_tokens
        self.heads.limit_tokens(known_tokens)

    @classmethod
    def attach(cls, backbone: PreTrainedModel, config: MedusaConfig) -> "MedusaModel":
        """Put fresh heads on a loaded model. The backbone is used as it is, not copied or changed.

        Raises:
            ValueError: the model cannot carry heads, or the draft vocabulary does not fit it.
        """
        return cls.attach_parts(Backbone(backbone), config)

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        dtype: str | torch.dtype = "auto",
        device_map: str | dict[str, Any] | None = None,
        backbone: PreTrainedModel | None = None,
    ) -> "MedusaModel":
        """Load heads and the backbone they were trained on.

        A backbone of the checkpoint's own is taken before the one that it names; an adapter beside the heads is folded
        into the backbone.

        Args:
            path_or_hub_id: directory of a checkpoint, or its repository on the hub.
            dtype: of the backbone and the heads; "auto" takes the backbone's own.
            device_map: as in transformers.
            backbone: a loaded backbone to use instead of the one that the checkpoint names; an adapter changes it.

        Raises:
            ValueError: the checkpoint is missing, damaged or made for another backbone.
        """
        directory = local_directory(path_or_hub_id)
        if not is_native(directory):
            return cls._from_published(directory, dtype, device_map, backbone)
        entries = read_config(directory)
        tensors, draft_vocab = read_heads(directory)
        config = heads_config(entries, draft_vocab)
        check_counts(directory / HEADS_FILE, tensors, config)
        if backbone is None:
            own = directory / BACKBONE_FOLDER
            name = str(own) if own.is_dir() else entries.get("base_model_name_or_path")
            backbone = load_backbone(name, dtype, device_map)
        parts = Backbone(backbone)
        check_backbone(directory, entries, parts)
        if (directory / ADAPTER_FOLDER).is_dir():
            parts = Backbone(fold_adapter(backbone, directory / ADAPTER_FOLDER))
        model = cls._empty(parts, config)
        check_tensors(directory / HEADS_FILE, tensors, model.heads.state_dict())
        model.heads.load(tensors, parts.lm_weight)
        model.limit_tokens(tokenizer_size(directory, entries, parts.vocab_size))
        if (directory / TREE_FILE).exists():
            model.searched_tree = SearchedTree.load(directory)
        return model

    @classmethod
    def _from_published(
        cls,
        directory: Path,
        dtype: str | torch.dtype,
        device_map: str | dict[str, Any] | None,
        backbone: PreTrainedModel | None,
    ) -> "MedusaModel":
        """`from_pretrained` for heads that another project wrote."""
        found = read_published(directory)
        if backbone is None and not found.base_model:
            raise ValueError(
                f"{directory} does not say whose heads it holds (base_model_name_or_path in {CONFIG_FILE}); pass "
                "`backbone=`"
            )
        if backbone is None:
            backbone = load_backbone(found.base_model, dtype, device_map)
        parts = Backbone(backbone)
        model = cls._empty(parts, found.config)
        if found.embedding is not None:
            check_embedding(found.embedding, parts.root_table, directory)
        tensors = match_backbone(found.tensors, model.heads.state_dict(), directory)
        check_tensors(directory, tensors, model.heads.state_dict())
        if "backbone_fingerprint" in found.entries:  # exported from a native checkpoint
            check_backbone(directory, found.entries, parts)
        model.heads.load(tensors, parts.lm_weight)
        if (directory / TREE_FILE).exists():
            model.searched_tree = SearchedTree.load(directory)
        return model

    @classmethod
    def attach_parts(cls, parts: Backbone, config: MedusaConfig) -> "MedusaModel":
        """`attach`, for a backbone that is taken apart already."""
        return cls(parts, MedusaHeads(config, parts.lm_weight, parts.lm_bias, parts.root_table, parts.transform))

    @classmethod
    def _empty(cls, parts: Backbone, config: MedusaConfig) -> "MedusaModel":
        """`attach_parts`, with heads that wait for their weights."""
        heads = MedusaHeads(config, parts.lm_weight, parts.lm_bias, parts.root_table, parts.transform, empty=True)
        return cls(parts, heads)

    def save_pretrained(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        provenance: dict[str, Any] | None = None,
        adapter: "PeftModel | None" = None,
        with_backbone: bool = False,
    ) -> None:
        """Write the heads as a native checkpoint; an older one there is replaced at the end.

        Args:
            path: the checkpoint's directory.
            tokenizer: saved beside the heads, for engines that look for it there.
            provenance: how the heads were made, saved as provenance.json.
            adapter: an adapter that the backbone wears, saved in `adapter/`.
            with_backbone: save the backbone too, in `backbone/`, as a model that loads without the heads.

        Raises:
            ValueError: the heads hold values that are not finite, or do not read back as written.
        """
        facts = {
            "base_model_name_or_path": found_from_everywhere(self.model.config._name_or_path),
            **backbone_facts(self.backbone),
        }
        if tokenizer is not None:
            facts |= template_fact(tokenizer)
            facts["tokenizer_size"] = max(tokenizer.get_vocab().values()) + 1
        elif self.known_tokens < self.backbone.vocab_size:
            facts["tokenizer_size"] = self.known_tokens
        with atomic_directory(Path(path)) as work:
            write_heads(work, self.heads.state_dict(), self.config, facts)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(work))
            if provenance is not None:
                (work / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=2) + "\n")
            if self.searched_tree is not None:
                self.searched_tree.save(work)
            if adapter is not None:
                adapter.save_pretrained(str(work / ADAPTER_FOLDER), save_embedding_layers=False)
            if with_backbone:
                self.model.save_pretrained(str(work / BACKBONE_FOLDER))
                if tokenizer is not None:
                    tokenizer.save_pretrained(str(work / BACKBONE_FOLDER))

    def push_to_hub(
        self, repository: str, tokenizer: Tokenizer | None = None, private: bool = False, license_: str | None = None
    ) -> str:
        """Save the heads and upload them, with a model card; see `medusa.hub` for what else goes there.

        Returns:
            Address of the repository.

        Raises:
            ValueError: the heads cannot be saved, or the hub refuses.
        """
        from .hub import push

        with tempfile.TemporaryDirectory() as work:
            self.save_pretrained(Path(work) / "heads", tokenizer)
            return push(Path(work) / "heads", repository, private, license_)
