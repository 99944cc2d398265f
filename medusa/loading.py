"""Load backbones, adapters and tokenizers."""

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from .checkpoint import readable

DTYPES = ("auto", "float32", "bfloat16", "float16")


class HeadsConfig(PreTrainedConfig):
    """The config.json beside heads, for transformers: it looks there first when it loads the tokenizer beside them."""

    model_type = "medusa"


AutoConfig.register("medusa", HeadsConfig, exist_ok=True)  # a serving engine in the same process has its own


def found_from_everywhere(name_or_path: str) -> str:
    """A hub id as it is, a directory by its absolute path; nothing stays nothing."""
    return os.path.abspath(name_or_path) if name_or_path and Path(name_or_path).is_dir() else name_or_path


def local_directory(path_or_hub_id: str | Path) -> Path:
    """The checkpoint's directory, downloaded first where a hub id is given.

    Raises:
        ValueError: there is neither such a directory nor such a repository.
    """
    with readable(Path(path_or_hub_id)):
        if Path(path_or_hub_id).is_dir():
            return Path(path_or_hub_id)
    try:
        return Path(snapshot_download(str(path_or_hub_id)))
    except Exception as error:  # the hub client raises a dozen kinds, all mean the same here
        raise ValueError(
            f"{str(path_or_hub_id)!r} is neither a directory nor a repository that the hub gives ({error})"
        ) from error


def load_backbone(
    name_or_path: str | None,
    dtype: str | torch.dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
    quantization: str = "none",
) -> PreTrainedModel:
    """Load a causal LM from a directory or the hub.

    Args:
        name_or_path: where from.
        dtype: of its weights; "auto" as stored.
        device_map: as in transformers.
        quantization: none, 8bit, or 4bit (NF4 with double quantisation), by bitsandbytes.

    Raises:
        ValueError: it is not there or is no causal LM, or bitsandbytes is not installed.
    """
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    if not name_or_path:
        raise ValueError("the checkpoint does not name its backbone (base_model_name_or_path); pass `backbone=`")
    quantized = None
    if quantization != "none":
        quantized = BitsAndBytesConfig(
            load_in_8bit=quantization == "8bit",
            load_in_4bit=quantization == "4bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=dtype, device_map=device_map, quantization_config=quantized
        )
    except ImportError as error:
        raise ValueError(
            f"quantization is {quantization}, which needs bitsandbytes: pip install bitsandbytes"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the backbone {name_or_path!r}: {error}") from error
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def fold_adapter(backbone: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Load a LoRA adapter and add it to the backbone's weights, in place.

    Raises:
        ValueError: there is no adapter that peft can load onto this backbone.
    """
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(backbone, str(directory))
        merged = adapted.merge_and_unload(safe_merge=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"cannot fold the adapter {directory} into {type(backbone).__name__}: {error}") from error
    assert isinstance(merged, PreTrainedModel)
    return merged


def load_tokenizer(name_or_path: str) -> Any:
    """Load a tokenizer from a directory or the hub.

    Raises:
        ValueError: it is not there.
    """
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot load the tokenizer of {name_or_path!r}: {error}") from error
