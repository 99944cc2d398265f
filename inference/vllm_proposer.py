"""Medusa heads inside vLLM, as a proposer of the user's own (`"method": "custom_class"`).

vLLM has had no Medusa since 0.33. R requests of a step, P rows of logits, D hidden. A request that had a draft of d
tokens checked has d+1 rows, every other one has one row, in the order of the batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medusa.checkpoint import HEADS_FILE, heads_config, read_config, read_heads, tokenizer_size
from medusa.compatibility import lm_head_differences
from medusa.heads import LogitTransform, MedusaHeads
from medusa.tensor_checks import check_counts, check_tensors

from .chain import Chain

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HEADS_OPTION = "medusa_heads"
TAIL = 64
"""Two requests whose texts are equally long and end in the same so many tokens are taken for one."""
TextKey = tuple[int, bytes]


class DraftLedger:
    """Which rows of a step's logits belong to which request.

    vLLM does not tell a proposer. But a request is known by its text, so what it was given to check is known from the
    step before; all these together must give exactly the rows that there are. Where the scheduler cut a draft they do
    not, and then nobody's rows are known in that step.
    """

    def __init__(self) -> None:
        self._drafted: dict[TextKey, int] = {}

    def last_rows(self, sampled: Sequence[Sequence[int]], texts: Sequence[NDArray[np.int32]], rows: int) -> list[int]:
        """Row that each request's last sampled token came from, [R]; an empty list where that is not known.

        Args:
            sampled: tokens that the step gave each request; none where only a part of its prompt was read.
            texts: all tokens of each request, those included.
            rows: P.
        """
        last, offset = [], 0
        for tokens, text in zip(sampled, texts, strict=True):
            drafted = self._drafted.get(key_of(text[: len(text) - len(tokens)]), 0) if tokens else 0
            if len(tokens) > drafted + 1:
                return []
            last.append(offset + len(tokens) - 1)
            offset += drafted + 1
        return last if offset == rows else []

    def record(self, texts: Sequence[NDArray[np.int32]], drafts: Sequence[Sequence[int]]) -> None:
        """Remember what each request gets to check in the next step, and forget the step before."""
        self._drafted = {key_of(text): len(draft) for text, draft in zip(texts, drafts, strict=True)}


def key_of(text: NDArray[np.int32]) -> TextKey:
    """What a request is known by."""
    return len(text), text[-TAIL:].tobytes()


class MedusaProposer:
    """Drafts with heads of any kind: one guess of each, as a chain.

    vLLM makes it (`"model": "medusa.inference.vllm_proposer.MedusaProposer"`) and finds the checkpoint by
    `--additional-config '{"medusa_heads": "DIRECTORY"}'`. The projection and the embedding that heads share with their
    backbone are those of the model being served.
    """

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Read the settings.

        Raises:
            ValueError: no checkpoint is named, or the model is spread over several devices.
        """
        options = vllm_config.additional_config
        if not isinstance(options, dict) or HEADS_OPTION not in options:
            raise ValueError(
                f'the heads\' directory is missing: start vLLM with --additional-config \'{{"{HEADS_OPTION}": "DIR"}}\''
            )
        parallel = vllm_config.parallel_config
        if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {parallel.tensor_parallel_size} and pipeline_parallel_size "
                f"{parallel.pipeline_parallel_size}; Medusa heads need a model on one device, set both to 1"
            )
        assert vllm_config.speculative_config is not None
        self.directory = Path(options[HEADS_OPTION])
        self.depth: int = vllm_config.speculative_config.num_speculative_tokens
        self.ledger = DraftLedger()
        self.hidden: Tensor | None = None
        """What the last logits were computed from, [P, D]."""

    def load_model(self, target: nn.Module) -> None:
        """Put the heads on the served model, and watch what its logits are computed from.

        Raises:
            ValueError: the checkpoint is damaged, has fewer heads than vLLM asks for, or is for another model.
        """
        heads = load_heads(self.directory, target)
        self.device = heads.projection(0)[0].device
        self.chain = Chain(heads, self.depth, self.device)
        compute_logits: Any = target.compute_logits

        def watched(hidden: Tensor, *rest: Any) -> Any:
            self.hidden = hidden
            return compute_logits(hidden, *rest)

        target.compute_logits = watched  # type: ignore[assignment]

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Guess what follows each request's text.

        Args:
            sampled_token_ids: tokens that this step gave each request, accepted ones and the root behind them.
            num_tokens_no_spec: length of each request's text, these included.
            token_ids_cpu: the texts, one row for each request.
            slot_mappings: not used.

        Returns:
            A draft for each request; an empty one where nothing was sampled or its hidden state is not known.
        """
        assert self.hidden is not None, "vLLM drafts before it has computed logits"
        texts = [token_ids_cpu[i, : num_tokens_no_spec[i]] for i in range(len(sampled_token_ids))]
        last = self.ledger.last_rows(sampled_token_ids, texts, len(self.hidden))
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        ready = [i for i, tokens in enumerate(sampled_token_ids) if tokens] if last else []
        if ready:
            hidden = self.hidden[[last[i] for i in ready]]  # [ready, D]
            root = torch.tensor([sampled_token_ids[i][-1] for i in ready], device=self.device)
            for i, guesses in zip(ready, self.chain.guesses(hidden, root).tolist(), strict=True):
                drafts[i] = guesses
        self.ledger.record(texts, drafts)
        return drafts


def load_heads(directory: Path, target: nn.Module) -> MedusaHeads:
    """Read a native checkpoint for a model that vLLM serves.

    Raises:
        ValueError: the checkpoint is missing or damaged, or was made for another model.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    entries = read_config(directory)
    tensors, draft_vocab = read_heads(directory)
    tables = [module for module in target.modules() if isinstance(module, VocabParallelEmbedding)]
    embedding = next(table for table in tables if not isinstance(table, ParallelLMHead))
    lm_head = next((table for table in tables if isinstance(table, ParallelLMHead)), None)
    known_rows = embedding.org_vocab_size  # vLLM pads the vocabulary
    lm_weight = (embedding if lm_head is None else lm_head).weight[:known_rows]  # a tied one is the embedding itself
    lm_bias = None if lm_head is None or lm_head.bias is None else lm_head.bias[:known_rows]
    if wrong := lm_head_differences(directory, entries, lm_weight):
        raise ValueError(
            f"{directory} was made for a model with {wrong[0]}, so its guesses would be wrong; "
            f"serve {entries.get('base_model_name_or_path')!r}"
        )
    # What the model does to its logits does not change which is the largest.
    config = heads_config(entries, draft_vocab)
    check_counts(directory / HEADS_FILE, tensors, config)
    heads = MedusaHeads(config, lm_weight, lm_bias, embedding.weight[:known_rows], LogitTransform())
    check_tensors(directory / HEADS_FILE, tensors, heads.state_dict())
    heads.load_state_dict(tensors)
    heads.limit_tokens(tokenizer_size(directory, entries, len(lm_weight)))
    return heads.requires_grad_(False)
