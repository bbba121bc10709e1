"""Draft strategies. One module each; importing it registers its name."""

from .adapter import CandidateAdapter
from .base import Drafter, DraftStrategy, known_strategies, register_strategy
from .combined import Auto, Cascade, Free, Merge
from .draft_model import DraftModel, frequent_tokens
from .layer_skip import LayerSkip
from .lookahead import Lookahead, LookaheadMemory
from .prompt_lookup import PromptLookup
from .quantized_self import QuantizedSelf
from .recycling import Recycling, RecyclingMemory
from .suffix import Suffix, SuffixMemory

__all__ = [
    "Auto",
    "CandidateAdapter",
    "Cascade",
    "DraftModel",
    "DraftStrategy",
    "Drafter",
    "Free",
    "LayerSkip",
    "Lookahead",
    "LookaheadMemory",
    "Merge",
    "PromptLookup",
    "QuantizedSelf",
    "Recycling",
    "RecyclingMemory",
    "Suffix",
    "SuffixMemory",
    "frequent_tokens",
    "known_strategies",
    "register_strategy",
]
