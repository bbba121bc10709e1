"""A tokenizer and tiny models that can be saved to disk, for whatever takes a model by path."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_specdec.demo_prompts import PROMPTS

PROMPT = "the cat sat on the mat and the cat sat on the"
SENTENCES = [PROMPT, "the dog sat on the cat", "a naïve café on the mat", *(prompt.text for prompt in PROMPTS)]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
LAYERS = 6


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the sentences, so that every text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def make_model(vocabulary: int, seed: int, layers: int = LAYERS) -> LlamaForCausalLM:
    """A seeded Llama that never ends by itself."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def save_models(tokenizer: PreTrainedTokenizerFast, directory: Path, names: Sequence[str]) -> None:
    """Save some of `target`, `draft` and `chat` (the target with a chat template) as folders of a directory."""
    target = make_model(len(tokenizer), seed=1)
    made = {"target": target, "draft": make_model(len(tokenizer), 2, layers=1), "chat": target}
    for name in names:
        made[name].save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    if "chat" in names:
        with_template = PreTrainedTokenizerFast.from_pretrained(directory / "chat")
        with_template.chat_template = CHAT_TEMPLATE
        with_template.save_pretrained(directory / "chat")
