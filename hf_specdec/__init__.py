"""Speculative decoding for Hugging Face `generate`: `enable(model)`, then `model.generate(...,
assistant_strategy=...)`."""

from .config import SpecDecConfig
from .control import Adaptive, Constant, Controller, ControlMemory, CostModel, Schedule, machine_key, save_costs
from .drafters import (
    Auto,
    Cascade,
    Drafter,
    DraftModel,
    DraftStrategy,
    Free,
    Merge,
    PromptLookup,
    Recycling,
    RecyclingMemory,
    Suffix,
    SuffixMemory,
    frequent_tokens,
    known_strategies,
    register_strategy,
)
from .errors import SpecDecError, UnsupportedModelError, UnsupportedOptionError, unknown_name
from .generate import speculative_generate
from .mixin import SpeculativeGenerationMixin, enable
from .state import DecodeView, Plan
from .stats import RowStats, SpeculationStats, SpeculativeOutput, StepRecord
from .tree import DraftTree
from .verify import VERIFIERS

__version__ = "0.1.0"

__all__ = [
    "VERIFIERS",
    "Adaptive",
    "Auto",
    "Cascade",
    "Constant",
    "ControlMemory",
    "Controller",
    "CostModel",
    "DecodeView",
    "DraftModel",
    "DraftStrategy",
    "DraftTree",
    "Drafter",
    "Free",
    "Merge",
    "Plan",
    "PromptLookup",
    "Recycling",
    "RecyclingMemory",
    "RowStats",
    "Schedule",
    "SpecDecConfig",
    "SpecDecError",
    "SpeculationStats",
    "SpeculativeGenerationMixin",
    "SpeculativeOutput",
    "StepRecord",
    "Suffix",
    "SuffixMemory",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "enable",
    "frequent_tokens",
    "known_strategies",
    "machine_key",
    "register_strategy",
    "save_costs",
    "speculative_generate",
    "unknown_name",
]
