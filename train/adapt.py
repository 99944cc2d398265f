"""What of a backbone learns in Medusa-2: adapters, all decoder layers, or the last ones."""

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from medusa.backbone import Backbone
from medusa.model import MedusaModel

from .config import JointSection


def adapt_backbone(model: MedusaModel, options: JointSection) -> PeftModel | None:
    """Let the backbone learn as `options.method` says; its parameters that learn are fp32 afterwards.

    Returns:
        The backbone with its adapters, where there are any; the layers of `model` have them too.

    Raises:
        ValueError: an adapter would sit on weights that something else shares, or on no layer at all.
    """
    if options.method == "lora":
        adapter = add_lora(model, options)
        model.backbone = Backbone(model.model)  # an LM head with an adapter is another module
        return adapter
    decoder = model.backbone.decoder
    model.model.float()
    model.model.requires_grad_(False)
    if options.method == "full":
        decoder.requires_grad_(True)
        model.backbone.embedding.requires_grad_(False)
        model.backbone.lm_head.requires_grad_(False)
        return None
    layers = decoder_layers(model.backbone)
    if options.last_layers > len(layers):
        raise ValueError(f"joint.last_layers is {options.last_layers}, but the backbone has {len(layers)} layers")
    for layer in layers[-options.last_layers :]:
        layer.requires_grad_(True)
    return None


def add_lora(model: MedusaModel, options: JointSection) -> PeftModel:
    """Put low-rank adapters on the backbone's linear layers, in place."""
    refuse_shared_weights(model, options.lora_targets)
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=list(options.lora_targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapter = get_peft_model(model.model, config)
    except ValueError as error:
        raise ValueError(f"joint.lora_targets is {list(options.lora_targets)}: {error}") from error
    assert isinstance(adapter, PeftModel)
    return adapter


def refuse_shared_weights(model: MedusaModel, targets: list[str]) -> None:
    """Refuse adapters on weights that are used in a second place, which would not learn along.

    Raises:
        ValueError: the layer, who shares it, and what to do.
    """
    names = {module: name for name, module in model.model.named_modules()}
    for module in (model.backbone.lm_head, model.backbone.embedding):
        name = names[module]
        if name not in targets and name.split(".")[-1] not in targets:
            continue
        if model.model.config.get_text_config(decoder=True).tie_word_embeddings:
            raise ValueError(
                f"joint.lora_targets names {name}, but this backbone's LM head and input embedding are one weight: an "
                "adapter on one of them would be lost or doubled when it is merged; leave it out"
            )
        if model.config.projection == "shared" or model.heads.shared_weight is not None:
            raise ValueError(
                f"joint.lora_targets names {name}, but the heads share it (heads.projection=shared) and would not see "
                "its adapter; leave it out, or use heads.projection=own"
            )


def decoder_layers(backbone: Backbone) -> nn.ModuleList:
    """The decoder's layers, first to last."""
    for module in backbone.decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == backbone.num_layers:
            return module
    raise ValueError(f"cannot find the layers of {type(backbone.model).__name__}; use joint.method=lora or full")


def learning_parameters(backbone: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What of the backbone learns, by name."""
    return {name: parameter for name, parameter in backbone.named_parameters() if parameter.requires_grad}
