"""Speculative decoding for Hugging Face `generate`: `enable(model)`, then `model.generate(...,
assistant_strategy=...)`."""

from .config import SpecDecConfig
from .control import (
    Adaptive,
    Constant,
    Controller,
    ControlMemory,
    CostModel,
    Schedule,
    machine_key,
    read_costs,
    save_costs,
)
from .drafters import (
    Auto,
    Cascade,
    Drafter,
    DraftModel,
    DraftStrategy,
    Free,
    LayerSkip,
    Lookahead,
    LookaheadMemory,
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
from .templates import TreeTemplate, fastest_template, optimal_template, template
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
    "LayerSkip",
    "Lookahead",
    "LookaheadMemory",
    "Merge",
    "Plan",
    "PromptLookup",
    "QuantizedSelf",
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
    "TreeTemplate",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "enable",
    "fastest_template",
    "frequent_tokens",
    "known_strategies",
    "machine_key",
    "optimal_template",
    "read_costs",
    "register_strategy",
    "save_costs",
    "speculative_generate",
    "template",
    "unknown_name",
]
