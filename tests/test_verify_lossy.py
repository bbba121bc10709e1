"""`typical` and `threshold` against naive versions of their rules, and the settings of verifiers."""

import inspect
import json
import math
import pickle

import pytest
import torch
from cases import (
    SEED,
    Way,
    compare,
    draft_model,
    forward_widths,
    plain_model,
    refused,
    served,
    spec_model,
    strategy,
    ways,
)
from conftest import prompt
from oracle import ChainOracle, Oracle

from hf_specdec import VERIFIERS, DraftTree, SpecDecConfig, SpecDecError
from hf_specdec.verify import bind_verifier

TREE = (-1, 0, 0, 1, 1, 2, 3, 5, 5)


def random_tree(seed: int, vocabulary: int, parents=TREE, rows: int = 40) -> tuple[DraftTree, torch.Tensor]:
    """Distinct siblings, random scores; some nodes are padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(rows, len(parents), dtype=torch.long)
    above = torch.tensor(parents).repeat(rows, 1)
    for node in range(1, len(parents)):
        elder = [each for each in range(1, node) if parents[each] == parents[node]]
        shift = torch.randint(1, vocabulary - 1, (rows,), generator=generator)
        tokens[:, node] = (tokens[:, elder[0]] + shift) % vocabulary if elder else shift
    for row in range(rows // 4):
        gone = 1 + row % (len(parents) - 1)
        for node in range(gone, len(parents)):
            if node == gone or above[row, above[row, node]] < 0 < above[row, node]:
                above[row, node] = -1
    scores = torch.randn(rows, len(parents), vocabulary, generator=generator) * 2
    return DraftTree(tokens, above, torch.zeros_like(above, dtype=torch.bool)), scores


def paths(parents: list[int]) -> list[list[int]]:
    """The path to every node, root left out; none for padding."""
    found: dict[int, list[int]] = {0: []}
    for node, parent in enumerate(parents):
        if node and parent in found:
            found[node] = [*found[parent], node]
    return list(found.values())


@pytest.mark.parametrize("settings", [{}, {"posterior_threshold": 0.3}, {"posterior_alpha": 1.0}], ids=str)
@pytest.mark.parametrize("vocabulary", [4, 11])
def test_typical_takes_the_longest_then_likeliest_path(settings, vocabulary):
    tree, scores = random_tree(1, vocabulary)
    noise = torch.empty_like(scores).exponential_()
    acceptance = bind_verifier("typical", settings).rule(tree, scores, True, noise)
    full = {"posterior_threshold": 0.09, "posterior_alpha": 0.3, **settings}
    lengths = set()
    for row in range(len(scores)):
        laws = scores[row].double().softmax(-1)
        cutoff = [
            min(full["posterior_threshold"], full["posterior_alpha"] * math.exp(float((law * law.log()).sum())))
            for law in laws
        ]
        best: tuple[float, float, list[int]] = (0, 0.0, [])
        for path in paths(tree.parents[row].tolist()):
            edges = [(above, laws[above, tree.tokens[row, node]].item()) for above, node in zip([0, *path], path)]
            if all(probability > cutoff[above] for above, probability in edges):
                best = max(best, (len(path), sum(math.log(each) for _, each in edges), path))
        kept = [node for node in acceptance.path[row].tolist() if node >= 0]
        assert kept == best[2]
        assert acceptance.count[row] == len(kept)
        last = kept[-1] if kept else 0
        assert acceptance.next_token[row] == (scores[row, last].softmax(-1) / noise[row, last]).argmax()
        lengths.add(len(kept))
    assert len(lengths) > 2


def test_typical_asks_less_where_the_target_is_unsure():
    """At the same probability: refused by a law of two tokens, accepted by one that is flat otherwise."""
    tree = DraftTree.from_chains([0, 0], [[0], [0]])
    sure = torch.tensor([0.05, 0.95, *([0.0] * 98)])
    unsure = torch.cat([torch.tensor([0.05]), torch.full((99,), 0.95 / 99)])
    scores = torch.stack([sure, unsure]).log().unsqueeze(1).expand(2, 2, 100)
    acceptance = VERIFIERS["typical"].rule(tree, scores, True, torch.ones_like(scores))
    assert acceptance.count.tolist() == [0, 1]


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("known", [False, True], ids=["point mass", "drawn"])
def test_threshold_takes_what_is_likely_enough_beside_the_draft(sampling, threshold, known):
    tree, scores = random_tree(2, 5, parents=(-1, 0, 1, 2, 3))
    probs = torch.randn(scores.shape).softmax(-1)
    if known:
        tree = DraftTree(tree.tokens, tree.parents, tree.parents >= 0, probs)
    torch.manual_seed(3)
    acceptance = bind_verifier("threshold", {"threshold": threshold}).rule(tree, scores, sampling, None)
    torch.manual_seed(3)
    laws = scores.softmax(-1)
    last = laws[torch.arange(len(scores)), acceptance.count]
    following = torch.multinomial(last, 1).squeeze(1) if sampling else last.argmax(-1)
    assert torch.equal(acceptance.next_token, following)
    for row in range(len(scores)):
        count = 0
        while count < 4 and tree.parents[row, count + 1] == count:
            token = tree.tokens[row, count + 1]
            told = probs[row, count, token] if known else 1.0
            if not laws[row, count, token] > threshold * told:
                break
            count += 1
        assert acceptance.count[row] == count
    if threshold == 0:
        assert torch.equal(acceptance.count, (tree.parents >= 0).long().sum(1))


@pytest.mark.parametrize("name", ["typical", "threshold"])
def test_what_the_processors_rule_out_is_never_accepted(name):
    """However low the settings."""
    bound = bind_verifier(name, dict.fromkeys(VERIFIERS[name].settings, 0.0))
    tree = DraftTree.from_chains([0], [[1, 1]])
    scores = torch.tensor([[[0.0, float("-inf"), 0.0]] * 3])
    assert bound.rule(tree, scores, True, torch.ones_like(scores)).count.tolist() == [0]
    assert bound.rule(tree, scores, False, None).count.tolist() == [0]


@pytest.mark.parametrize("name", list(VERIFIERS))
def test_settings_are_keywords_of_the_rule_with_defaults_in_range(name):
    parameters = inspect.signature(VERIFIERS[name].rule).parameters
    assert list(parameters)[4:] == list(VERIFIERS[name].settings)
    for setting, (least, most) in VERIFIERS[name].settings.items():
        assert least <= parameters[setting].default <= most


def test_defaults_of_typical_are_those_of_medusa():
    parameters = inspect.signature(VERIFIERS["typical"].rule).parameters
    assert parameters["posterior_threshold"].default == 0.09
    assert parameters["posterior_alpha"].default == 0.3


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"verifier": "typical", "verifier_options": {"posterior_treshold": 0.1}},
            "Did you mean 'posterior_threshold'",
        ),
        ({"verifier": "threshold", "verifier_options": {"thresold": 0.1}}, "Did you mean 'threshold'"),
        ({"verifier": "exact", "verifier_options": {"threshold": 0.1}}, "'exact' has no settings"),
        ({"verifier": "block", "verifier_options": {"threshold": 0.1}}, "'typical' or 'threshold'"),
        ({"verifier": "threshold", "verifier_options": {"threshold": -0.1}}, "threshold=-0.1"),
        ({"verifier": "threshold", "verifier_options": {"threshold": float("nan")}}, "threshold=nan"),
        ({"verifier": "threshold", "verifier_options": {"threshold": float("inf")}}, "threshold=inf"),
        ({"verifier": "threshold", "verifier_options": {"threshold": True}}, "threshold=True"),
        ({"verifier": "threshold", "verifier_options": {"threshold": "0.5"}}, "threshold='0.5'"),
        ({"verifier": "typical", "verifier_options": {"posterior_threshold": 1.5}}, "from 0 to 1"),
        ({"verifier": "typical", "verifier_options": None}, "verifier_options=None"),
        ({"verifier": "typical", "verifier_options": [0.1]}, "verifier_options=[0.1]"),
        ({"verifier": "exact", "verifier_options": 3}, "verifier_options=3"),
        ({"verifer_options": {}}, "Did you mean 'verifier_options'"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(values, says):
    with pytest.raises(SpecDecError) as caught:
        SpecDecConfig.from_dict(values)
    assert says in str(caught.value)


CONFIGS = [
    SpecDecConfig(verifier="typical", verifier_options={"posterior_alpha": 0.5}),
    SpecDecConfig(verifier="threshold", verifier_options={"threshold": 2}),
    SpecDecConfig(verifier="threshold"),
    SpecDecConfig(verifier="block"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.verifier_options))
def test_options_go_there_and_back(config):
    again = SpecDecConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.to_dict() == config.to_dict()
    assert again.verifier_options == config.verifier_options
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_users_options_are_not_shared():
    options = {"threshold": 0.0}
    config = SpecDecConfig(verifier="threshold", verifier_options=options)
    options["threshold"] = 1.0
    assert config.verifier_options == {"threshold": 0.0}


def test_binding_leaves_the_table_alone():
    before = dict(VERIFIERS)
    bound = bind_verifier("threshold", {"threshold": 1.0})
    assert before == VERIFIERS and bound != VERIFIERS["threshold"]
    assert bind_verifier("exact") is VERIFIERS["exact"]
    facts = ("lossless", "uses_draft_probs", "uses_noise", "trees")
    assert all(getattr(bound, each) == getattr(VERIFIERS["threshold"], each) for each in facts)


def speculate(way: Way, request: SpecDecConfig, **options):
    """An enabled model's output under `SEED`."""
    torch.manual_seed(SEED)
    return spec_model().generate(
        **prompt(way.batch), do_sample=way.sample, top_k=0 if way.sample else None, max_new_tokens=24,
        return_dict_in_generate=True, assistant_strategy=request, **options,
    )  # fmt: skip


def wrong_text(batch: int) -> list[list[int]]:
    """A text that is nobody's."""
    return [[3 + (7 * row + 5 * step) % 90 for step in range(60)] for row in range(batch)]


@ways(["oracle-1"])
def test_threshold_0_accepts_everything(way):
    text = wrong_text(way.batch)
    config = SpecDecConfig(strategy=ChainOracle.of(text), verifier="threshold", verifier_options={"threshold": 0})
    output = speculate(way, config)
    stats = output.speculation
    assert stats.draft_acceptance_rate == 1.0 and stats.num_draft_tokens > 0
    assert stats.lossless is False and stats.to_dict()["lossless"] is False
    for row in range(way.batch):
        drafted = [index for index, own in enumerate(stats.rows[row].token_sources) if own]
        written = output.sequences[row, 24:].tolist()
        assert [written[index] for index in drafted] == [text[row][index] for index in drafted]


@ways(samples=(False,))
@pytest.mark.parametrize("threshold", [1, 1e6])
def test_a_large_threshold_is_the_targets_own_text_when_greedy(way, threshold):
    text = plain_model().generate(**prompt(way.batch), do_sample=False, max_new_tokens=24)[:, 24:].tolist()
    drafts = served(way.strategy, "threshold", text)
    config = SpecDecConfig(strategy=drafts, verifier="threshold", verifier_options={"threshold": threshold})
    pair = compare(way, assistant_strategy=config)
    assert pair.spec.speculation.num_accepted_draft_tokens == 0
    assert pair.spec.speculation.lossless is False


@ways(samples=(False,))
def test_typical_is_the_targets_own_text_when_greedy(way):
    text = plain_model().generate(**prompt(way.batch), do_sample=False, max_new_tokens=24)[:, 24:].tolist()
    config = SpecDecConfig(strategy=strategy(way.strategy, text), verifier="typical")
    assert compare(way, assistant_strategy=config).spec.speculation.lossless is False


@ways(samples=(True,))
def test_typical_that_accepts_nothing_is_the_text_of_the_seed(way):
    """The token after what was accepted is the one that plain `generate` would sample there."""
    options = {"posterior_threshold": 1.0, "posterior_alpha": 1e9}
    config = SpecDecConfig(
        strategy=strategy(way.strategy, wrong_text(way.batch)), verifier="typical", verifier_options=options
    )
    assert compare(way, assistant_strategy=config).spec.speculation.num_accepted_draft_tokens == 0


@ways(["oracle-0"], samples=(True,))
def test_typical_takes_the_settings_of_the_config(way):
    rates = []
    for posterior_threshold in (0.0, 0.09, 1.0):
        options = {"posterior_threshold": posterior_threshold, "posterior_alpha": 1e9}
        strategy_ = Oracle.of(wrong_text(way.batch))
        config = SpecDecConfig(strategy=strategy_, verifier="typical", verifier_options=options)
        rates.append(speculate(way, config).speculation.draft_acceptance_rate)
    assert rates[0] == 1.0 > rates[1] >= rates[2] == 0.0


def test_a_stop_ends_what_a_lossy_rule_accepts():
    way, text = Way("oracle-0", 1, False), wrong_text(1)
    config = SpecDecConfig(strategy=ChainOracle.of(text), verifier="threshold", verifier_options={"threshold": 0})
    free = speculate(way, config).sequences[0, 24:].tolist()
    stopped = speculate(way, config, eos_token_id=free[8]).sequences[0, 24:].tolist()
    assert stopped == free[: free.index(free[8]) + 1]


def test_a_draft_model_serves_every_verifier():
    for name, verifier in VERIFIERS.items():
        for way in (Way("draft_model", batch, sample) for batch in (1, 3) for sample in (False, True)):
            stats = speculate(way, SpecDecConfig(strategy=draft_model(), verifier=name)).speculation
            assert stats.lossless is verifier.lossless
            assert stats.verifier == name and stats.num_emitted_tokens == 24 * way.batch


def test_nothing_runs_with_options_that_do_not_fit():
    with refused(spec_model(), "has no settings"):
        spec_model().generate(
            **prompt(), assistant_strategy={"strategy": "suffix", "verifier_options": {"threshold": 1}}
        )
    with forward_widths(spec_model()) as widths:
        spec_model().generate(**prompt(), max_new_tokens=3, do_sample=False, assistant_strategy="suffix")
    assert widths
