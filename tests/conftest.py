"""Tiny seeded fp32 models as rows of a table, and the prompts and calls that the suites share.

A row added to `FAMILIES` is picked up by every suite that runs over the table. Models are built once per process;
`tiny` hands out a fresh copy, so a test may change what it gets. Nothing here touches the global generator.
"""

import copy
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import config

VOCABULARY = 96
PAD = 0
IMAGE_TOKEN = 90  # ids from 90 up never occur in text: they are placeholders of the vision models
TEXT_IDS = (3, 88)
IMAGE_TOKENS = 4  # placeholders per image in every vision row
PADDINGS = (0, 5, 17)  # left padding of the three rows of a ragged batch
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GQA: dict[str, Any] = {**SIZE, "num_key_value_heads": 2}
MIXED_LAYERS = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Args:
        model: class in `transformers`.
        config: config class in `transformers`.
        options: arguments of the config; a callable makes them (for nested configs).
        window: the sliding window of at least one layer, or None.
        images: makes what goes with one image per row, from `(input_ids, generator)`; None for text models.
        attention: attention implementations to test; the first is what `tiny` builds by default.
        std: standard deviation of the weights; large enough for greedy text that varies.
        salt: another draw of the weights, where the first writes a dull text.
    """

    model: str
    config: str
    options: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    window: int | None = None
    images: Callable[[torch.Tensor, torch.Generator], dict[str, torch.Tensor]] | None = None
    attention: tuple[str, ...] = ("sdpa", "eager")
    std: float = 0.4
    salt: int = 0


def _vision(config: str, **more: Any) -> Any:
    """A vision tower's config of the size of the text models."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return getattr(transformers, config)(**{**sizes, "image_size": 8, **more})


def _pixels(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One image of 8 x 8 per row."""
    return {"pixel_values": torch.randn(len(ids), 3, 8, 8, generator=generator)}


def _gemma3_images(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tokens of one image see each other in both directions."""
    return {**_pixels(ids, generator), "token_type_ids": (ids == IMAGE_TOKEN).long()}


def _paligemma_images(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The whole prompt is a prefix whose tokens see each other in both directions."""
    return {**_pixels(ids, generator), "token_type_ids": torch.zeros_like(ids)}


def _qwen2_vl_images(ids: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A 4 x 4 grid of 2 x 2 patches per row, which the tower merges to `IMAGE_TOKENS`."""
    return {
        "pixel_values": torch.randn(len(ids) * 16, 3 * 2 * 2 * 2, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids)),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
    }


def _qwen2_vl_options() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    vision = {"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
    return {
        "text_config": {**GQA, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": None},
        "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
    }


def _llava_options() -> dict[str, Any]:
    return {
        "text_config": transformers.LlamaConfig(**GQA),
        "vision_config": _vision("CLIPVisionConfig", patch_size=4, projection_dim=16, vocab_size=VOCABULARY),
        "image_token_index": IMAGE_TOKEN,
        "image_seq_length": IMAGE_TOKENS,
        "vision_feature_layer": -1,
    }


def _paligemma_options() -> dict[str, Any]:
    return {
        "text_config": transformers.GemmaConfig(**GQA, **SPECIAL, head_dim=8),
        "vision_config": _vision("SiglipVisionConfig", patch_size=4),
        "image_token_index": IMAGE_TOKEN,
        "projection_dim": 32,
        "hidden_size": 32,
        "vocab_size": VOCABULARY,
    }


def _gemma3_vlm_options() -> dict[str, Any]:
    return {
        "text_config": transformers.Gemma3TextConfig(**GEMMA3),
        "vision_config": _vision("SiglipVisionConfig", patch_size=2),
        "mm_tokens_per_image": IMAGE_TOKENS,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 91,
        "eoi_token_index": 92,
        "tie_word_embeddings": False,
    }


SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
GEMMA3 = {**GQA, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED_LAYERS, "query_pre_attn_scalar": 8}
GEMMA2 = {**GQA, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
GEMMA3N = {
    **GQA,
    **SPECIAL,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "layer_types": MIXED_LAYERS * 2,
    "num_kv_shared_layers": 2,  # the last two layers read the K/V of the first two
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
QWEN3_MIXED = {**GQA, "head_dim": 8, "use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED_LAYERS}
MIXTRAL = {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
OPT = {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": VOCABULARY, **SPECIAL}
STARCODER2 = {**GQA, "sliding_window": 8}
COHERE = {**GQA, **SPECIAL, "logit_scale": 1.0}
FALCON = {**SIZE, **SPECIAL, "alibi": False, "new_decoder_architecture": False, "multi_query": True}
GPTJ = {**GPT2, "rotary_dim": 4, "tie_word_embeddings": False}
GPT_OSS = {**GQA, **SPECIAL, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED_LAYERS}
GPT_OSS |= {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
LLAMA4 = {**GQA, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_local_experts": 2}
LLAMA4 |= {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": [1]}
COHERE2 = {**COHERE, "head_dim": 8, "sliding_window": 8, "layer_types": MIXED_LAYERS}
DEEPSEEK_V3 = {
    **SIZE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", GQA),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**GQA, "sliding_window": 8}, window=8),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", GQA),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**GQA, "head_dim": 8}),
    "qwen3_mixed": Family("Qwen3ForCausalLM", "Qwen3Config", QWEN3_MIXED, window=8),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", GEMMA2, window=8, attention=("eager",)),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3, window=8, std=0.3),
    "gemma3n": Family("Gemma3nForCausalLM", "Gemma3nTextConfig", GEMMA3N, window=8),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "opt": Family("OPTForCausalLM", "OPTConfig", OPT),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZE),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {**GQA, **SPECIAL}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK_V3),
    "cohere": Family("CohereForCausalLM", "CohereConfig", COHERE),
    "cohere2": Family("Cohere2ForCausalLM", "Cohere2Config", COHERE2, window=8),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", STARCODER2, window=8),
    "falcon": Family("FalconForCausalLM", "FalconConfig", FALCON, attention=("sdpa",)),
    "gptj": Family("GPTJForCausalLM", "GPTJConfig", GPTJ, attention=("eager",), std=1.0, salt=1),
    "gpt_oss": Family("GptOssForCausalLM", "GptOssConfig", GPT_OSS, window=8, attention=("eager",)),
    "llama4": Family("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", _qwen2_vl_options, images=_qwen2_vl_images),
    "llava": Family("LlavaForConditionalGeneration", "LlavaConfig", _llava_options, images=_pixels),
    "gemma3_vlm": Family(
        "Gemma3ForConditionalGeneration", "Gemma3Config", _gemma3_vlm_options, window=8, images=_gemma3_images
    ),
    "paligemma": Family(
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig", _paligemma_options, images=_paligemma_images
    ),
}
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.images is None]
VISION_FAMILIES = [name for name, family in FAMILIES.items() if family.images is not None]
WINDOWED_FAMILIES = [name for name, family in FAMILIES.items() if family.window is not None]


def randomise(model: PreTrainedModel, std: float, seed: int) -> PreTrainedModel:
    """Draw every weight matrix from a normal law of this deviation; `seed` and nothing else decides the values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def without_special_tokens(model: PreTrainedModel) -> PreTrainedModel:
    """No EOS unless a test sets one, so that every call runs to its length limit."""
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=None, pad_token_id=PAD)
    return model.eval()


@functools.cache
def _built(family: str, seed: int) -> PreTrainedModel:
    row = FAMILIES[family]
    options = row.options() if callable(row.options) else copy.deepcopy(row.options)
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, row.model)(getattr(transformers, row.config)(**options))
    model = randomise(model.float(), row.std, zlib.crc32(family.encode()) + row.salt + seed)
    return without_special_tokens(model)


def tiny(family: str = "llama", attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A fresh copy of the tiny model of this family; equal arguments give equal weights."""
    model = copy.deepcopy(_built(family, seed))
    model.set_attn_implementation(attn_implementation or FAMILIES[family].attention[0])
    return model


def prompt(batch: int = 1, family: str = "llama", length: int = 24, seed: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of shape `(batch, length)`, and pixels for a vision family.

    A batch of one has no padding; row b of a larger one has `PADDINGS[b]` columns of it on the left. The second half
    of each row repeats the first, so that lookup strategies find something.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    ids = torch.full((batch, length), PAD)
    mask = torch.zeros(batch, length, dtype=torch.long)
    row_family = FAMILIES[family]
    for row in range(batch):
        start = 0 if batch == 1 else PADDINGS[row % len(PADDINGS)]
        real = length - start
        half = torch.randint(*TEXT_IDS, ((real + 1) // 2,), generator=generator)
        ids[row, start:] = half.repeat(2)[:real]
        mask[row, start:] = 1
        if row_family.images is not None:
            ids[row, start + 1 : start + 1 + IMAGE_TOKENS] = IMAGE_TOKEN
    inputs = {"input_ids": ids, "attention_mask": mask}
    if row_family.images is not None:
        inputs |= row_family.images(ids, generator)
    return inputs


def plain(model: PreTrainedModel, seed: int | None = None, **kwargs: Any) -> Any:
    """Plain `generate`; a seed is set first when one is given."""
    if seed is not None:
        torch.manual_seed(seed)
    kwargs.setdefault("max_new_tokens", 20)
    kwargs.setdefault("do_sample", False)
    return model.generate(**kwargs)


def new_tokens(inputs: dict[str, torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """What a call added to its prompt, of shape `(rows, emitted)`."""
    return output[:, inputs["input_ids"].shape[1] :] if "input_ids" in inputs else output


class ForwardCounter:
    """Counts the forward passes of a model while the block runs; with `parts`, those of its modules too."""

    def __init__(self, model: torch.nn.Module, parts: bool = False):
        self.modules = list(model.modules()) if parts else [model]
        self.count = 0

    def __enter__(self) -> "ForwardCounter":
        def hook(*_: Any) -> None:
            self.count += 1

        self.handles = [module.register_forward_pre_hook(hook) for module in self.modules]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global generator, in whatever order the tests run."""
    torch.manual_seed(0)


@pytest.fixture
def constant_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count drafts, rounds or forwards, or that need drafts: the default schedule reads the clock."""
    monkeypatch.setattr(config, "DEFAULT_SCHEDULE", "constant")


@pytest.fixture(params=["constant", "adaptive"])
def each_schedule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with as many drafts as there may be, and with those that the default schedule finds worth it."""
    monkeypatch.setattr(config, "DEFAULT_SCHEDULE", request.param)
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
