"""Every verifier through `generate`: which strategies may serve it, and the law of trees, with controls."""

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from cases import SEED, Way, compare, draft_model, forward_widths, plain_model, served, spec_model, ways
from conftest import prompt
from oracle import Oracle
from test_cases_law import FAIL, PASS, draws, joint_law, p_value, small
from test_draft_tree_laws import Wide
from transformers import set_seed
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_specdec
from hf_specdec import VERIFIERS, Drafter, DraftStrategy, DraftTree, SpecDecConfig, SpecDecError
from hf_specdec.drafters import CandidateAdapter, Cascade, DraftModel, Free, Merge, PromptLookup, Recycling, Suffix
from hf_specdec.generate import check_combination

STEPS, DRAWS = 4, 6000


@dataclasses.dataclass(frozen=True)
class Branching(DraftStrategy):
    """Draws the children of each node from a model's law without replacement, under the call's processors.

    Args:
        fixed: the first child is the likeliest token, a point mass, and the law of the others is without it.
        fault: "reversed" puts later draws first, "claimed" says of likeliest tokens that they were drawn.
    """

    model: Any
    width: int = 2
    levels: int = 2
    fixed: bool = False
    fault: str = ""

    @property
    def default_width(self):
        return self.width

    name: ClassVar[str] = "branching"
    default_draft_tokens: ClassVar[int] = 6
    sampled: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def build(self, target: Any, request: Any) -> Drafter:
        return _BranchingDrafter(self, request)


class _BranchingDrafter(Drafter):
    def __init__(self, settings: Branching, request: Any):
        self.settings, self.request = settings, request

    def propose(self, view, plan):
        levels = min(self.settings.levels, plan.depth)
        tokens = [torch.tensor(view.roots())]
        parents, drawn, laws = [-1], [False], []
        ends = [(0, [[] for _ in range(view.rows)])]
        for level in range(levels + 1):
            grown = []
            for node, paths in ends:
                law, children = self.children(view, paths)
                laws.append(law if level < levels else torch.zeros_like(law))
                if level == levels:
                    continue
                for rank, child in enumerate(children.unbind(1)):
                    tokens.append(child)
                    parents.append(node)
                    drawn.append(bool(self.settings.fault == "claimed" or rank or not self.settings.fixed))
                    grown.append((len(tokens) - 1, [[*own, int(new)] for own, new in zip(paths, child)]))
            ends = grown
        parent_tensor = torch.tensor(parents).expand(view.rows, -1)
        flags = torch.tensor(drawn).expand(view.rows, -1)
        return DraftTree(torch.stack(tokens, 1), parent_tensor, flags, torch.stack(laws, 1))

    def children(self, view, paths):
        """The law after a path of each row, shape `(B, V)`, and tokens of shape `(B, width)`."""
        texts = [[*view.tokens(row), *path] for row, path in enumerate(paths)]
        longest = max(map(len, texts))
        ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        with torch.no_grad():
            logits = self.settings.model(
                ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
            ).logits[:, -1]
        law = self.request.processors.process_paths(logits, paths, self.request.state).softmax(-1)
        width, fault = self.settings.width, self.settings.fault
        if fault == "claimed":
            return law, law.topk(width).indices
        if self.settings.fixed:
            best = law.argmax(-1, keepdim=True)
            rest = law.scatter(1, best, 0.0)
            rest = rest / rest.sum(-1, keepdim=True)
            return rest, torch.cat([best, torch.multinomial(rest, width - 1)], 1)
        children = torch.multinomial(law, width)
        return law, children.flip(1) if fault == "reversed" else children


@pytest.mark.parametrize(
    ("verifier", "options", "settings"),
    [
        ("exact", {"temperature": 0.6, "top_k": 3}, {}),
        ("rejection", {}, {}),
        ("rejection", {"temperature": 0.6, "top_k": 3}, {}),
        ("rejection", {}, {"fixed": True}),
        ("rejection", {"temperature": 0.6, "top_k": 3}, {"fixed": True}),
        ("rejection", {}, {"width": 3, "levels": 1}),
    ],
    ids=str,
)
def test_law_of_trees(verifier, options, settings):
    options = {"temperature": 1.0, "top_k": 0, **options}
    target = hf_specdec.enable(small(0))
    ids = draws(target, Branching(small(1), **settings), verifier, DRAWS, STEPS, **options)
    assert p_value(ids, joint_law(target, STEPS, **options)) > PASS


@pytest.mark.parametrize("fault", ["reversed", "claimed"])
def test_control_trees_that_were_drawn_otherwise(fault):
    target = hf_specdec.enable(small(0))
    ids = draws(target, Branching(small(1), fault=fault), "rejection", 2 * DRAWS, STEPS)
    assert p_value(ids, joint_law(target, STEPS, 1.0, 0)) < FAIL


def test_law_of_trees_in_a_ragged_batch():
    """Rows of a batch accept different counts; each has its own law."""
    target = hf_specdec.enable(small(0))
    set_seed(SEED)
    ids = target.generate(
        torch.tensor([[1, 0], [0, 0], [2, 3]]), attention_mask=torch.tensor([[1, 1], [0, 1], [1, 1]]),
        do_sample=True, top_k=0, max_new_tokens=STEPS, num_return_sequences=3000,
        assistant_strategy=SpecDecConfig(strategy=Branching(small(1)), verifier="rejection", max_draft_tokens=6),
    )[:3000, 2:]  # fmt: skip
    assert p_value(ids, joint_law(target, STEPS, 1.0, 0)) > PASS


def test_siblings_lift_acceptance():
    target = hf_specdec.enable(small(0))
    accepted = []
    for settings in ({"width": 1}, {"width": 2}, {"width": 3}):
        set_seed(SEED)
        output = target.generate(
            torch.tensor([[1, 0]]), do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=200,
            return_dict_in_generate=True,
            assistant_strategy=SpecDecConfig(
                strategy=Branching(small(1), levels=1, **settings), verifier="rejection", max_draft_tokens=3
            ),
        )  # fmt: skip
        accepted.append(output.speculation.mean_acceptance_length)
    assert accepted == sorted(accepted) and accepted[2] > accepted[0] + 0.1


def test_block_accepts_more_than_rejection():
    target = hf_specdec.enable(small(0))
    accepted = {}
    for verifier in ("rejection", "block"):
        set_seed(SEED)
        output = target.generate(
            torch.tensor([[1, 0]]), do_sample=True, top_k=0, max_new_tokens=25, num_return_sequences=400,
            return_dict_in_generate=True,
            assistant_strategy=SpecDecConfig(strategy=DraftModel(small(1)), verifier=verifier, max_draft_tokens=6),
        )  # fmt: skip
        accepted[verifier] = output.speculation.mean_acceptance_length
        assert output.speculation.lossless is True
    assert accepted["block"] > accepted["rejection"]


LOSSLESS = [name for name, each in VERIFIERS.items() if each.lossless]


@ways(samples=(False,))
@pytest.mark.parametrize("verifier", LOSSLESS)
def test_greedy_text_is_plain_generates(way, verifier):
    text = plain_model().generate(**prompt(way.batch), do_sample=False, max_new_tokens=24)[:, 24:].tolist()
    config = SpecDecConfig(strategy=served(way.strategy, verifier, text), verifier=verifier)
    stats = compare(way, assistant_strategy=config).spec.speculation
    assert stats.lossless is True and stats.to_dict()["lossless"] is True


@ways(["oracle-0.3"], samples=(False,))
@pytest.mark.parametrize("verifier", ["rejection", "typical"])
def test_greedy_text_of_trees_is_plain_generates(way, verifier):
    text = plain_model().generate(**prompt(way.batch), do_sample=False, max_new_tokens=24)[:, 24:].tolist()
    config = SpecDecConfig(strategy=Oracle.of(text, 0.2, siblings=2), verifier=verifier, max_draft_tokens=9)
    assert compare(way, assistant_strategy=config).spec.speculation.num_accepted_draft_tokens > 0


STRATEGIES: dict[str, Any] = {
    "suffix": Suffix,
    "prompt_lookup": PromptLookup,
    "draft_model": lambda: DraftModel(draft_model()),
    "draft_tree": lambda: Wide(draft_model()),
    "candidate_generator": lambda: CandidateAdapter(
        lambda input_ids: PromptLookupCandidateGenerator(num_output_tokens=3, max_length=100)
    ),
    "oracle": lambda: Oracle.of([[3, 4, 5]] * 3, siblings=1),
    "recycling": Recycling,
    "free": Free,
    "merge": lambda: Merge(["suffix", "prompt_lookup"]),
    "cascade": lambda: Cascade(["prompt_lookup", DraftModel(draft_model())]),
}
CANNOT = {
    ("candidate_generator", "rejection"),
    ("candidate_generator", "block"),
    ("candidate_generator", "threshold"),
}


@pytest.mark.parametrize("way", [Way("", 1, True), Way("", 3, False)], ids=["one", "ragged"])
@pytest.mark.parametrize("verifier", list(VERIFIERS))
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_combination_runs_or_is_refused_before_the_first_forward(name, verifier, way):
    chosen = STRATEGIES[name]()
    config = SpecDecConfig(strategy=chosen, verifier=verifier)
    call = {**prompt(way.batch), "do_sample": way.sample, "max_new_tokens": 12, "assistant_strategy": config}
    if (name, verifier) not in CANNOT:
        assert spec_model().generate(**call).shape == (way.batch, 36)
        return
    with forward_widths(spec_model()) as widths, pytest.raises(SpecDecError) as caught:
        spec_model().generate(**call)
    assert widths == [], "refused only after a forward pass"
    message = str(caught.value)
    assert f"verifier={verifier!r}" in message
    for other in VERIFIERS:
        if other != verifier:
            assert (repr(other) in message) == ((name, other) not in CANNOT)


def test_a_refusal_says_why():
    for config, says in (
        (SpecDecConfig(strategy=STRATEGIES["candidate_generator"](), verifier="block"), "the law that drafts were"),
        (SpecDecConfig(strategy="suffix", verifier="block", max_width=2), "takes chains alone; use exact or"),
        (SpecDecConfig(strategy="prompt_lookup", max_width=2), "proposes chains alone; leave max_width out"),
    ):
        with pytest.raises(SpecDecError, match=says):
            check_combination(config)
