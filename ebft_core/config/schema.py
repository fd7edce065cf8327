"""The schema of a run file. Every default of the project is written here and nowhere else.

The text under a field is its documentation: it becomes the JSON Schema (editors show it) and
`docs/config-reference.md`. Rules that concern one field stand on the field; rules that relate
fields stand in `rules.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from ebft_core.config.compare_section import CompareConfig, SweepConfig
from ebft_core.config.data_section import DataConfig
from ebft_core.config.evaluate_section import EvaluateConfig
from ebft_core.config.health_section import HealthConfig
from ebft_core.config.promotion_section import PromotionConfig
from ebft_core.config.retention_section import RetentionConfig
from ebft_core.config.retrain_section import RetrainConfig
from ebft_core.config.section import Fraction, NonNegative, NonNegativeInt, PositiveInt, Section, Seed
from ebft_core.config.sft_section import SFTConfig
from ebft_core.config.storage_section import S3, S3_PLACE, StorageConfig
from ebft_core.config.structured_sections import OwnRewardConfig, RolloutConfig, VLLMConfig


class FromScratchConfig(Section):
    """Make a base model: a small tokenizer and a small Llama, trained by cross-entropy on `sources`."""

    sources: list[str] = Field(min_length=1)
    """Glob patterns of the text the base model is trained on. `stdlib:` stands for the folder of the
    installed Python standard library, so `stdlib:*.py` is its top-level modules."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """`byte`: one token per byte (256 + special tokens). `bpe`: byte-level BPE trained on `sources`."""
    vocab_size: PositiveInt = 4096
    """Size of the BPE vocabulary; not used by the byte tokenizer."""
    hidden_size: PositiveInt = 192
    """Width of the model."""
    intermediate_size: PositiveInt = 512
    """Width of the MLP."""
    num_hidden_layers: PositiveInt = 6
    """Number of decoder layers."""
    num_attention_heads: PositiveInt = 6
    """Attention heads."""
    num_key_value_heads: PositiveInt = 6
    """Key/value heads (grouped-query attention when smaller than the attention heads)."""
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence the model accepts, in tokens."""
    max_steps: PositiveInt = 300
    """Optimiser steps of cross-entropy training."""
    batch_size: PositiveInt = 16
    """Sequences per step."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate (cosine schedule with 5 % warmup)."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the data."""


class ModelConfig(Section):
    """The base model: a hub id, a local folder, or one made here."""

    name_or_path: str | None = None
    """Hub id or folder of a causal language model. Exactly one of `name_or_path` and `from_scratch`."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; resolved to a commit and recorded."""
    from_scratch: FromScratchConfig | None = None
    """Make the base model instead of loading one (used where no weights can be downloaded)."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off: such models are refused."""


class EBFTConfig(Section):
    """The algorithm (docs, *Concepts*)."""

    mode: Literal["strided", "structured"] = "strided"
    """`strided`: short rollouts at anchors inside documents. `structured`: whole completions of prompts."""
    stride: PositiveInt = 8
    """Tokens between anchors."""
    context_length: PositiveInt = 8
    """Tokens before the first anchor of a document."""
    generate_max_len: PositiveInt = 8
    """Tokens generated at every anchor (G)."""
    n_samples_per_prompt: PositiveInt = 4
    """Samples per anchor (N)."""
    temperature: float = Field(default=0.6, gt=0.0)
    """Sampling temperature; log-probabilities are taken at the same temperature."""
    top_p: Fraction = 1.0
    """Nucleus sampling bound; 1.0 is off."""
    feature_layers: list[Fraction] = Field(default=[0.25, 0.5, 0.75], min_length=1)
    """Depths of the feature network whose hidden states are matched, as fractions of its layers."""
    top_k: NonNegativeInt = 0
    """Sample among the `top_k` most likely tokens only; 0 is off (structured mode)."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Leave out tokens less likely than `min_p` times the most likely one; 0 is off (structured mode)."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """Penalty on tokens that the prompt or the completion already holds; 1 is off (structured mode)."""
    max_completion_length: PositiveInt = 256
    """Longest completion of a prompt, in tokens, over all turns (structured mode)."""
    adaptive_max_tokens: bool = True
    """Bound each prompt's completion by the length of its ground truth (structured mode)."""
    gt_length_multiplier: float = Field(default=1.5, gt=0.0)
    """That bound in ground-truth lengths: at least 64 tokens, at most `max_completion_length`."""
    mask_truncated_completions: bool = False
    """Completions that met their bound carry no policy gradient (structured mode)."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide the advantages by the standard deviation of the rewards of the group or of the micro-batch."""
    embed_method: Literal["last_token", "mean_pooling", "completion_mean", "concat"] = "last_token"
    """How a block's hidden states become one vector."""
    whitening: Literal["feature", "sample", "none"] = "feature"
    """`feature`: the paper's; `sample`: the authors' code; `none`: plain inner products."""
    whiten_tol: float = Field(default=1e-5, gt=0.0, lt=1.0)
    """Singular values below this share of the largest count as zero (never below the features' precision)."""
    alignment_coef: NonNegative = 1.0
    """Weight of the alignment part of the reward."""
    diversity_coef: NonNegative = 1.0
    """Weight of the diversity part of the reward."""
    rl_coef: NonNegative = 1.0
    """Weight of the policy-gradient loss."""
    ce_coef: NonNegative = 0.0
    """Weight of the cross-entropy on the document's own tokens (the paper's gamma: 0, 0.03, 0.1)."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty towards the base model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL penalty."""
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Exponential moving average of the trained weights; the average is what is saved. 0 is off."""
    advantage_estimator: Literal["rloo", "group_norm", "reinforce"] = "rloo"
    """How rewards become advantages."""
    min_completion_prefix: NonNegativeInt = 0
    """Completion tokens to keep before the first anchor behind a prompt."""
    document_masking: bool = True
    """Documents packed into one row do not see each other."""
    feature_device: str | None = None
    """Device of the frozen feature network of full fine-tuning (`cpu`, `cuda:1`); unset: the trainer's."""
    max_dropped_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run stops when more than this share of a step's groups has unusable features."""


class TrainerConfig(Section):
    """Optimiser, schedule, batch, precision, checkpoints."""

    learning_rate: float = Field(default=1e-5, gt=0.0)
    """Peak learning rate."""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate after warmup."""
    warmup_ratio: float = Field(default=0.03, ge=0.0, le=1.0)
    """Share of the steps spent warming up."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW first-moment decay."""
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """AdamW second-moment decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradient norm clipping."""
    micro_batch_size: PositiveInt = 1
    """Rows per forward pass."""
    tokens_per_forward: PositiveInt | None = None
    """Generated tokens per forward pass: bounds the memory of activations. Unset: 1024 on a CPU, 16384 on
    a GPU."""
    share_prefixes: bool = True
    """Compute what the samples of a group have in common once: the beginnings they share."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches per optimiser step; unset: from `batch_size`, or 1."""
    batch_size: PositiveInt | None = None
    """Rows per optimiser step, a multiple of `micro_batch_size`. Unset: micro-batch times accumulation."""
    max_steps: PositiveInt | None = None
    """Optimiser steps. At most one of `max_steps`, `num_train_epochs` and `max_seconds`; none: one epoch."""
    num_train_epochs: float | None = Field(default=None, gt=0.0)
    """Passes over the training rows."""
    max_seconds: float | None = Field(default=None, gt=0.0)
    """Budget of training time: the training ends with the step in which it is used. Evaluations and
    checkpoints are not counted; the learning rate follows the share that is used."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU that has it, float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention of the packed forward. `auto`: FlexAttention on CUDA, SDPA elsewhere."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    save_every: PositiveInt = 50
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints kept on disk (the newest ones)."""
    sample_every: PositiveInt | None = 10
    """Steps between rollouts shown on the terminal and kept in the journal; null: none."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations on held-out rows; unset: none during training."""
    eval_rows: PositiveInt = 16
    """Held-out rows used by those evaluations."""
    seed: Seed = 0
    """Seed of everything random in training: order of rows, rollouts, dropout, initial adapters."""

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimiser step."""
        if self.gradient_accumulation_steps is not None:
            return self.gradient_accumulation_steps
        return 1 if self.batch_size is None else self.batch_size // self.micro_batch_size


class LoraConfig(Section):
    """Low-rank adapters. `lora: null` trains every weight."""

    r: PositiveInt = 16
    """Rank."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Scale: the update is multiplied by alpha / r (alpha / √r with `use_rslora`)."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """`all-linear`, a list of module names, or a regular expression over full module names."""
    use_rslora: bool = False
    """Rank-stabilised scale."""
    use_dora: bool = False
    """Weight-decomposed adapters (DoRA)."""


class PublishConfig(Section):
    """What happens to a finished model."""

    enabled: bool = True
    """Register the merged model in MLflow."""
    registered_model_name: str | None = None
    """Name in the registry; unset: the run's name."""
    alias: str = "challenger"
    """Alias that points to the new version."""


class TrackingConfig(Section):
    """MLflow."""

    mlflow_uri: str | None = None
    """Tracking server or `sqlite:///…`; unset: `MLFLOW_TRACKING_URI`, else `mlflow.db` in the workspace."""
    experiment: str = "ebft"
    """Experiment that holds the runs."""
    artifact_location: str | None = Field(default=None, pattern=rf"^{S3_PLACE}$")
    """`s3://bucket/prefix` for the artifacts of the experiment, used when the experiment is made. Unset:
    where the tracking server keeps them; without a server, a folder of the workspace."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Extra tags of the MLflow run."""


class RunConfig(Section):
    """A whole run. `model` and `data` are required; everything else has a default."""

    name: str = Field(default="ebft", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run: part of its folder, its MLflow run and its registered model."""
    workspace: str = "runs"
    """Folder, or `s3://bucket/prefix`, that holds checkpoints, models and reports. On S3 it is the archive of
    the runs, and `storage.local_workspace` is the working copy."""
    model: ModelConfig
    data: DataConfig
    ebft: EBFTConfig = EBFTConfig()
    trainer: TrainerConfig = TrainerConfig()
    lora: LoraConfig | None = LoraConfig()
    sft: SFTConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    vllm: VLLMConfig = VLLMConfig()
    rewards: list[OwnRewardConfig] = Field(default_factory=list)
    """Rewards of your own, added to the feature reward (structured mode)."""
    health: HealthConfig = HealthConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    compare: CompareConfig = CompareConfig()
    sweep: SweepConfig = SweepConfig()
    publish: PublishConfig = PublishConfig()
    promotion: PromotionConfig = PromotionConfig()
    retrain: RetrainConfig = RetrainConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: StorageConfig = StorageConfig()
    retention: RetentionConfig = RetentionConfig()

    @field_validator("lora", "sft", mode="before")
    @classmethod
    def _none_is_null(cls, value: Any) -> Any:
        """`lora: none`, as on a command line, reads as `lora: null`."""
        return None if isinstance(value, str) and value.lower() == "none" else value

    @property
    def local_workspace(self) -> str:
        """The folder the run works in."""
        return self.storage.local_workspace if self.workspace.startswith(S3) else self.workspace

    @property
    def archive(self) -> str | None:
        """Where finished work is kept beside the folder the run works in; None: nowhere."""
        return self.workspace if self.workspace.startswith(S3) else self.storage.archive

    @property
    def archive_key(self) -> str:
        """The key that names `archive`, for messages."""
        return "workspace" if self.workspace.startswith(S3) else "storage.archive"
