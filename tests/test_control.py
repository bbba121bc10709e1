"""The adaptive schedule against simulated machines, whose clock is the simulation's own."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_specdec.control import Adaptive, AdaptiveController, ControlMemory, CostModel, Scope, load_costs, save_costs
from hf_specdec.control.acceptance import ChainAcceptance, ValueCalibration
from hf_specdec.control.adaptive import Learned
from hf_specdec.control.cost import isotonic
from hf_specdec.drafters.recycling import USUAL_GAIN
from hf_specdec.errors import SpecDecError
from hf_specdec.state import DecodeView, Plan
from hf_specdec.stats import StepRecord
from hf_specdec.tree import DraftTree, RowTree

LONGEST = 12
FLAT, STEEP = 0.01, 0.3


@dataclass
class Machine:
    """A target whose plain step takes 1.

    Args:
        width: what each further token of a block adds.
        draft: a draft model's forward; None looks drafts up at no cost.
        jump: added to any block of more than one token.
        noise: relative deviation of each time.
    """

    width: float = FLAT
    draft: float | None = 0.1
    jump: float = 0.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def block(self, tokens: int) -> float:
        return (1 + self.width * (tokens - 1) + self.jump * (tokens > 1)) * self.shaken()

    def shaken(self) -> float:
        return max(0.5, self.rng.gauss(1, self.noise)) if self.noise else 1.0


def controller(machine: Machine, longest: int = LONGEST, learned: Learned | None = None, width: int = 1):
    drafter = SimpleNamespace(
        looks_up=machine.draft is None,
        runs_model=machine.draft is not None,
        forwards=0,
        top_tokens=0,
        drafts_untaught=False,
        usual_gain=USUAL_GAIN,
    )
    largest = Plan(longest, width, longest + 1)
    return AdaptiveController(Scope(lambda rows: largest, drafter, None), learned or Learned())


def chains_of(view: DecodeView, depth: int) -> DraftTree:
    return DraftTree.from_chains(view.roots(), [[1] * depth] * view.rows)


def run(
    machine: Machine,
    control: AdaptiveController,
    acceptance: Callable[[int], float],
    tokens: int,
    seed: int = 0,
    rows: int = 1,
) -> float:
    """Seconds for so many tokens of the slowest row; `acceptance` of a drafted token, by tokens emitted so far."""
    rng = random.Random(seed)
    emitted, seconds = [0] * rows, 0.0
    control.start(100 * rows, Machine(machine.width, machine.draft, machine.jump).block(100 * rows))
    while rows and min(emitted) < tokens:
        left = [count for count in emitted if count < tokens]
        view = DecodeView.of_sequences([[0]] * len(left))
        rooms = [tokens - count for count in left]
        plan = control.plan(view, rooms)
        assert 0 <= plan.depth <= LONGEST and plan.nodes <= LONGEST + 1
        drafting = 0.0
        if plan.depth and machine.draft is not None:
            drafting = plan.depth * machine.draft * machine.shaken()
            control._scope.drafter.forwards += plan.depth
        tree = chains_of(view, plan.depth)
        if plan.depth:
            tree = control.prune(view, tree)
        depth = tree.size - 1
        accepted = []
        for count in left:
            right = itertools.takewhile(bool, (rng.random() < acceptance(count) for _ in range(depth)))
            accepted.append(min(sum(1 for _ in right), tokens - count - 1))
        reached = [min(hits + 1, depth) for hits in accepted]
        took = machine.block(len(left) * (depth + 1))
        seconds += drafting + took
        control.observe(
            StepRecord(
                plan=plan,
                rows=len(left),
                nodes=tree.size,
                context=1,
                drafted=[depth] * len(left),
                reached=reached,
                accepted=accepted,
                paths=[list(range(1, hits + 1)) for hits in accepted],
                draft_forwards=plan.depth if machine.draft is not None else 0,
                draft_seconds=drafting,
                verify_seconds=took,
                step_seconds=drafting + took,
            )
        )
        emitted = [count + hits + 1 for count, hits in zip(left, accepted)]
        emitted = [count for count in emitted if count < tokens] or emitted[:1]
        if min(emitted) >= tokens:
            break
    return seconds


def expected(rate: float, length: int) -> float:
    return sum(rate**depth for depth in range(length + 1))


def best_constant(machine: Machine, rates: Sequence[float]) -> float:
    """Tokens per second of the best constant length, where each rate holds for as many tokens."""
    quiet = Machine(machine.width, machine.draft, machine.jump)

    def seconds_per_token(length: int) -> float:
        cost = quiet.block(length + 1) + length * (machine.draft or 0.0)
        return sum(cost / expected(rate, length) for rate in rates) / len(rates)

    return 1 / min(map(seconds_per_token, range(LONGEST + 1)))


MACHINES = {
    "flat": Machine(),
    "steep": Machine(STEEP),
    "costly draft": Machine(FLAT, 0.3),
    "lookup": Machine(0.05, None),
    "jump": Machine(0.05, None, 0.5),
}


def speed(machine: Machine, acceptance: Callable[[int], float], tokens: int, runs: int = 3) -> float:
    """Tokens per second over several seeds."""
    own = Machine(machine.width, machine.draft, machine.jump, machine.noise)
    return runs * tokens / sum(run(own, controller(own), acceptance, tokens, seed) for seed in range(runs))


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.8, 0.9])
def test_close_to_the_best_constant_length(name, rate):
    machine = MACHINES[name]
    reached = speed(machine, lambda count: rate, 2000, runs=6)
    assert reached >= 0.97 * best_constant(machine, [rate])


@pytest.mark.parametrize("name", MACHINES)
def test_follows_a_changing_acceptance(name):
    machine, rates = MACHINES[name], [0.3, 0.9, 0.5, 0.8]
    reached = speed(machine, lambda count: rates[count // 100 % 4], 1200)
    assert reached >= 0.95 * best_constant(machine, rates)


def test_the_classic_setting_has_its_known_optimum_and_speed_up():
    """A target of ten times the draft's cost, acceptance 0.8: Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8."""
    machine = Machine(0.0, 0.1)
    rates = [expected(0.8, length) / (1 + 0.1 * length) for length in range(LONGEST + 1)]
    best = max(range(LONGEST + 1), key=rates.__getitem__)
    closed = (1 - 0.8 ** (best + 1)) / (0.2 * (1 + 0.1 * best))
    assert (best, rates[best]) == (6, pytest.approx(closed))
    assert speed(machine, lambda count: 0.8, 1200) == pytest.approx(closed, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", MACHINES)
def test_drafts_that_are_always_wrong_cost_little(name, noise):
    machine = Machine(**{**vars(MACHINES[name]), "noise": noise})
    assert speed(machine, lambda count: 0.0, 500) >= 0.98


@pytest.mark.parametrize("name", ["flat", "lookup"])
def test_noise_does_not_switch_good_drafts_off(name):
    machine = Machine(**{**vars(MACHINES[name]), "noise": 0.12})
    assert speed(machine, lambda count: 0.8, 500) >= 0.9 * best_constant(machine, [0.8])


def test_two_slow_rounds_do_not_switch_drafting_off():
    control = controller(Machine())
    assert run(Machine(), control, lambda count: 0.8, 60) < 60
    for _ in range(2):
        control._costs.observe_block(5, 3.0)
    assert control.plan(DecodeView.of_sequences([[0]]), [50]).depth > 2


def test_a_batch_is_as_wide_as_pays_for_all_rows():
    machine = Machine(0.05, 0.1)
    one, many = controller(machine), controller(machine)
    run(machine, one, lambda count: 0.8, 300)
    run(machine, many, lambda count: 0.8, 300, rows=8)
    alone = one.plan(DecodeView.of_sequences([[0]]), [50]).depth
    together = many.plan(DecodeView.of_sequences([[0]] * 8), [50] * 8).depth
    assert 0 < together < alone


def test_rows_without_room_do_not_lengthen_drafts():
    control = controller(Machine(0.05, 0.1))
    run(Machine(0.05, 0.1), control, lambda count: 0.9, 300)
    view = DecodeView.of_sequences([[0]] * 4)
    assert control.plan(view, [2, 2, 2, 50]).depth < control.plan(view, [50] * 4).depth
    assert control.plan(view, [2, 2, 1, 2]).depth <= 1
    assert control.plan(view, [1] * 4).depth == 0


def tree_of(values: Sequence[float], parents: Sequence[int]) -> DraftTree:
    row = RowTree(0)
    for token, (value, parent) in enumerate(zip(values, parents), start=1):
        row.add(parent, token, value)
    return DraftTree.from_rows([row])


def test_nodes_are_kept_down_to_the_one_that_does_not_pay():
    control = controller(Machine(0.1, None), width=4)
    for tokens in (1, 2, 4, 8, 12) * 20:
        control._costs.observe_block(tokens, 1 + 0.1 * (tokens - 1))
    view = DecodeView.of_sequences([[0]])
    control.plan(view, [50])
    kept = control.prune(view, tree_of([0.9, 0.05, 0.8, 0.04, 0.7], [0, 0, 1, 3, 3]))
    assert kept.tokens.tolist() == [[0, 1, 3, 5]]
    assert kept.parents.tolist() == [[-1, 0, 1, 2]]
    control.plan(view, [50])
    assert control.prune(view, tree_of([0.05, 0.04], [0, 0])).size == 1


@pytest.mark.parametrize(("block", "untaught", "taught"), [(2.3, True, False), (1.3, True, True), (2.3, False, True)])
def test_teaching_is_left_out_where_a_usual_draft_does_not_pay_for_its_block(block, untaught, taught):
    """Only where something drafts without it; the costs are known from an earlier call."""
    learned = Learned(CostModel.measured({1: 1.0, 2: 0.7 + 0.3 * block, 4: block - 0.1, 8: block, 16: block}))
    control = controller(Machine(0.1, None), longest=15, learned=learned, width=4)
    control._scope.drafter.top_tokens, control._scope.drafter.drafts_untaught = 8, untaught
    assert control.teaches == taught
    view = DecodeView.of_sequences([[0]])
    plan = control.plan(view, [50])
    assert plan.depth and plan.taught == taught
    assert control.report()["untaught_rounds"] == (not taught)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_is_a_tree_of_the_proposed_one(seed):
    rng = random.Random(seed)
    control = controller(Machine(rng.choice([0.0, 0.1, 0.5]), None), width=4)
    control._costs.observe_block(1, 1.0)
    rows, trees = rng.randint(1, 4), []
    for _ in range(rows):
        row = RowTree(0)
        for token in range(1, rng.randint(1, 12)):
            row.add(rng.randrange(len(row)), token, rng.random())
        trees.append(row)
    view = DecodeView.of_sequences([[0]] * rows)
    control.plan(view, [50] * rows)
    whole = DraftTree.from_rows(trees)
    kept = control.prune(view, whole)
    for row, tree in enumerate(trees):
        tokens, parents = kept.tokens[row].tolist(), kept.parents[row].tolist()
        places = {token: node for node, token in enumerate(tree.tokens)}
        for node, (token, parent) in enumerate(zip(tokens, parents)):
            if parent >= 0:
                assert parent < node
                assert tree.parents[places[token]] == places[tokens[parent]]
                assert kept.values[row, node] == pytest.approx(tree.values[places[token]])
    assert torch.equal(kept.tokens[:, 0], whole.tokens[:, 0])


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_costs_converge_to_the_machine(noise):
    machine, costs = Machine(0.05, 0.1, 0.4, noise), CostModel()
    rng = random.Random(1)
    for _ in range(300):
        tokens = rng.choice([1, 2, 4, 8, 12])
        costs.observe_block(tokens, 0.05 * machine.block(tokens))
        costs.observe_model_draft(3, 3 * 0.005 * machine.shaken())
    quiet = Machine(0.05, 0.1, 0.4)
    for tokens in (1, 2, 4, 8, 12):
        assert costs.block(tokens) == pytest.approx(0.05 * quiet.block(tokens), rel=0.03 + noise / 2)
    assert costs.draft_step == pytest.approx(0.005, rel=0.05)
    curve = [costs.block(tokens) for tokens in range(1, 14)]
    assert curve == sorted(curve) or noise


def test_costs_follow_a_machine_that_slows_down():
    costs = CostModel()
    for seconds in [1.0] * 30 + [2.0] * 9:
        costs.observe_block(4, seconds)
    assert costs.block(4) == pytest.approx(2.0, rel=0.02)


def test_the_prompt_tells_how_steep_blocks_may_be():
    shallow, steep = CostModel(), CostModel()
    for costs, prompt_seconds in ((shallow, 1.1), (steep, 6.0)):
        costs.start(100, prompt_seconds)
        costs.observe_block(1, 1.0)
    assert 1 <= shallow.block(8) < 1.02 < steep.block(8)


def test_small_blocks_that_are_dear_do_not_make_large_ones_unthinkable():
    """A CPU whose kernel for one token is twice as fast as the one for more."""
    costs = CostModel()
    costs.start(100, 3.5)
    for _ in range(40):
        for tokens, seconds in ((1, 1.0), (2, 1.7), (3, 2.1)):
            costs.observe_block(tokens, seconds)
    assert costs.block(3) == pytest.approx(2.1, rel=0.05)
    assert 2.1 < costs.block(16) < 2.6
    assert costs.block(64) < 4.2
    again = CostModel.from_dict(costs.to_dict())
    assert again.block(3) == pytest.approx(2.1, rel=0.05)


@pytest.mark.parametrize("seconds", [5e-324, 1e-300, 1e300, 1e308])
def test_times_that_no_machine_needs_are_refused(seconds):
    known = CostModel.measured({1: 0.01, 2: 0.011}, 0.001, 0.0005).to_dict()
    for part in ({"blocks": {"1": [seconds] * 15}}, {"draft_steps": [1e300]}):
        with pytest.raises(SpecDecError, match="no costs"):
            CostModel.from_dict({**known, **part})


def test_a_file_of_costs_without_names_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"format": "hf_specdec costs 1", "costs": [[5, 0.5]]}')
    with pytest.raises(SpecDecError, match="cannot be read as a file of costs"):
        load_costs(path, "this machine")


def test_costs_survive_a_file(tmp_path):
    costs = CostModel.measured({1: 1.0, 2: 1.5, 8: 2.0}, 0.1, 0.01)
    for tokens, seconds in ((1, 1.0), (2, 1.5), (8, 2.0)):
        assert costs.block(tokens) == pytest.approx(seconds, rel=0.15)
    path = tmp_path / "costs.json"
    save_costs(path, "here", costs)
    save_costs(path, "there", CostModel.measured({1: 3.0}))
    again = load_costs(path, "here")
    for tokens in range(1, 9):
        assert again.block(tokens) == pytest.approx(costs.block(tokens), rel=0.02)
    assert (again.draft_step, again.lookup) == (0.1, 0.01)
    with pytest.raises(SpecDecError, match="not those of elsewhere"):
        load_costs(path, "elsewhere")
    path.write_text("{}")
    with pytest.raises(SpecDecError, match="cannot be read as a file of costs"):
        load_costs(path, "here")


def test_isotonic_is_monotone_and_keeps_the_weighted_mean():
    values, weights = [1.0, 3.0, 2.0, 2.5, 0.5], [1.0, 2.0, 1.0, 1.0, 3.0]
    fitted = isotonic(values, weights)
    assert fitted == sorted(fitted)
    assert sum(map(float.__mul__, fitted, weights)) == pytest.approx(sum(map(float.__mul__, values, weights)))
    assert isotonic([1.0, 2.0], [1.0, 1.0]) == [1.0, 2.0]


def test_censored_positions_are_no_observations():
    """The same acceptance is seen whether short or long chains are drafted; counting drafts alone would not see it."""
    rng = random.Random(0)
    for length in (2, 8):
        chains = ChainAcceptance()
        for _ in range(4000):
            hits = sum(1 for _ in itertools.takewhile(bool, (rng.random() < 0.7 for _ in range(length))))
            chains.observe([hits], [min(hits + 1, length)])
        estimates = [chains.survival(4)[depth] for depth in (0, 3)]
        assert estimates == pytest.approx([0.7, 0.7**4], abs=0.2)


def test_values_are_calibrated_both_ways():
    rng = random.Random(0)
    for share in (0.3, 0.95):
        calibration = ValueCalibration()
        place = calibration.bin(0.65)
        for _ in range(200):
            hit = rng.random() < share
            calibration.observe([place] if hit else [], [] if hit else [place])
        assert calibration.estimate(place) == pytest.approx(share, abs=0.12)
        estimates = [calibration.estimate(calibration.bin(step / 50)) for step in range(51)]
        assert estimates == sorted(estimates)


class SomeModel:
    """What tells a model from others where costs are kept."""

    config = SimpleNamespace(
        get_text_config=lambda decoder: SimpleNamespace(
            num_hidden_layers=1, hidden_size=1, _attn_implementation="sdpa"
        )
    )
    dtype = torch.float32

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(1)])


def scope(model: Any, rows: int = 1) -> Scope:
    drafter = SimpleNamespace(looks_up=False, runs_model=True, forwards=0, top_tokens=0, drafts_untaught=False)
    return Scope(lambda rows: Plan.chain(LONGEST), drafter, model, rows=rows)


def test_a_memory_keeps_what_was_learned():
    machine, schedule, model = Machine(STEEP), Adaptive(memory="new"), SomeModel()
    first = schedule.build(scope(model))
    run(machine, first, lambda count: 0.1, 200)
    first.finish()
    assert isinstance(schedule.memory, ControlMemory) and len(schedule.memory) == 1
    view = DecodeView.of_sequences([[0]])
    assert schedule.build(scope(model)).plan(view, [50]).depth == 0
    assert Adaptive().build(scope(SomeModel())).plan(view, [50]).depth > 0
    with pytest.raises(SpecDecError, match="no ControlMemory"):
        Adaptive(memory=3)


def test_a_process_keeps_what_blocks_cost_and_nothing_else():
    model = SomeModel()
    first = Adaptive().build(scope(model))
    run(Machine(STEEP), first, lambda count: 0.1, 200)
    found = first._learned
    first.finish()
    later, elsewhere = Adaptive().build(scope(model))._learned, Adaptive().build(scope(SomeModel()))._learned
    for size in (1, 2, 5):
        assert later.costs.block(size) == found.costs.block(size) != elsewhere.costs.block(size)
    assert later.costs.draft_step == elsewhere.costs.draft_step * later.costs.block(1) != found.costs.draft_step
    assert later.model.chains.survival(1) == elsewhere.model.chains.survival(1) != found.model.chains.survival(1)
    assert Adaptive().build(scope(model, rows=2))._learned.costs.block(1) == 1, (
        "of another batch size nothing is known"
    )
    before = found.costs.block(1)
    run(Machine(STEEP, noise=0.3), Adaptive().build(scope(model)), lambda count: 0.1, 50)
    assert Adaptive().build(scope(model))._learned.costs.block(1) == before, "a call in progress learns for itself"


def test_the_report_counts_choices_and_says_why_drafting_stopped():
    control = controller(Machine(STEEP))
    run(Machine(STEEP), control, lambda count: 0.0, 200)
    report = control.report()
    assert sum(report["rounds_by_nodes"].values()) == 200
    assert report["rounds_by_nodes"]["1"] > 150
    assert "forward of two tokens costs 1." in report["switched_off"][0]["why"]
    assert report["mean_absolute_error_seconds"] < 0.05 * report["mean_round_seconds"]


@pytest.mark.parametrize("every", [2, 3, 6])
def test_lookups_that_pay_do_not_keep_a_draft_model_from_being_tried_again(every):
    """The model is wrong at first and right after that; lookups are right, but have something to say now and then."""
    drafter = SimpleNamespace(looks_up=True, runs_model=True, forwards=0, top_tokens=0, drafts_untaught=False)
    control = AdaptiveController(Scope(lambda rows: Plan(9, 1, 10), drafter, None), Learned())
    control.start(24, 1.3)
    view, late = DecodeView.of_sequences([[0]]), 0
    for number in range(1500):
        plan = control.plan(view, [10_000])
        values = [0.9**depth for depth in range(1, 5)] if number % every == 0 else []
        depth = 0
        if plan.model_depth and 1 + sum(values) < (plan.enough or 0):
            depth = plan.model_depth
            values = [0.6**level for level in range(1, depth + 1)]
        drafter.forwards += depth
        tree = control.prune(view, tree_of(values, list(range(len(values))))) if values else chains_of(view, 0)
        hits = 0 if depth and number < 60 else tree.size - 1
        late += number > 1000 and depth > 0
        control.observe(
            StepRecord(
                plan=plan, rows=1, nodes=tree.size, context=1, drafted=[tree.size - 1],
                reached=[min(hits + 1, tree.size - 1)], accepted=[hits], paths=[list(range(1, hits + 1))],
                draft_forwards=depth, draft_seconds=0.01 + 0.3 * depth, verify_seconds=1.0,
                step_seconds=1.01 + 0.3 * depth + 0.005 * tree.size,
            )
        )  # fmt: skip
    assert late > 200


def test_lookups_that_were_given_up_are_asked_again_for_little():
    """Useless for 400 rounds, and sure of themselves and right after that, as where a text begins to copy."""
    drafter = SimpleNamespace(looks_up=True, runs_model=False, forwards=0, top_tokens=0, drafts_untaught=False)
    control = AdaptiveController(Scope(lambda rows: Plan(6, 1, 7), drafter, None), Learned())
    control.start(24, 1.3)
    view, asked, taken, seconds = DecodeView.of_sequences([[0]]), [], [], 0.0
    for number in range(460):
        plan = control.plan(view, [10_000])
        copying = number >= 400
        values = [(0.97 if copying else 0.1) ** depth for depth in range(1, plan.depth + 1)]
        tree = control.prune(view, tree_of(values, list(range(len(values))))) if values else chains_of(view, 0)
        hits = (tree.size - 1) * copying
        looking, block = 0.04 * bool(plan.depth), 1.0 + (tree.size > 1)
        asked += [number] * bool(plan.depth)
        taken += [number] * (tree.size > 1)
        seconds += looking + block
        control.observe(
            StepRecord(
                plan=plan, rows=1, nodes=tree.size, context=1, drafted=[tree.size - 1],
                reached=[min(hits + 1, tree.size - 1)], accepted=[hits], paths=[list(range(1, hits + 1))],
                draft_forwards=0, draft_seconds=looking, verify_seconds=block, step_seconds=looking + block,
            )
        )  # fmt: skip
    idle = [each for each in asked if 100 <= each < 400]
    assert 20 < len(idle) and 0.04 * len(idle) < 0.0075 * 300
    first = min(each for each in taken if each >= 400)
    assert first < 415 and len([each for each in taken if each >= first]) == 460 - first


def test_a_draft_model_that_thinks_too_little_of_itself_is_found_out():
    """Its drafts are right, but by its own estimates not worth a node where each costs half a forward."""
    machine, control, seconds, tokens, rounds = Machine(0.5), controller(Machine(0.5)), 0.0, 0, 0
    view = DecodeView.of_sequences([[0]])
    control.start(100, 50.0)
    for _ in range(400):
        plan = control.plan(view, [10_000])
        tree = tree_of([0.2**depth for depth in range(1, plan.depth + 1)], list(range(plan.depth)))
        control._scope.drafter.forwards += plan.depth
        tree = control.prune(view, tree) if plan.depth else tree
        hits, drafting, took = tree.size - 1, plan.depth * machine.draft, machine.block(tree.size)
        control.observe(
            StepRecord(
                plan=plan, rows=1, nodes=tree.size, context=1, drafted=[hits], reached=[hits], accepted=[hits],
                paths=[list(range(1, hits + 1))], draft_forwards=plan.depth, draft_seconds=drafting,
                verify_seconds=took, step_seconds=drafting + took,
            )
        )  # fmt: skip
        seconds, tokens, rounds = seconds + drafting + took, tokens + hits + 1, rounds + (hits > 0)
    assert rounds > 200 and tokens / seconds > 1.1


def test_nothing_was_predicted_in_a_call_of_one_round():
    control = controller(Machine())
    assert run(Machine(), control, lambda count: 0.0, 1) == pytest.approx(1.0, abs=0.7)
    assert control.report()["mean_round_seconds"] is control.report()["mean_absolute_error_seconds"] is None


def _chance(plan: Plan, values: Sequence[float]) -> float:
    assert plan.model_chances is not None or plan.least == 0
    parents = range(-1, len(values))
    return plan.model_chances(parents, [1.0, *values])[-1] if plan.model_chances else values[-1]


def confident_run(machine: Machine, tokens: int, seed: int, kinds: Sequence[tuple[float, float]]) -> tuple[float, int]:
    """Seconds for so many tokens, and draft forwards, where a draft model's tokens are of several kinds, each with its
    estimate and the share that is right; its draft ends where the plan says that going on does not pay."""
    rng, control = random.Random(seed), controller(machine)
    emitted, seconds, forwards = 0, 0.0, 0
    view = DecodeView.of_sequences([[0]])
    control.start(100, machine.block(100))
    while emitted < tokens:
        plan = control.plan(view, [tokens - emitted])
        values: list[float] = []
        right: list[float] = []
        while len(values) < plan.depth and (not values or _chance(plan, values) >= plan.least):
            estimate, share = rng.choice(kinds)
            values.append((values[-1] if values else 1.0) * estimate)
            right.append(share)
        drafting, control._scope.drafter.forwards = len(values) * machine.draft, forwards + len(values)
        forwards += len(values)
        tree = tree_of(values, list(range(len(values)))) if values else chains_of(view, 0)
        if values:
            tree = control.prune(view, tree)
        asked = (rng.random() < share for share in right[: tree.size - 1])
        hits = min(sum(1 for _ in itertools.takewhile(bool, asked)), tokens - emitted - 1)
        took, depth = machine.block(tree.size), tree.size - 1
        control.observe(
            StepRecord(
                plan=plan, rows=1, nodes=tree.size, context=1, drafted=[depth], reached=[min(hits + 1, depth)],
                accepted=[hits], paths=[list(range(1, hits + 1))], draft_forwards=len(values),
                draft_seconds=drafting, verify_seconds=took, step_seconds=drafting + took,
            )
        )  # fmt: skip
        emitted, seconds = emitted + hits + 1, seconds + drafting + took
    return seconds, forwards


@pytest.mark.parametrize(("name", "least"), [("flat", 1.03), ("costly draft", 1.03), ("steep", 1.03)])
def test_a_draft_ends_where_its_model_is_unsure(name, least):
    machine = MACHINES[name]
    kinds = [(0.98, 0.98), (0.1, 0.1)]
    reached = 3 * 1500 / sum(confident_run(machine, 1500, seed, kinds)[0] for seed in range(3))
    assert reached >= least * best_constant(machine, [0.54])


@pytest.mark.parametrize("name", ["flat", "costly draft"])
def test_a_near_copy_of_the_target_goes_on_however_unsure_it_is(name):
    """A quantised copy chooses as the target does, also where both give their choice a third."""
    machine, kinds = MACHINES[name], [(0.9, 0.97), (0.35, 0.97)]
    reached = 3 * 1500 / sum(confident_run(machine, 1500, seed, kinds)[0] for seed in range(3))
    assert reached >= 0.97 * best_constant(machine, [0.97])
