"""Tokenizers that split the same text differently, and a model that repeats its context in whatever ids it reads."""

import functools
import json
from typing import Any

import torch
from text_models import SENTENCES, make_model, make_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specdec.compat import CACHE_NAME

OTHER_SENTENCES = [
    "def count(words):\n    return {word: words.count(word) for word in words}",
    "the mat on the cat: naïve dogs sat, and 1234 cats sat on 56 mats.",
    *[text[::2] for text in SENTENCES],
    *SENTENCES[::3],
]
PROMPTS = [
    "the cat sat on the mat and the cat sat on the",
    "a naïve café",
    "the dog sat on the cat. the dog sat on the mat and",
]


@functools.cache
def target_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, no BOS."""
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


@functools.cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with other merges and other special tokens, and a token that was added later."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(OTHER_SENTENCES, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>", pad_token="<pad>"
    )
    wrapped.add_tokens(["the cat"])
    return wrapped


@functools.cache
def sentencepiece_tokenizer(legacy: bool = False) -> PreTrainedTokenizerFast:
    """`▁` for spaces, one before every text, bytes where a character is unknown, and a BOS.

    Args:
        legacy: spaces are put by normalizers, as in the tokenizers of the first Llamas.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.train_from_iterator(OTHER_SENTENCES[:8], trainers.BpeTrainer(vocab_size=300))
    learnt = json.loads(raw.to_str())["model"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


TOKENIZERS = {
    "byte_level": byte_level_tokenizer,
    "sentencepiece": sentencepiece_tokenizer,
    "legacy": functools.partial(sentencepiece_tokenizer, legacy=True),
}


def letters(words: str, special: tuple[str, ...] = ("<eos>",)) -> PreTrainedTokenizerFast:
    """One token per letter, in this order, after the special ones."""
    vocabulary = {word: index for index, word in enumerate([*special, *words])}
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    base.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=base, **({"eos_token": special[0]} if special else {}))


def inputs(batch: int) -> dict[str, torch.Tensor]:
    """Prompts in the target's ids, padded on the left."""
    return dict(target_tokenizer()(PROMPTS[:batch], return_tensors="pt", padding=True, return_token_type_ids=False))


@functools.cache
def target() -> PreTrainedModel:
    """A random target. Not to be changed."""
    return make_model(len(target_tokenizer()), seed=1, layers=2).eval()


@functools.cache
def draft(name: str) -> PreTrainedModel:
    """A random draft model for a tokenizer of the table. Not to be changed."""
    return make_model(len(TOKENIZERS[name]()) + 5, seed=2, layers=1).eval()


class Induction(PreTrainedModel, GenerationMixin):
    """Goes on as the text did after the longest, latest earlier occurrence of its end; else with token 0.

    Its keys are the ids, its values their positions, so that it works from any cache that it is given.
    """

    config_class = LlamaConfig
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.embed_tokens = torch.nn.Embedding(config.vocab_size, 1)
        self.post_init()

    @classmethod
    def of(cls, vocabulary: int) -> "Induction":
        """For ids below `vocabulary`."""
        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
            head_dim=1, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return cls(config).eval()

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embed_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = kwargs.get(CACHE_NAME)
        cache = DynamicCache(config=self.config) if cache is None else cache
        rows, width = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(cache.get_seq_length(), cache.get_seq_length() + width).expand(rows, -1)
        keys, values = cache.update(
            input_ids.float()[:, None, :, None], position_ids.expand(rows, -1).float()[:, None, :, None], 0
        )
        ids, places = keys[:, 0, :, 0].long(), values[:, 0, :, 0].long()
        size = ids.shape[1]
        if attention_mask is not None and attention_mask.dim() == 4:
            seen = attention_mask.expand(rows, 1, width, size)[:, 0]
        else:
            seen = (torch.arange(size) <= torch.arange(size - width, size).unsqueeze(1)).expand(rows, -1, -1)
            if attention_mask is not None:
                seen = seen & attention_mask.bool().unsqueeze(1)
        logits = torch.zeros(rows, width, self.config.vocab_size)
        for row in range(rows):
            for node in range(width):
                slots = seen[row, node].nonzero().squeeze(1)
                slots = slots[places[row, slots].argsort(stable=True)]
                logits[row, node, continuation(ids[row, slots].tolist())] = 9.0
        return CausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], past_key_values=cache)


def continuation(ids: list[int]) -> int:
    """What followed the longest, latest earlier occurrence of the end of these ids."""
    best = (0, 0)
    for end in range(1, len(ids)):
        match = 0
        while match < min(end, 12) and ids[end - 1 - match] == ids[-1 - match]:
            match += 1
        best = max(best, (match, end))
    return ids[best[1]] if best[0] else 0
