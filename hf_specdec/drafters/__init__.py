"""Draft strategies. One module each; importing it registers its name."""

from .adapter import CandidateAdapter
from .base import Drafter, DraftStrategy, known_strategies, register_strategy
from .draft_model import DraftModel, frequent_tokens
from .prompt_lookup import PromptLookup
from .quantized_self import QuantizedSelf
from .suffix import Suffix, SuffixMemory

__all__ = [
    "CandidateAdapter",
    "DraftModel",
    "DraftStrategy",
    "Drafter",
    "PromptLookup",
    "QuantizedSelf",
    "Suffix",
    "SuffixMemory",
    "frequent_tokens",
    "known_strategies",
    "register_strategy",
]
