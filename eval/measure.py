"""One call of `generate`, timed: the same inputs, seed, token count and clock for every method.

Seconds run from the call to the synchronised device after it. Prefill ends with the target's forward pass over the
prompt (the last of them, where a ragged batch takes several); what comes after is decoding. Tokens are counted up to
and including the first end-of-sequence token, or the one that completes a stop text, for all alike.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .config import PLAIN
from .memory import PeakMemory
from .methods import Method
from .task import Sample

OVERLAP = 32
"""Tokens of a prompt in which a stop text may begin."""


class ForwardClock:
    """Notes when forward passes of a model ended while active.

    Args:
        model: the target.
        counting: False leaves the model alone after the first pass, so that a compiled step stays whole.

    Attributes:
        ended: when each pass ended, the first one as seen from the synchronised device.
    """

    def __init__(self, model: PreTrainedModel, counting: bool):
        self._model = model
        self._counting = counting
        self.ended: list[float] = []

    def __enter__(self) -> "ForwardClock":
        self._handle = self._model.register_forward_hook(self._passed)
        return self

    def __exit__(self, *failure: object) -> None:
        self._handle.remove()

    def _passed(self, *args: object) -> None:
        if not self.ended:
            synchronise(self._model.device)
            if not self._counting:
                self._handle.remove()
        self.ended.append(time.perf_counter())


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def sampling_options(temperature: float) -> dict[str, Any]:
    """Arguments of `generate`: greedy at temperature 0."""
    if temperature:
        return {"do_sample": True, "temperature": temperature}
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def prompt_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample, turn: int, answers: Sequence[str]) -> list[int]:
    """Token ids of the prompt of a turn.

    Args:
        tokenizer: the target's; its chat template is used unless the sample says otherwise.
        sample: what is asked.
        turn: which of its turns.
        answers: the texts of the turns before.
    """
    chat = tokenizer.chat_template is not None if sample.chat is None else sample.chat
    if not chat:
        said = [text for pair in zip(sample.turns, answers) for text in pair] + [sample.turns[turn]]
        text = "\n\n".join(([sample.system] if sample.system else []) + said)
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "system", "content": sample.system}] if sample.system else []
    for question, answer in zip(sample.turns, answers):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": sample.turns[turn]})
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of shape `(B, L)`."""
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[pad] * (length - len(row)) + list(row) for row in rows], device=device),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows], device=device),
    }


class Meter:
    """Calls one model with one run's settings.

    Args:
        model: the target.
        tokenizer: its tokenizer.
        temperature: 0 decodes greedily.
        seed: set before every call, so that sampled texts of lossless methods agree.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, seed: int):
        self.model = model
        self.tokenizer = tokenizer
        self._seed = seed
        self._sampling = sampling_options(temperature)
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, (list, tuple)) else [] if ends is None else [ends])
        pad = model.generation_config.pad_token_id
        pad = tokenizer.pad_token_id if pad is None else pad
        self.pad = next(iter(self._ends), 0) if pad is None else pad

    def run(self, method: Method, samples: Sequence[Sample], max_new_tokens: int | None) -> dict[str, Any]:
        """All turns of a unit under a method: the method's entry of a row. A failure is part of the entry."""
        self._reach = 0
        turns: list[dict[str, Any]] = []
        try:
            with PeakMemory(self.model.device) as memory:
                for turn in range(len(samples[0].turns)):
                    turns.append(self._turn(method, samples, turn, turns, max_new_tokens))
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                torch.accelerator.empty_cache()
            told = f"{type(error).__name__}: {error}{self._overrun()}"
            return {"error": told, "turns": [], "peak_memory_bytes": None}
        return {"error": None, "turns": turns, "peak_memory_bytes": memory.peak_bytes}

    def _turn(
        self, method: Method, samples: Sequence[Sample], turn: int, before: list[dict[str, Any]], limit: int | None
    ) -> dict[str, Any]:
        prompts = [
            prompt_ids(self.tokenizer, each, turn, [past["text"][row] for past in before])
            for row, each in enumerate(samples)
        ]
        first = samples[0]
        stop = {"stop_strings": list(first.stop), "tokenizer": self.tokenizer} if first.stop else {}
        self._reach = max(map(len, prompts)) + (limit or first.max_new_tokens)
        inputs = pad_left(prompts, self.pad, self.model.device)
        torch.manual_seed(self._seed)
        synchronise(self.model.device)
        started = time.perf_counter()
        with ForwardClock(self.model, counting=method.kind != PLAIN) as clock:
            output = self.model.generate(
                **inputs,
                max_new_tokens=limit or first.max_new_tokens,
                pad_token_id=self.pad,
                return_dict_in_generate=True,
                **self._sampling,
                **stop,
                **method.arguments,
            )
            synchronise(self.model.device)
        seconds = time.perf_counter() - started
        if not clock.ended:
            raise RuntimeError(
                "The model's forward pass cannot be observed, so prefill and decoding cannot be told apart."
            )
        rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        new = [self._cut(row, first.stop, prompt) for row, prompt in zip(rows, prompts)]
        speculation = getattr(output, "speculation", None)
        forwards, prefilled = len(clock.ended), clock.ended[0]
        if speculation is not None:  # parts of the target may draft, which the clock counts too
            forwards, prefilled = speculation.target_forwards, clock.ended[speculation.prompt_groups - 1]
        if method.kind == PLAIN:
            forwards = max(map(len, new))
        return {
            "prompt_tokens": [len(each) for each in prompts],
            "token_ids": new,
            "text": [self.tokenizer.decode(each, skip_special_tokens=True) for each in new],
            "seconds": seconds,
            "prefill_seconds": prefilled - started,
            "target_forwards": forwards,
            "speculation": None
            if speculation is None
            else {
                **speculation.to_dict(),
                "drafted_at_depth": list(speculation.drafted_at_depth),
                "accepted_at_depth": list(speculation.accepted_at_depth),
            },
            "token_sources": None
            if speculation is None
            else [list(map(int, row.token_sources[: len(ids)])) for row, ids in zip(speculation.rows, new)],
        }

    def _overrun(self) -> str:
        """What may be behind an error: a text that is longer than the model has positions for."""
        positions = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is None or self._reach <= positions:
            return ""
        return f" (prompt and answer take up to {self._reach} tokens, and the model has {positions} positions)"

    def _cut(self, row: list[int], stop: Sequence[str], prompt: Sequence[int] = ()) -> list[int]:
        """The tokens of a row up to its first end-of-sequence token or the one that completes a stop text.

        `generate` goes on or fills up after that while other rows decode, and so does a draft that runs over it.
        """
        end = next((index + 1 for index, token in enumerate(row) if token in self._ends), len(row))
        before = list(prompt[-OVERLAP:])
        length = len(self._decode(before))

        def stopped(tokens: int) -> bool:
            text = self._decode(before + row[:tokens])
            return any(text.find(each, max(0, length - len(each) + 1)) >= 0 for each in stop)

        if stop and stopped(end):
            return row[: bisect_left(range(end), True, key=stopped)]
        return row[:end]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
