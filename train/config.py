"""Everything a training run is told: dataclasses here, the same names in YAML. Defaults live here only."""

from dataclasses import dataclass, field

from medusa.loading import DTYPES

MIXED_PRECISION = ("none", "bf16")
QUANTIZATION = ("none", "8bit", "4bit")
JOINT_METHODS = ("none", "lora", "full", "last_layers")
BACKBONE_LOSSES = ("data", "teacher")
ON_ERROR = ("drop", "stop")
WEIGHT_SCHEDULES = ("constant", "linear", "sine")


@dataclass
class BackboneSection:
    """The model that gets heads."""

    path: str = ""
    """Directory or hub id of a causal LM."""
    dtype: str = "auto"
    """auto (as stored), float32, bfloat16 or float16."""
    quantization: str = "none"
    """none, 8bit or 4bit (NF4), by bitsandbytes."""


@dataclass
class HeadsSection:
    """The heads' architecture; see MedusaConfig."""

    num_heads: int = 4
    num_layers: int = 1
    projection: str = "own"
    root_conditioned: bool = False
    sequential: bool = False
    embedding_scale: str = "unit"
    projection_bias: bool = False
    draft_vocab_size: int | None = None
    """Let the heads choose from the most frequent tokens of the training answers only; none: the whole vocabulary."""
    init_from: str | None = None
    """Checkpoint of heads of the same shape to start from, with its draft vocabulary; none: start as the LM head."""


@dataclass
class DataSection:
    """Chats to learn from."""

    train: str = ""
    """A file (JSONL, JSON, Parquet, Arrow, CSV), a folder or a glob of such, or a dataset: hub:USER/NAME:SPLIT."""
    eval: str | None = None
    """Held-out chats, likewise; the heads' accuracy on them is measured at the end."""
    max_length: int = 2048
    """Cut rows after so many tokens."""
    on_error: str = "drop"
    """What a row that cannot be used does: drop (it is left out and reported) or stop."""
    recorded: bool = False
    """Use the hidden states that `medusa distill --record` left beside the data instead of running the backbone."""


@dataclass
class OptimizationSection:
    """How to learn."""

    epochs: int = 1
    """Over the data with the backbone frozen; 0, to begin with the joint stage."""
    max_steps: int | None = None
    """Stop after so many steps; the learning rate still reaches 0 at the last one."""
    batch_size: int = 8
    """Rows of one process in one forward pass."""
    accumulation: int = 1
    """Forward passes in one optimizer step."""
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    head_decay: float = 0.8
    """Head k's loss counts head_decay ** k."""
    soft_labels: float = 0.0
    """Share of the KL divergence from the backbone's own distribution in the heads' loss; the rest is cross-entropy."""
    label_smoothing: float = 0.0
    """Of the cross-entropy."""
    gradient_checkpointing: bool = False
    """Compute the backbone's layers again in the backward pass of the joint stage, to save memory."""
    shard: bool = False
    """Split backbone, heads and optimizer over the processes in the joint stage (FSDP2), not a copy on each."""
    compile: bool = False
    """Compile the heads' loss in the stage with a frozen backbone; the first steps take a minute longer."""
    mixed_precision: str = "none"
    """none or bf16 (YAML reads a bare no as false); the heads' weights are fp32 always. A GPU without bf16 takes none,
    and backbone.dtype=float16."""
    seed: int = 0


@dataclass
class JointSection:
    """Medusa-2: heads and backbone learn together (Cai et al. 2024, section 2.2.2), after the heads alone.

    The loss is `backbone's + heads_weight * sum over heads k of head_decay ** (k + 1) * head k's`: the paper numbers
    heads from 1. The backbone's is a mean over its tokens; a head's is a sum divided by the mean number of pairs of a
    head, since later heads have fewer. Batches, precision and clipping are those of `optimization`.
    """

    method: str = "none"
    """none; lora (QLoRA where the backbone is quantised); full (the whole decoder); or last_layers. With the last two,
    input embedding and LM head stay as they are, since heads may share them."""
    last_layers: int = 1
    """How many layers learn where the method is last_layers."""
    loss: str = "data"
    """Of the backbone. data: cross-entropy on the text. teacher: KL divergence from what it was (lora only)."""
    epochs: int = 1
    max_steps: int | None = None
    warmup_steps: int = 40
    learning_rate: float = 2e-3
    """Of the heads."""
    backbone_learning_rate: float = 5e-4
    heads_weight: float = 0.2
    """lambda_0 in the paper."""
    heads_schedule: str = "constant"
    """constant; linear or sine: from 0 at the first step to heads_weight at the last."""
    lora_rank: int = 32
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    lora_targets: list[str] = field(default_factory=list)
    """Names of linear layers that get adapters; empty: all but the LM head."""


@dataclass
class CacheSection:
    """Hidden states of the frozen backbone on disk, computed once and read in every epoch."""

    dir: str | None = None
    """Folder of caches, on a disk that all machines share; none: run the backbone in every step."""


@dataclass
class OutputSection:
    """What is written, and how often."""

    dir: str = "runs/medusa1"
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    save_every: int = 500
    """Steps between resumable checkpoints."""
    keep: int = 2
    """How many of them are kept."""
    eval_every: int = 500
    """Steps between measurements on data.eval; the heads with the most tokens per step end up in best/."""
    decode_prompts: int = 0
    """Of data.eval: answered by the real decoder at each measurement; 0: tokens per step are predicted alone."""
    decode_tokens: int = 64
    """Longest of these answers."""


@dataclass
class WandbSection:
    """Weights & Biases; metrics.jsonl is written in any case."""

    enabled: bool = False
    project: str = "medusa-heads"
    name: str | None = None


@dataclass
class TrackingSection:
    """Where metrics go besides metrics.jsonl and Weights & Biases."""

    tensorboard: bool = False
    """Write event files into the run's directory (needs the package tensorboard)."""


@dataclass
class TrainConfig:
    """A whole training run."""

    backbone: BackboneSection = field(default_factory=BackboneSection)
    heads: HeadsSection = field(default_factory=HeadsSection)
    data: DataSection = field(default_factory=DataSection)
    optimization: OptimizationSection = field(default_factory=OptimizationSection)
    joint: JointSection = field(default_factory=JointSection)
    cache: CacheSection = field(default_factory=CacheSection)
    output: OutputSection = field(default_factory=OutputSection)
    wandb: WandbSection = field(default_factory=WandbSection)
    tracking: TrackingSection = field(default_factory=TrackingSection)

    def check(self) -> None:
        """Refuse values that no run can use.

        Raises:
            ValueError: the key, its value and what is allowed.
        """
        for key, value in (("backbone.path", self.backbone.path), ("data.train", self.data.train)):
            if not value:
                raise ValueError(f"{key} is not set; add it to the YAML or to the command line: {key}=...")
        optimization, joint = self.optimization, self.joint
        for key, number in (
            ("optimization.epochs", optimization.epochs + (joint.method != "none")),
            ("optimization.max_steps", 1 if optimization.max_steps is None else optimization.max_steps),
            ("optimization.batch_size", optimization.batch_size),
            ("optimization.accumulation", optimization.accumulation),
            ("joint.epochs", joint.epochs),
            ("joint.max_steps", 1 if joint.max_steps is None else joint.max_steps),
            ("joint.last_layers", joint.last_layers),
            ("joint.lora_rank", joint.lora_rank),
            ("data.max_length", self.data.max_length),
            ("output.log_every", self.output.log_every),
            ("output.save_every", self.output.save_every),
            ("output.keep", self.output.keep),
            ("output.eval_every", self.output.eval_every),
            ("output.decode_tokens", self.output.decode_tokens),
        ):
            if number < 1:
                raise ValueError(f"{key} is {number}; it must be at least 1")
        for key, rate in (
            ("optimization.learning_rate", optimization.learning_rate),
            ("joint.learning_rate", joint.learning_rate),
            ("joint.backbone_learning_rate", joint.backbone_learning_rate),
        ):
            if rate <= 0:
                raise ValueError(f"{key} is {rate}; it must be above 0")
        for key, share in (
            ("optimization.soft_labels", optimization.soft_labels),
            ("optimization.label_smoothing", optimization.label_smoothing),
            ("joint.lora_dropout", joint.lora_dropout),
        ):
            if not 0 <= share <= 1:
                raise ValueError(f"{key} is {share}; it must be from 0 to 1")
        for key, text, allowed in (
            ("backbone.dtype", self.backbone.dtype, DTYPES),
            ("data.on_error", self.data.on_error, ON_ERROR),
            ("backbone.quantization", self.backbone.quantization, QUANTIZATION),
            ("optimization.mixed_precision", optimization.mixed_precision, MIXED_PRECISION),
            ("joint.method", joint.method, JOINT_METHODS),
            ("joint.loss", joint.loss, BACKBONE_LOSSES),
            ("joint.heads_schedule", joint.heads_schedule, WEIGHT_SCHEDULES),
        ):
            if text not in allowed:
                raise ValueError(f"{key} is {text!r}; allowed: {', '.join(allowed)}")
        if self.output.decode_prompts < 0:
            raise ValueError(f"output.decode_prompts is {self.output.decode_prompts}; it must be 0 or more")
        if self.data.recorded and self.cache.dir is not None:
            raise ValueError(
                f"data.recorded is true and cache.dir is {self.cache.dir!r}: both are hidden states to train from; "
                "leave one out"
            )
        if joint.loss == "teacher" and joint.method in ("full", "last_layers"):
            raise ValueError(
                f"joint.loss is teacher and joint.method {joint.method}: the teacher is the backbone with its adapters "
                "off; use joint.method=lora, or joint.loss=data"
            )
        if self.backbone.quantization != "none" and joint.method in ("full", "last_layers"):
            raise ValueError(
                f"joint.method is {joint.method}, but quantised weights cannot learn; use joint.method=lora, or "
                "backbone.quantization=none"
            )
