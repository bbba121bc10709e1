"""Draft strategies. One module each; importing it registers its name."""

from .adapter import CandidateAdapter
from .base import Drafter, DraftStrategy, known_strategies, register_strategy
from .draft_model import DraftModel, frequent_tokens
from .layer_skip import LayerSkip
from .prompt_lookup import PromptLookup
from .suffix import Suffix, SuffixMemory

__all__ = [
    "CandidateAdapter",
    "DraftModel",
    "DraftStrategy",
    "Drafter",
    "LayerSkip",
    "PromptLookup",
    "Suffix",
    "SuffixMemory",
    "frequent_tokens",
    "known_strategies",
    "register_strategy",
]
