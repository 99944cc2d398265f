"""What `custom_generate/generate.py` in a repository of heads calls."""

from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from medusa.checkpoint import ADAPTER_FOLDER
from medusa.loading import local_directory
from medusa.model import MedusaModel

from .decoder import MedusaDecoder


def generate_with(repository: str, model: PreTrainedModel, **arguments: Any) -> Any:
    """`model.generate(**arguments)` with the heads of a repository or directory.

    They are loaded, and trees timed for them, at the first call; the decoder stays with the model.

    Raises:
        ValueError: the heads are of another model, or the call asks for what heads cannot give.
    """
    assert isinstance(model, GenerationMixin)
    decoders: dict[str, MedusaDecoder] = vars(model).setdefault("medusa_decoders", {})
    if repository not in decoders:
        directory = local_directory(repository)
        if (directory / ADAPTER_FOLDER).is_dir():
            raise ValueError(
                f"the heads of {repository!r} belong to their backbone with a LoRA adapter; fold it in with "
                "`medusa merge` and load the model from there, or decode with MedusaDecoder"
            )
        heads = MedusaModel.from_pretrained(directory, backbone=model)
        decoders[repository] = MedusaDecoder(heads, tree="auto", pack_weights="auto")
    return model.generate(custom_generate=decoders[repository], **arguments)
