"""Speculative decoding for Hugging Face `generate`: `enable(model)`, then `model.generate(...,
assistant_strategy=...)`."""

from .config import SpecDecConfig
from .drafters import (
    Cascade,
    Drafter,
    DraftModel,
    DraftStrategy,
    Free,
    LayerSkip,
    Merge,
    PromptLookup,
    QuantizedSelf,
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
    "Cascade",
    "DecodeView",
    "DraftModel",
    "DraftStrategy",
    "DraftTree",
    "Drafter",
    "Free",
    "LayerSkip",
    "Merge",
    "Plan",
    "PromptLookup",
    "QuantizedSelf",
    "Recycling",
    "RecyclingMemory",
    "RowStats",
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
    "register_strategy",
    "speculative_generate",
    "unknown_name",
]
