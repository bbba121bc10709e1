"""One `generate` call: everything the loop works with, and what it hands back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .cache import fill_cache
from .compat import CACHE_NAME, sliding_window_of
from .control.base import Controller
from .drafters.base import Drafter
from .ends import RowEnds
from .noise import SharedNoise, generator_kept
from .outputs import TokenOutputs
from .processing import NodeProcessors, RowStopping
from .state import DecodeState, DecodeView, Plan
from .stats import RowStats, SpeculationStats, SpeculativeOutput
from .target import Target
from .tree import DraftTree
from .verify import Acceptance, Verifier, follow, most_likely

PLACEHOLDER_IDS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")


class Request:
    """The state of one call apart from the decoded tokens.

    Args:
        model: the user's model.
        input_ids: the prompt, `LongTensor` of shape `(rows, L)`, padding included.
        generation_config: as `generate` prepared it.
        processors: logits processors, as `generate` prepared them.
        criteria: stopping criteria, as `generate` prepared them.
        model_kwargs: what goes to `forward`.
        verifier: the acceptance rule with its settings.
        verifier_name: its name, for the statistics.
        strategy: name of the draft strategy, for the statistics.
        plan: the largest that a round may have.
        extras: `streamer`, `synced_gpus`, `tokenizer`, `assistant_tokenizer`, where given.
    """

    drafter: Drafter
    controller: Controller

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
        verifier: Verifier,
        verifier_name: str,
        strategy: str,
        plan: Plan,
        extras: dict[str, Any],
    ):
        self.model = model
        self.input_ids = input_ids
        self.generation_config = generation_config
        self.model_kwargs = model_kwargs
        self.sampling = bool(generation_config.do_sample)
        self.verifier = verifier
        self.largest_plan = plan
        self.extras = extras
        self.streamer = extras.get("streamer")
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = int(config.vocab_size)
        self.unreadable = sorted(
            {value for name in PLACEHOLDER_IDS if isinstance(value := getattr(model.config, name, None), int)}
        )
        self.processors = NodeProcessors(processors, input_ids, self.vocab_size)
        rows, length = input_ids.shape
        self.stopping = RowStopping(criteria, rows, length)
        limit = self.stopping.max_length
        self.ends = RowEnds(self.stopping, rows, length)
        mask = model_kwargs.get("attention_mask")
        embeds = model_kwargs.get("inputs_embeds")
        columns = length if embeds is None else embeds.shape[1]
        shortest = columns if mask is None else int(mask.bool().sum(1).min())
        slots = None if limit is None else max(limit + (columns if not length else 0), columns + 1)
        self.prompt_tokens = rows * (columns - (model_kwargs[CACHE_NAME].get_seq_length() if length else 0))
        self.target = Target(model, model_kwargs, slots, plan.nodes, shortest, input_ids.device)
        self.outputs = TokenOutputs(generation_config, rows)
        self.stats = SpeculationStats(strategy, verifier_name, verifier.lossless, [RowStats() for _ in range(rows)])
        self.noise: SharedNoise | None = None
        self._streamed = 0
        self._lesson: list[torch.Tensor] | None = None
        self._cached_rows: dict[int, Any] = {}
        self._state: DecodeState | None = None
        self._cache_is_callers = bool(getattr(model_kwargs[CACHE_NAME], "_is_user_defined", False))
        self.returns_cache = bool(generation_config.return_dict_in_generate) or self._cache_is_callers

    @property
    def state(self) -> DecodeState:
        """What has been decoded so far."""
        assert self._state is not None
        return self._state

    def begin(self, cached: Sequence[int]) -> DecodeState:
        """The state after the prompt's forward.

        Args:
            cached: prompt tokens in the cache per row.
        """
        pad = self.generation_config._pad_token_tensor
        pad_id = 0 if pad is None else int(pad.reshape(-1)[0])
        self._state = DecodeState(self.input_ids, self.model_kwargs.get("attention_mask"), cached, pad_id)
        self.outputs.windows = [sliding_window_of(layer) for layer in self.model_kwargs[CACHE_NAME].layers]
        return self.state

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """The draft strategy may draw inside without changing what plain `generate` would draw.

        A verifier that reads draft probabilities needs the draft to be independent of its own draws, so there the
        generator runs on.
        """
        if self.sampling and self.verifier.uses_draft_probs:
            yield
            return
        with generator_kept(self.input_ids.device):
            yield

    def finish_drafting(self) -> None:
        """The call has ended for the drafter."""
        with self.undisturbed():
            self.drafter.finish()

    def judge(
        self, tree: DraftTree, logits: torch.Tensor, state: DecodeState, plan: Plan | None
    ) -> tuple[torch.Tensor, Acceptance]:
        """Processed scores of every node, shape `(B, N, V)`, and what the verifier makes of them.

        `plan` is None for the prompt's own forward.
        """
        scores, depth = logits.to(state.device), plan.depth if plan else 0
        self._lesson = None
        if plan and plan.taught and self.drafter.top_tokens:
            choices, *self._lesson = most_likely(logits, self.drafter.top_tokens)
            if self.verifier.lossless and not self.sampling and not len(self.processors):
                return scores, follow(tree, choices.to(state.device))  # as every lossless rule does when greedy
        if len(self.processors):
            scores = self.processors.process(scores, tree.tokens.tolist(), tree.parents.tolist(), state)
        noise = None
        if self.sampling and self.verifier.uses_noise:
            noise = self.noise_at(depth + 1, scores)
            if depth:
                noise = noise.gather(1, tree.depths.unsqueeze(2).expand(-1, -1, noise.shape[2]))
        return scores, self.verifier.rule(tree, scores, self.sampling, noise)

    def noise_at(self, steps: int, scores: torch.Tensor) -> torch.Tensor:
        """The draws of plain sampling for the next `steps` tokens of each row: shape `(B, steps, V)`."""
        state = self.state
        if self.noise is None:
            self.noise = SharedNoise(len(self.stats.rows), scores.shape[-1], scores.device)
        taken = [state.emitted_count(row) for row in range(state.rows)]
        self.noise.forget_before(self.ends.judged_steps(state))
        return self.noise.at([range(first, first + steps) for first in taken], state.row_ids)

    def teach(self, state: DecodeState, tree: DraftTree) -> None:
        """Tell the drafter what the target expects after each node of a tree that was judged, before anything is
        committed."""
        if self._lesson:
            with self.undisturbed():
                self.drafter.learn(state.view, tree, *self._lesson)

    def start_drafting(self, state: DecodeState) -> None:
        """Start the drafter, and tell it what the target expected after each token of the prompt."""
        if not state.rows:
            return
        with self.undisturbed():
            self.drafter.start(state.view)
        if not self.drafter.top_tokens or not self.controller.teaches:
            return
        tops = [self.target.prompt_top(row_id, self.drafter.top_tokens) for row_id in state.row_ids]
        self.target.forget_prompt()
        known = [top for top in tops if top is not None]
        prompts = [list(state.tokens(row)[: state.prompt_length(row)]) for row in range(state.rows)]
        if len(known) < state.rows or any(len(ids) > len(prompt) for (ids, _), prompt in zip(known, prompts)):
            return  # positions without token ids
        seen = [prompt[len(prompt) - len(ids) :] for (ids, _), prompt in zip(known, prompts)]
        if not all(seen):
            return  # a row that is all padding
        before = [prompt[: len(prompt) - len(own) + 1] for prompt, own in zip(prompts, seen)]
        tree = DraftTree.from_chains([own[0] for own in seen], [own[1:] for own in seen])
        tokens, probs = (pad_sequence([top[part] for top in known], batch_first=True) for part in (0, 1))
        with self.undisturbed():
            self.drafter.learn(DecodeView.of_sequences(before), tree, tokens, probs)

    def keep_scores(
        self, state: DecodeState, paths: Sequence[Sequence[int]], scores: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Collect the scores along each row's accepted path, root included."""
        for row, path in enumerate(paths):
            self.outputs.add_scores(state, row, [0, *path], scores, logits)

    def stream(self, state: DecodeState, accepted: Sequence[int], emitted: Sequence[Sequence[int]]) -> None:
        """Hand the streamer every output step that all rows have passed, one call per step as plain `generate`
        does."""
        if self.streamer is None:
            return
        if len(self.stats.rows) == 1 and hasattr(self.streamer, "on_round"):
            self.streamer.on_round(accepted=accepted[0], emitted=len(emitted[0]))
        self._stream_until(self.ends.judged_steps(state), state)

    def _stream_until(self, steps: int, state: DecodeState) -> None:
        if self.streamer is None or steps <= self._streamed:
            return
        columns = state.sequences(steps)[:, state.input_length :].cpu()
        for step in range(self._streamed, steps):
            self.streamer.put(columns[:, step])
        self._streamed = steps

    def leave(self, state: DecodeState, leaving: set[int], staying: list[int]) -> None:
        """Rows that ended leave: their K/V is released, or put aside where the caller gets the cache."""
        cache = self.target.cache
        assert cache is not None
        if self.returns_cache:
            for row in leaving:
                self._cached_rows[state.row_ids[row]] = cache.row(row, state.length(row), copied=bool(staying))
        if not staying:
            cache.release()
        else:
            self.target.keep(staying)
        state.keep(staying)
        if staying and self.stats.num_spec_steps:
            with self.undisturbed():
                self.drafter.keep(list(staying))

    def unfinished(self) -> bool:
        """Some row is still decoding, here or (under `synced_gpus`) in another process."""
        synced = bool(self.extras.get("synced_gpus"))
        return self.model._has_unfinished_sequences(not self.state.rows, synced, device=self.input_ids.device)

    def release(self) -> None:
        """Leave the generator where plain `generate` would leave it after as many output steps."""
        if self.noise is not None and self._state is not None:
            counts = [len(self._state.emitted(row)) for row in range(len(self.stats.rows))]
            steps = max(counts) if self._state.rows else self.ends.steps
            self.noise.finish(steps)

    def result(self) -> Any:
        """What `generate` returns: ids, or `SpeculativeOutput` under `return_dict_in_generate`."""
        state, steps = self.state, self.ends.steps
        cache = self._filled_cache(state, steps) if self.returns_cache else None
        self._stream_until(steps, state)
        if self.streamer is not None:
            self.streamer.end()
        for row_id in range(len(self.stats.rows)):
            self.stats.trim(row_id, self.ends.end(row_id))
        sequences = state.sequences(steps)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        self.stats.target_forwards = self.target.forwards
        self.stats.prompt_groups = self.target.prompt_groups
        self.stats.draft_forwards = self.drafter.forwards
        self.stats.choices = self.controller.report()
        outputs = self.outputs.finish(steps)
        return SpeculativeOutput(sequences=sequences, speculation=self.stats, **{CACHE_NAME: cache}, **outputs)

    def _filled_cache(self, state: DecodeState, steps: int) -> Any:
        """The cache of the call as plain `generate` leaves it: all columns but the last."""
        rows = [self._cached_rows[row] for row in range(len(self.stats.rows))]
        return fill_cache(self.model_kwargs[CACHE_NAME], rows, state.columns, state.prompt_columns + steps - 1)

    def restore_cache(self) -> None:
        """Give the caller's own cache its prompt back, after a call that failed."""
        state, slots = self._state, self.target.cache
        if not self._cache_is_callers or state is None or slots is None:
            return
        for row, row_id in enumerate(state.row_ids):
            self._cached_rows[row_id] = slots.row(row, slots.capacity, copied=False)
        self._filled_cache(state, 1)
