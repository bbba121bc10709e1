"""What the case tests share: the ways a case is run, an oracle draft, and the comparison with plain `generate`.

`compare` is the assertion behind most cases: same ids as plain `generate` under the same seed, and the global
generator left in the same state.
"""

import copy
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from conftest import PAD, VOCABULARY, prompt, tiny
from oracle import ChainOracle, Oracle
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, set_seed
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec.drafters import DraftModel, LayerSkip, PromptLookup, QuantizedSelf, Suffix
from hf_specdec.drafters.base import DraftStrategy
from hf_specdec.layers import decoder_layers

SEED = 7
NEW_TOKENS = 24
STRATEGIES = (
    "oracle-0", "oracle-0.3", "oracle-1", "tree-0.3", "pruned-0.3", "prompt_lookup", "suffix", "draft_model",
    "layer_skip", "quantized_self",
)  # fmt: skip
ORACLES = STRATEGIES[:3]
SOME = ("oracle-0.3", "tree-0.3", "prompt_lookup", "draft_model")
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


class Way(NamedTuple):
    """One way to run a case."""

    strategy: str
    batch: int
    sample: bool


OWN_WAYS = tuple(
    Way(name, batch, sample)
    for name, turned in (
        ("layer_skip", False), ("skip_set", True), ("quantized_self", False), ("quantized_tree", True),
        ("bridge", False), ("bridge", True),
    )
    for batch, sample in ((1, turned), (3, not turned))
)  # fmt: skip
"""Drafts by the target's own parts, by its quantised copy and across a bridge, so that each kind is met by one row and
by three, greedy and sampled."""
FEW_OWN_WAYS = tuple(way for way in OWN_WAYS if way.batch == 3 and (way.sample or way.strategy == "quantized_tree"))
"""One or two of each kind, for tests of many rows."""


def ways(
    strategies: Sequence[str] = STRATEGIES,
    batches: Sequence[int] = (1, 3),
    samples: Sequence[bool] = (False, True),
    also: Sequence[Way] = (),
) -> pytest.MarkDecorator:
    """Parametrise a test over strategies, batch sizes (3 is ragged) and greedy or sampling.

    Args:
        also: ways beside these, where their batch and way of choosing tokens are asked for.
    """
    rows = [Way(*row) for row in ((s, b, d) for s in strategies for b in batches for d in samples)]
    rows = list(dict.fromkeys([*rows, *(way for way in also if way.batch in batches and way.sample in samples)]))
    return pytest.mark.parametrize(
        "way", rows, ids=[f"{way.strategy}-b{way.batch}-{'sample' if way.sample else 'greedy'}" for way in rows]
    )


def own_ways_in_turn(names: str, values: Sequence[Any], sample: bool = False) -> pytest.MarkDecorator:
    """Parametrise a test over these values, each with the next of `FEW_OWN_WAYS`.

    Args:
        sample: only with those that sample.
    """
    turns = [way for way in FEW_OWN_WAYS if way.sample or not sample]
    rows = [(*(value if "," in names else (value,)), turns[index % len(turns)]) for index, value in enumerate(values)]
    return pytest.mark.parametrize(f"{names},way", rows, ids=lambda part: getattr(part, "strategy", None))


@dataclass(frozen=True)
class Replay(Oracle):
    """The oracle with blocks of 8."""

    default_draft_tokens: ClassVar[int] = 8


@dataclass(frozen=True)
class TreeReplay(Replay):
    """The oracle with trees: two wrong siblings in front of every drafted token, eight deep for a single row."""

    siblings: int = 2

    default_draft_tokens: ClassVar[int] = 24


class QuantizedTree(QuantizedSelf):
    """The quantised copy drafts trees, three deep for a single row."""

    default_draft_tokens: ClassVar[int] = 9
    default_depth: ClassVar[int | None] = 3
    default_width: ClassVar[int] = 3


@dataclass(frozen=True)
class PrunedReplay(TreeReplay):
    """The oracle with trees, of which the default schedule verifies what it finds worth it."""

    default_schedule: ClassVar[str | None] = None


REPLAYS: dict[str, type[Replay]] = {"oracle": Replay, "tree": TreeReplay, "pruned": PrunedReplay}


@functools.cache
def plain_model(family: str = "llama", attn_implementation: str = "sdpa") -> PreTrainedModel:
    """A shared tiny target that is never enabled. Not to be changed."""
    return tiny(family, attn_implementation)


@functools.cache
def spec_model(family: str = "llama", attn_implementation: str = "sdpa") -> PreTrainedModel:
    """A shared, enabled copy of `plain_model`. Not to be changed."""
    return hf_specdec.enable(tiny(family, attn_implementation))


@functools.cache
def draft_model() -> PreTrainedModel:
    """The target with some noise on its weights: it is right now and then. Not to be changed."""
    model = tiny()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return model


def quieten(model: PreTrainedModel, first: int, scale: float = 0.02) -> PreTrainedModel:
    """Layers from `first` on add little to the residual stream."""
    layers = decoder_layers(model)
    assert layers is not None
    with torch.no_grad():
        for layer in layers[first:]:
            for weight in layer.parameters():
                if weight.dim() > 1:
                    weight.mul_(scale)
    return model


@functools.cache
def bridged_draft() -> PreTrainedModel:
    """`draft_model` in the ids of `tokenizer(permuted=True)`. Not to be changed."""
    model = copy.deepcopy(draft_model())
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[[0, 1, 2, *range(VOCABULARY - 1, 2, -1)]])
    return model


def strategy(name: str, texts: Sequence[Sequence[int]] = ()) -> DraftStrategy:
    """The strategy of a way; `texts` is what an oracle replays. The number behind its name is its error rate."""
    kind, _, error_rate = name.partition("-")
    if kind in REPLAYS:
        twice = [[*text, *text] for text in texts]  # it drafts past the end
        return REPLAYS[kind].of(twice, float(error_rate))
    return MAKERS[kind]()


MAKERS: dict[str, Callable[[], DraftStrategy]] = {
    "prompt_lookup": lambda: PromptLookup(max_ngram=3, min_ngram=1),
    "suffix": Suffix,
    "draft_model": lambda: DraftModel(draft_model()),
    "layer_skip": lambda: LayerSkip(exit_layer=1),
    "skip_set": lambda: LayerSkip(skip_attention=[0], skip_mlp=[1]),
    "quantized_self": lambda: QuantizedSelf(scheme="int4_weight_only"),
    "quantized_tree": lambda: QuantizedTree(scheme="int4_weight_only"),
    "bridge": lambda: DraftModel(bridged_draft(), tokenizer=tokenizer(permuted=True)),
}


def served(name: str, verifier: str, texts: Sequence[Sequence[int]]) -> DraftStrategy:
    """The strategy of a way, in a form that may serve this verifier."""
    chosen = strategy(name, texts)
    if isinstance(chosen, Oracle) and not hf_specdec.VERIFIERS[verifier].trees:
        return ChainOracle(chosen.text, chosen.error_rate)
    return chosen


def tokenizers(way: Way) -> dict[str, Any]:
    """What a call must be given for the strategy of a way: across a bridge the target's tokenizer."""
    return {"tokenizer": tokenizer()} if way.strategy == "bridge" else {}


@dataclass
class Pair:
    """Outputs of a plain and of a speculative run of the same call."""

    plain: Any
    spec: Any
    prompt_length: int
    plain_options: dict[str, Any] = field(default_factory=dict)
    spec_options: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> list[list[int]]:
        """New ids of each row, padding included."""
        return new_ids(self.spec, self.prompt_length)


def new_ids(output: Any, prompt_length: int) -> list[list[int]]:
    """New ids of each row, padding included."""
    return output.sequences[:, prompt_length:].tolist()


def row_length(ids: Sequence[int], eos: Sequence[int]) -> int:
    """How many ids belong to a row: up to its first EOS, which counts."""
    return next((index + 1 for index, token in enumerate(ids) if token in eos), len(ids))


def call(model: PreTrainedModel, inputs: dict[str, Any], way: Way, seed: int = SEED, **options: Any) -> Any:
    """`generate` after `set_seed`, with a dict returned."""
    options = {**tokenizers(way), **options}
    if not {"max_length", "generation_config", "max_new_tokens"} & set(options):
        options["max_new_tokens"] = NEW_TOKENS
    set_seed(seed)
    return model.generate(**{**inputs, "do_sample": way.sample, "return_dict_in_generate": True, **options})


@functools.cache
def _base_text(batch: int, sample: bool, seed: int) -> list[list[int]]:
    inputs = prompt(batch)
    return new_ids(call(plain_model(), inputs, Way("", batch, sample), seed), inputs["input_ids"].shape[1])


def base_text(way: Way, inputs: dict[str, Any] | None = None, seed: int = SEED, **options: Any) -> list[list[int]]:
    """What plain `generate` emits without any stop."""
    if inputs is None and not options:
        return [list(ids) for ids in _base_text(way.batch, way.sample, seed)]
    inputs = prompt(way.batch) if inputs is None else inputs
    return new_ids(call(plain_model(), inputs, way, seed, **options), inputs["input_ids"].shape[1])


def compare(
    way: Way,
    *,
    inputs: dict[str, Any] | None = None,
    replay: Sequence[Sequence[int]] | None = None,
    models: tuple[PreTrainedModel, PreTrainedModel] | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    assistant_strategy: Any = None,
    seed: int = SEED,
    **options: Any,
) -> Pair:
    """Run a call plainly and speculatively; ids and generator state must be equal.

    Args:
        replay: what an oracle drafts; by default the text of the plain run.
        models: the plain and the enabled target.
        fresh: makes options that keep state, once for each run.
        assistant_strategy: by default the strategy of `way`.
    """
    inputs = prompt(way.batch) if inputs is None else inputs
    plain, spec = models or (plain_model(), spec_model())
    length = inputs["input_ids"].shape[1]
    plain_options = {**options, **fresh()}
    expected = call(plain, inputs, way, seed, **plain_options)
    state = torch.get_rng_state()
    if assistant_strategy is None:
        texts = new_ids(expected, length) if replay is None else replay
        assistant_strategy = strategy(way.strategy, texts)
    spec_options = {**options, **fresh()}
    got = call(spec, inputs, way, seed, assistant_strategy=assistant_strategy, **spec_options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(torch.get_rng_state(), state), "the generator is not where plain `generate` leaves it"
    return Pair(expected, got, length, plain_options, spec_options)


@contextmanager
def refused(model: PreTrainedModel, *names: str, error: type[Exception] = hf_specdec.SpecDecError) -> Iterator[None]:
    """The block raises `error`, its message holds one of `names`, and the model never runs."""
    with forward_widths(model) as widths, pytest.raises(error) as caught:
        yield
    assert any(name.lower() in str(caught.value).lower() for name in names), str(caught.value)
    assert widths == [], "refused only after a forward pass"


@contextmanager
def suppress_refusal(*names: str) -> Iterator[None]:
    """The block either passes or is refused with one of these names in the message."""
    try:
        yield
    except ValueError as error:
        if not any(name in str(error) for name in names):
            raise


@contextmanager
def forward_widths(model: PreTrainedModel) -> Iterator[list[int]]:
    """Positions of each forward pass of the model while the block runs."""
    widths: list[int] = []

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        widths.append((kwargs["inputs_embeds"] if ids is None else ids).shape[1])

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield widths
    finally:
        handle.remove()


class Copy(LogitsProcessor):
    """Makes the token that followed the last earlier occurrence of the current one nearly certain."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            earlier = [index for index in range(len(ids) - 1) if ids[index] == ids[-1]]
            if earlier:
                scores[row, ids[earlier[-1] + 1]] += 50.0
        return scores


PHRASE = (10, 11, 12, 13, 70, 14, 15, 16)


def copying(batch: int) -> dict[str, torch.Tensor]:
    """Prompts that end with `PHRASE` and its first two tokens; under `Copy`, the text goes on repeating it."""
    inputs = prompt(batch)
    inputs["input_ids"][:, -len(PHRASE) - 2 :] = torch.tensor(PHRASE + PHRASE[:2])
    inputs["attention_mask"][:] = (inputs["input_ids"] != PAD).long()
    return inputs


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` to `work(count - 1)` at once, switching threads as often as possible. Raises what they raised."""
    gate, errors = threading.Barrier(count), []

    def run(index: int) -> None:
        try:
            gate.wait(timeout=30)
            work(index)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.ends == 0, "put after end"
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1


@functools.cache
def tokenizer(permuted: bool = False) -> PreTrainedTokenizerFast:
    """96 tokens: special ones, letters and digits, and pairs of letters, so that stop strings cut through tokens."""
    singles = [chr(code) for start, count in ((97, 26), (65, 26), (48, 10)) for code in range(start, start + count)]
    pairs = [first + second for first in "abcdef" for second in "abcde"][: 96 - 3 - len(singles)]
    words = ["<pad>", "<bos>", "<eos>", *singles, *pairs, " "][:96]
    if permuted:
        words = words[:3] + words[:2:-1]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [(pair[0], pair[1]) for pair in pairs if pair in vocabulary]
    base = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    base.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=base, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All of a model that a call must leave as it is."""
    weights = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in model.state_dict().items()
    }
    return {
        "class": type(model),
        "config": model.config.to_dict(),
        "attention": {name: module.config._attn_implementation for name, module in configured(model)},
        "generation_config": model.generation_config.to_dict(),
        "weights": weights,
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
            for name, module in model.named_modules()
        },
        "attributes": sorted(vars(model)),
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
    }


def configured(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Modules that hold a config with an attention implementation."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation")
    ]
