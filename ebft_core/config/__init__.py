"""The run configuration: schema, YAML reader, errors. Imports without torch.

`schema.py` is the only place where a default is written; `loading.py` reads files and overrides and
turns every mistake into a `UserError`; `legacy.py` names our key for the names other tools use.
"""

from ebft_core.config.data_section import DataConfig, SourceConfig
from ebft_core.config.evaluate_section import EvaluateConfig
from ebft_core.config.loading import load_config, parse_config
from ebft_core.config.promotion_section import PromotionConfig
from ebft_core.config.retention_section import RetentionConfig
from ebft_core.config.schema import (
    EBFTConfig,
    FromScratchConfig,
    LoraConfig,
    ModelConfig,
    PublishConfig,
    RunConfig,
    TrackingConfig,
    TrainerConfig,
)
from ebft_core.config.sft_section import SFTConfig
from ebft_core.config.storage_section import StorageConfig
from ebft_core.config.structured_sections import OwnRewardConfig, RolloutConfig, VLLMConfig
from ebft_core.config.tasks_section import SandboxConfig

__all__ = [
    "DataConfig",
    "EBFTConfig",
    "EvaluateConfig",
    "FromScratchConfig",
    "LoraConfig",
    "ModelConfig",
    "OwnRewardConfig",
    "PromotionConfig",
    "PublishConfig",
    "RetentionConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SandboxConfig",
    "SourceConfig",
    "StorageConfig",
    "TrackingConfig",
    "TrainerConfig",
    "VLLMConfig",
    "load_config",
    "parse_config",
]
