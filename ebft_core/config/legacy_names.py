"""The tables behind `legacy.py`: other tools' names on the left, this project's keys on the right."""

from __future__ import annotations

from collections.abc import Mapping

ValueMap = Mapping[object, str]

_AXOLOTL = "axolotl"
_TRL = "TRL or transformers"
_OPENRLHF = "OpenRLHF"

# name -> (tool, our key or what each value becomes, note). A dotted name is meant at that place only.
# A key that ends in "*" is named without the given value, which does not carry over.
RENAMED: dict[str, tuple[str, str | ValueMap, str | None]] = {
    # model
    "base_model": (_AXOLOTL, "model.name_or_path", None),
    "base_model_config": (_AXOLOTL, "model.name_or_path", None),
    "tokenizer_config": (_AXOLOTL, "model.name_or_path", "the tokenizer is the model's own"),
    "revision_of_model": (_AXOLOTL, "model.revision", None),
    "model_name_or_path": (_TRL, "model.name_or_path", None),
    "model_revision": (_TRL, "model.revision", None),
    "pretrain": (_OPENRLHF, "model.name_or_path", None),
    "critic_pretrain": (
        _OPENRLHF,
        "model.name_or_path",
        "the feature network is always the frozen base model",
    ),
    "chat_template_jinja": (_AXOLOTL, "model.chat_template*", "the path of a file with the template"),
    "chat_template_kwargs": (_TRL, "data.chat.template_kwargs", None),
    # data
    "datasets": (_AXOLOTL, "data.sources*", "one `- path: …` per dataset; `type` becomes `data.transform`"),
    "test_datasets": (_AXOLOTL, "data.heldout_fraction*", "held-out rows are chosen by each document's hash"),
    "dataset_name": (_TRL, "data.sources*", "`sources: [{path: <id>, format: hub}]`"),
    "dataset_path": (_TRL, "data.sources*", "`sources: [{path: <id>, format: hub}]`"),
    "prompt_data": (_OPENRLHF, "data.sources*", "`sources: [{path: <id>, format: hub}]`"),
    "data.sources.type": (
        _AXOLOTL,
        "data.transform*",
        "`text`, `prompt_completion`, `chat` or `module:function`",
    ),
    "data.sources.ds_type": (_AXOLOTL, "data.sources[].format", None),
    "data.sources.data_files": (_AXOLOTL, "data.sources[].path*", "one source per file or glob"),
    "data.sources.train_on_split": (_AXOLOTL, "data.sources[].split", None),
    "data.sources.field": (_AXOLOTL, "data.fields.text", None),
    "dataset_train_split": (_TRL, "data.sources[].split", None),
    "prompt_split": (_OPENRLHF, "data.sources[].split", None),
    "field_messages": (_AXOLOTL, "data.fields.messages", None),
    "dataset_text_field": (_TRL, "data.fields.text", None),
    "input_key": (_OPENRLHF, "data.fields.prompt", None),
    "label_key": (_OPENRLHF, "data.fields.completion", None),
    "output_key": (_OPENRLHF, "data.fields.completion", None),
    "sequence_len": (_AXOLOTL, "data.sequence_length", None),
    "max_seq_length": (_TRL, "data.sequence_length", None),
    "max_length": (_TRL, "data.sequence_length", None),
    "prompt_max_len": (_OPENRLHF, "data.sequence_length", None),
    "sample_packing": (_AXOLOTL, "data.packing", None),
    "packing_samples": (_OPENRLHF, "data.packing", None),
    "val_set_size": (
        _AXOLOTL,
        "data.heldout_fraction",
        "a share between 0 and 1; some rows are always held out",
    ),
    "max_samples": (_OPENRLHF, "data.max_documents", None),
    "train_on_inputs": (
        _AXOLOTL,
        "data.transform*",
        "`prompt_completion` supervises completions, `text` everything",
    ),
    "roles_to_train": (
        _AXOLOTL,
        "data.chat.assistant_turns*",
        "`all` or `final`: only assistant turns are supervised",
    ),
    "train_on_eos": (_AXOLOTL, "data.append_eos*", None),
    # EBFT
    "use_whitening": (
        f"{_AXOLOTL} and {_OPENRLHF}",
        {True: "ebft.whitening: feature", False: "ebft.whitening: none"},
        "`feature` is the paper's whitening, `sample` that of the authors' code",
    ),
    "context_max_len": (_OPENRLHF, "ebft.context_length", None),
    "max_completion_length": (_TRL, "ebft.generate_max_len", None),
    "num_generations": (_TRL, "ebft.n_samples_per_prompt", None),
    "alignment_rew_coef": (_OPENRLHF, "ebft.alignment_coef", None),
    "diversity_rew_coef": (_OPENRLHF, "ebft.diversity_coef", None),
    "ce_loss_coef": (_OPENRLHF, "ebft.ce_coef", None),
    "rl_loss_coef": (_OPENRLHF, "ebft.rl_coef", None),
    "init_kl_coef": (_OPENRLHF, "ebft.kl_coef", None),
    "beta": (_TRL, "ebft.kl_coef", None),
    "ema_beta": (_OPENRLHF, "ebft.ema_decay", None),
    "enable_ema": (_OPENRLHF, {True: "ebft.ema_decay: 0.9", False: "ebft.ema_decay: 0"}, None),
    "hidden_state_method": (
        _OPENRLHF,
        "ebft.feature_layers*",
        "`concat` is [0.25, 0.5, 0.75]; `last_only` is [1.0]",
    ),
    "qa_masking": (_OPENRLHF, "data.transform*", "`prompt_completion` places anchors in completions only"),
    # optimiser and schedule
    "lr": (_TRL, "trainer.learning_rate", None),
    "actor_learning_rate": (_OPENRLHF, "trainer.learning_rate", None),
    "lr_scheduler_type": (_TRL, "trainer.lr_scheduler", None),
    "lr_warmup_ratio": (_OPENRLHF, "trainer.warmup_ratio", None),
    "warmup_steps": (
        f"{_AXOLOTL} and {_TRL}",
        "trainer.warmup_ratio*",
        "a share of all steps, not their number",
    ),
    "num_epochs": (_AXOLOTL, "trainer.num_train_epochs", None),
    "max_epochs": (_OPENRLHF, "trainer.num_train_epochs", None),
    "num_episodes": (_OPENRLHF, "trainer.num_train_epochs", None),
    "l2": (_OPENRLHF, "trainer.weight_decay", None),
    "max_norm": (_OPENRLHF, "trainer.max_grad_norm", None),
    "adam_betas": (_OPENRLHF, "trainer.adam_beta1 and trainer.adam_beta2*", None),
    "per_device_train_batch_size": (_TRL, "trainer.micro_batch_size", None),
    "micro_train_batch_size": (_OPENRLHF, "trainer.micro_batch_size", None),
    "micro_rollout_batch_size": (_OPENRLHF, "trainer.micro_batch_size", None),
    "train_batch_size": (_OPENRLHF, "trainer.batch_size*", "rows (documents) per step, not samples"),
    "rollout_batch_size": (
        _OPENRLHF,
        "trainer.batch_size",
        "one update per rollout, so both batches are one",
    ),
    "per_device_eval_batch_size": (_TRL, "evaluate.batch_rows", None),
    "eval_batch_size": (_AXOLOTL, "evaluate.batch_rows", None),
    "bf16": (
        f"{_AXOLOTL} and {_TRL}",
        {
            "auto": "trainer.precision: auto",
            True: "trainer.precision: bfloat16",
            False: "trainer.precision: float32",
        },
        None,
    ),
    "fp16": (f"{_AXOLOTL} and {_TRL}", {True: "trainer.precision: bfloat16"}, "float16 is not offered"),
    "torch_dtype": (f"{_AXOLOTL} and {_TRL}", "trainer.precision", None),
    "dtype": (_TRL, "trainer.precision", None),
    "flash_attention": (_AXOLOTL, {None: "trainer.attention: auto"}, "FlexAttention on CUDA, SDPA elsewhere"),
    "flash_attn": (_OPENRLHF, {None: "trainer.attention: auto"}, "FlexAttention on CUDA, SDPA elsewhere"),
    "flex_attention": (_AXOLOTL, {None: "trainer.attention: auto", True: "trainer.attention: flex"}, None),
    "sdp_attention": (_AXOLOTL, {None: "trainer.attention: auto", True: "trainer.attention: sdpa"}, None),
    "attn_implementation": (
        _TRL,
        {
            None: "trainer.attention: auto",
            "sdpa": "trainer.attention: sdpa",
            "flex_attention": "trainer.attention: flex",
        },
        None,
    ),
    "save_steps": (f"{_AXOLOTL} and {_TRL}", "trainer.save_every", None),
    "saves_per_epoch": (_AXOLOTL, "trainer.save_every*", "steps between checkpoints"),
    "save_total_limit": (f"{_AXOLOTL} and {_TRL}", "trainer.keep_checkpoints", None),
    "eval_steps": (f"{_AXOLOTL} and {_TRL}", "trainer.eval_every", None),
    "evals_per_epoch": (_AXOLOTL, "trainer.eval_every*", "steps between evaluations"),
    # LoRA
    "adapter": (
        _AXOLOTL,
        {
            "lora": "a section `lora:` (it is on by default)",
            "qlora": "a section `lora:` (quantised bases are not supported)",
            None: "lora: null",
        },
        "`lora: null` trains every weight",
    ),
    "use_peft": (_TRL, {True: "a section `lora:` (it is on by default)", False: "lora: null"}, None),
    "lora_r": (f"{_AXOLOTL} and {_TRL}", "lora.r", None),
    "lora_rank": (_OPENRLHF, "lora.r", None),
    "lora_alpha": (f"{_AXOLOTL} and {_TRL}", "lora.alpha", None),
    "lora_dropout": (f"{_AXOLOTL} and {_TRL}", "lora.dropout", None),
    "lora_target_modules": (
        f"{_AXOLOTL} and {_TRL}",
        "lora.target_modules",
        "a list or a regular expression",
    ),
    "target_modules_regex": (_TRL, "lora.target_modules", None),
    "lora_target_linear": (
        _AXOLOTL,
        {True: "lora.target_modules: all-linear", False: "lora.target_modules: [q_proj, v_proj]"},
        None,
    ),
    "peft_use_rslora": (_AXOLOTL, "lora.use_rslora", None),
    "peft_use_dora": (_AXOLOTL, "lora.use_dora", None),
    "lora.lora_alpha": (_TRL, "lora.alpha", None),
    "lora.rank": ("other tools", "lora.r", None),
    # run
    "output_dir": (
        f"{_AXOLOTL} and {_TRL}",
        "workspace",
        "one folder for all runs; each run has its own below it",
    ),
    "save_path": (_OPENRLHF, "workspace", "one folder for all runs; each run has its own below it"),
    "run_name": (_TRL, "name", None),
    "wandb_name": (_AXOLOTL, "name", None),
    "wandb_project": (f"{_AXOLOTL} and {_OPENRLHF}", "tracking.experiment", "runs are tracked with MLflow"),
    "mlflow_tracking_uri": (_AXOLOTL, "tracking.mlflow_uri", None),
    "mlflow_experiment_name": (_AXOLOTL, "tracking.experiment", None),
    "mlflow_run_name": (_AXOLOTL, "name", None),
    "hub_model_id": (
        f"{_AXOLOTL} and {_TRL}",
        "publish.registered_model_name*",
        "models go to the MLflow registry",
    ),
}

_STRIDED_ONLY = "this version has strided mode only, which samples in the training process"
_NO_SHARDING = "sharded training is not configured here; use `accelerate` settings of the environment"
_MLFLOW = "runs are tracked with MLflow (section `tracking`)"

# name -> (tool, why there is nothing to write). A name that ends in "*" is a prefix.
NOT_NEEDED: dict[str, tuple[str, str]] = {
    "rl": (_AXOLOTL, "every run of this project is EBFT; its knobs are in the section `ebft`"),
    "trl": (
        _AXOLOTL,
        f"{_STRIDED_ONLY}: `ebft.n_samples_per_prompt`, `ebft.generate_max_len`, `ebft.temperature`",
    ),
    "plugins": (_AXOLOTL, "a custom transform is `data.transform: module:function`"),
    "model_type": (_AXOLOTL, "the model's own configuration says its class"),
    "tokenizer_type": (_AXOLOTL, "the model's own configuration says its class"),
    "special_tokens": (_AXOLOTL, "the tokenizer's own special tokens are used"),
    "load_in_8bit": (_AXOLOTL, "quantised bases are not supported; use LoRA in bfloat16"),
    "load_in_4bit": (_AXOLOTL, "quantised bases are not supported; use LoRA in bfloat16"),
    "strict": (_AXOLOTL, "unknown keys are always errors"),
    "optimizer": (
        _AXOLOTL,
        "the optimiser is AdamW (`trainer.learning_rate`, `trainer.weight_decay`, betas)",
    ),
    "optim": (_TRL, "the optimiser is AdamW (`trainer.learning_rate`, `trainer.weight_decay`, betas)"),
    "tf32": (f"{_AXOLOTL} and {_TRL}", "`trainer.precision` is the one precision switch"),
    "pad_to_sequence_len": (_AXOLOTL, "rows are padded to the longest of their batch"),
    "eval_sample_packing": (_AXOLOTL, "evaluation rows are made as training rows are (`data.packing`)"),
    "group_by_length": (f"{_AXOLOTL} and {_TRL}", "use `data.packing` against padding"),
    "dataset_prepared_path": (_AXOLOTL, "caches live in the `workspace`, keyed by content"),
    "gradient_checkpointing_kwargs": (f"{_AXOLOTL} and {_TRL}", "`trainer.gradient_checkpointing` is enough"),
    "logging_steps": (f"{_AXOLOTL} and {_TRL}", "every step is logged"),
    "torch_compile": (f"{_AXOLOTL} and {_TRL}", "there is no such switch"),
    "ddp": (_AXOLOTL, _NO_SHARDING),
    "fsdp": (f"{_AXOLOTL} and {_TRL}", _NO_SHARDING),
    "fsdp_*": (f"{_AXOLOTL} and {_TRL}", _NO_SHARDING),
    "deepspeed": (f"{_AXOLOTL} and {_TRL}", _NO_SHARDING),
    "deepspeed_*": (_AXOLOTL, _NO_SHARDING),
    "zero_stage": (_OPENRLHF, _NO_SHARDING),
    "local_rank": (_AXOLOTL, _NO_SHARDING),
    "device_map": (_AXOLOTL, "`trainer.device` says where to train"),
    "resume_from_checkpoint": (
        f"{_AXOLOTL} and {_TRL}",
        "a run resumes from its newest checkpoint by itself",
    ),
    "auto_resume_from_checkpoints": (_AXOLOTL, "a run resumes from its newest checkpoint by itself"),
    "use_vllm": (_TRL, _STRIDED_ONLY),
    "adaptive_max_tokens": (_AXOLOTL, _STRIDED_ONLY),
    "gt_length_multiplier": (_AXOLOTL, _STRIDED_ONLY),
    "vllm_*": (f"{_AXOLOTL} and {_TRL}", _STRIDED_ONLY),
    "gpu_memory_utilization": (_AXOLOTL, _STRIDED_ONLY),
    "loss_type": (_TRL, "the loss is the policy gradient of the paper, averaged over action tokens"),
    "scale_rewards": (_TRL, "use `ebft.advantage_estimator: group_norm` to divide by the spread of a group"),
    "epsilon": (_TRL, "one update per rollout: there is no ratio to clip"),
    "use_kl_loss": (_OPENRLHF, "`ebft.kl_coef: 0` switches the penalty off"),
    "pretrain_mode": (_OPENRLHF, "`data.transform: text` is that mode"),
    "no_chat_template": (_OPENRLHF, "only `data.transform: chat` uses a chat template"),
    "critic_learning_rate": (_OPENRLHF, "the feature network is frozen"),
    "report_to": (_TRL, _MLFLOW),
    "use_wandb": (_OPENRLHF, _MLFLOW),
    "wandb_*": (f"{_AXOLOTL} and {_TRL}", _MLFLOW),
    "comet_*": (_AXOLOTL, _MLFLOW),
    "save_safetensors": (f"{_AXOLOTL} and {_TRL}", "weights are always saved as safetensors"),
    "save_strategy": (_TRL, "checkpoints are written every `trainer.save_every` steps"),
    "eval_strategy": (_TRL, "evaluations are made every `trainer.eval_every` steps"),
    "push_to_hub": (_TRL, "models go to the MLflow registry (section `publish`)"),
    "special_tokens_map": (_TRL, "the tokenizer's own special tokens are used"),
    "debug": (_AXOLOTL, "there is no such switch; try `ebft preview` and `ebft validate`"),
}

# our key -> values that other tools give to a key of that name -> hint
VALUES: dict[str, Mapping[object, str]] = {
    "ebft.whitening": {
        True: "write `feature` (the paper's) or `sample` (the authors' code)",
        False: "write `none`",
    },
    "trainer.lr_scheduler": {
        "constant_with_warmup": "write `constant`; warmup is `trainer.warmup_ratio`",
        "cosine_with_min_lr": "write `cosine`",
    },
    "trainer.precision": {
        "bf16": "write `bfloat16`",
        "fp32": "write `float32`",
        "fp16": "float16 is not offered; write `bfloat16`",
        "float16": "float16 is not offered; write `bfloat16`",
    },
    "trainer.attention": {
        "flex_attention": "write `flex`",
        "flash_attention_2": "that kernel cannot express EBFT's mask; write `auto`",
        "eager": "write `sdpa`",
    },
    "ebft.advantage_estimator": {"group_norm_std": "write `group_norm`", "grpo": "write `group_norm`"},
}
