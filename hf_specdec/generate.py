"""The `custom_generate` callable: check the options, build the request, run the loop, return transformers' outputs."""

from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .attention import packed_attention
from .capability import check_model, restore_buffers
from .compat import CACHE_NAME, decode_context, lost_keywords
from .config import SpecDecConfig
from .control import Scope
from .drafters import DraftStrategy
from .errors import SpecDecError, UnsupportedOptionError
from .kernels import calling
from .loop import decode
from .options import check_options
from .request import Request
from .verify import VERIFIERS, Verifier


def speculative_generate(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    assistant_strategy: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Speculative decoding for `model.generate(..., custom_generate=speculative_generate, assistant_strategy=...)`.

    `generate` does not hand `streamer`, `synced_gpus` and `assistant_model` to a callable; they are refused here. Use
    `hf_specdec.enable(model)` to have them.

    Args:
        assistant_strategy: see `SpecDecConfig.of`.

    Returns:
        `LongTensor` of ids, or `SpeculativeOutput` under `return_dict_in_generate=True`.
    """
    for name in lost_keywords():
        raise UnsupportedOptionError(
            f"`generate` does not hand `{name}` to a custom_generate callable. Call "
            f"`hf_specdec.enable(model)` and then `model.generate(..., assistant_strategy=..., {name}=...)`."
        )
    if assistant_strategy is None:
        raise SpecDecError('custom_generate=speculative_generate needs assistant_strategy=..., for example "suffix".')
    config = SpecDecConfig.of(assistant_strategy)
    return run(model, input_ids, logits_processor, stopping_criteria, generation_config, config, {}, model_kwargs)


def run(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    config: SpecDecConfig,
    extras: dict[str, Any],
    model_kwargs: dict[str, Any],
) -> Any:
    """Decode with what `generate` prepared.

    Args:
        config: what the user asked for.
        extras: keywords that `generate` does not hand on: `streamer`, `synced_gpus`, `tokenizer`,
            `assistant_tokenizer`.
        model_kwargs: what goes to `forward`, the cache included.
    """
    check_options(vars(generation_config))
    check_model(model, model_kwargs.get(CACHE_NAME))
    check_combination(config)
    check_cache_argument(input_ids, generation_config, model_kwargs)
    embeds = model_kwargs.get("inputs_embeds")
    if not input_ids.shape[1] and (embeds is None or not embeds.shape[1]):
        raise SpecDecError("The prompt has no tokens, so there is nothing to go on with; give at least one.")
    with ExitStack() as stack:
        stack.enter_context(calling())
        strategy = config.resolved
        request = Request(
            model=model,
            input_ids=input_ids,
            generation_config=generation_config,
            processors=logits_processor,
            criteria=stopping_criteria,
            model_kwargs=model_kwargs,
            verifier=config.bound_verifier,
            verifier_name=config.verifier,
            strategy=strategy.name,
            plan=config.plan(),
            extras=extras,
        )
        stack.push(lambda error, *_: request.restore_cache() if error else None)
        with request.undisturbed():
            request.drafter = strategy.build(request.target, request)
        described = f"{strategy.name} {strategy.to_dict()}"
        scope = Scope(config.plan, request.drafter, model, described, len(request.stats.rows))
        request.controller = config.bound_schedule.build(scope)
        stack.callback(request.release)
        stack.callback(restore_buffers, model)
        stack.callback(request.finish_drafting)
        stack.callback(request.controller.finish)
        stack.enter_context(packed_attention(model))
        stack.enter_context(decode_context(model))
        decode(request)
    return request.result()


def check_combination(config: SpecDecConfig) -> None:
    """Raise `SpecDecError` when the strategy cannot serve the verifier, or either the width that was asked for."""
    strategy = config.resolved
    if config.max_width is not None and config.max_width > 1:
        trees = [name for name, each in VERIFIERS.items() if each.trees]
        for able, what, advice in (
            (strategy.trees, f"strategy {strategy.name!r} proposes", "leave max_width out"),
            (config.bound_verifier.trees, f"verifier {config.verifier!r} takes", f"use {' or '.join(trees)}"),
        ):
            if not able:
                raise SpecDecError(f"max_width={config.max_width}, but {what} chains alone; {advice}.")
    if reason := mismatch(strategy, config.bound_verifier):
        usable = [name for name, each in VERIFIERS.items() if not mismatch(strategy, each)]
        raise SpecDecError(
            f"verifier={config.verifier!r} {reason}. Use verifier={' or '.join(map(repr, usable))}, which strategy "
            f"{strategy.name!r} can serve."
        )


def mismatch(strategy: DraftStrategy, verifier: Verifier) -> str | None:
    """Why the strategy cannot serve the verifier, or None where it can."""
    if verifier.uses_draft_probs and not strategy.knows_law:
        return f"needs the law that drafts were drawn from, and strategy {strategy.name!r} cannot say it"
    return None


def check_cache_argument(
    input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    """Raise `UnsupportedOptionError` when a filled cache comes without the ids of what it holds."""
    cache = model_kwargs.get(CACHE_NAME)
    assert cache is not None
    filled = cache.get_seq_length() if cache.layers else 0
    mask = model_kwargs.get("attention_mask")
    columns = getattr(generation_config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    if filled and (input_ids.shape[1] <= filled or columns > input_ids.shape[1]):
        raise UnsupportedOptionError(
            f"`{CACHE_NAME}` holds {filled} tokens but `input_ids` has {input_ids.shape[1]} columns. Pass the ids of "
            "the whole text, those in the cache included."
        )
