"""THE STEP: plan, draft, verify, accept, stop, commit, observe.

One code path for any number of rows. The loop is the only writer of `DecodeState` and of the target's cache. Each
round reads the device once, for what was accepted; clocks are read right after that.
"""

import time
from collections.abc import Sequence

from .errors import SpecDecError
from .proposal import Limits, fault_of, is_fit, told, trimmed
from .request import Request
from .state import DecodeState, Plan
from .stats import Judged, StepRecord
from .target import TargetOutput
from .tree import DraftTree


def decode(request: Request) -> None:
    """Decode until every row has ended; results are left in `request`."""
    target, drafter, controller = request.target, request.drafter, request.controller
    started = time.perf_counter()
    taught = drafter.top_tokens > 0 and controller.teaches
    output, cached = target.start(request.input_ids, request.generation_config, taught)
    state = request.begin(cached)
    request.outputs.prefill(output.raw)
    roots = request.input_ids[:, -1:] if request.input_ids.shape[1] else request.input_ids.new_zeros(state.rows, 1)
    emit(request, state, DraftTree(roots, roots.new_full(roots.shape, -1), roots > roots), output, None)
    controller.start(request.prompt_tokens, time.perf_counter() - started)
    request.start_drafting(state)
    request.stats.prefill_seconds = time.perf_counter() - started
    while request.unfinished():
        if not state.rows:
            target.idle()
            continue
        started = time.perf_counter()
        before = (target.forward_seconds, drafter.forward_seconds, drafter.forwards)
        rooms = request.ends.rooms(state)
        plan = controller.plan(state.view, rooms).within(max(rooms) - 1)
        tree = propose(request, state, plan, rooms)
        drafted_at, draft_forwards = time.perf_counter(), drafter.forwards - before[2]
        output = target.verify(tree, state.lengths())
        context, rows, nodes = max(state.lengths()), state.rows, tree.size
        emitted, judged = emit(request, state, tree, output, plan)
        verified_at = time.perf_counter()
        if state.rows:
            with request.undisturbed():
                drafter.observe(state.view, emitted)
        record = StepRecord(
            plan=plan,
            rows=rows,
            nodes=nodes,
            context=context,
            **judged._asdict(),
            draft_forwards=draft_forwards,
            draft_seconds=drafted_at - started,
            verify_seconds=verified_at - drafted_at,
            step_seconds=time.perf_counter() - started,
        )
        controller.observe(record)
        times = target.forward_seconds - before[0], drafter.forward_seconds - before[1]
        request.stats.count_times(record.step_seconds, *times)


def propose(request: Request, state: DecodeState, plan: Plan, rooms: Sequence[int]) -> DraftTree:
    """The drafter's tree without nodes beyond the plan or a row's room, and without tokens that cannot be read. Then
    the controller may prune it, unless it was drawn for a verifier that reads draft probabilities.

    Raises `SpecDecError` for a tree that does not fit the rows.
    """
    if not plan.depth:
        return DraftTree.from_chains(state.roots(), [[]] * state.rows, state.device)
    if request.noise is not None:  # drafts may use it, and must not draw it inside
        request.noise.reach(max(state.emitted_count(row) for row in range(state.rows)) + plan.depth)
    with request.undisturbed():
        tree = request.drafter.propose(state.view, plan)
    if fault := fault_of(tree, state.rows, request.vocab_size):
        raise SpecDecError(
            f"Strategy {request.stats.strategy!r} must answer with a DraftTree of {state.rows} rows, but {fault}."
        )
    if tree.size == 1:
        return DraftTree.from_chains(state.roots(), [[]] * state.rows, state.device)
    tree = tree.copy_to(state.device)  # the strategy may write to its own
    limits = Limits(state.roots(), plan, rooms, request.vocab_size, request.unreadable)
    if not is_fit(tree, limits):
        tree, readable = trimmed(tree, limits)
        if request.verifier.uses_draft_probs and bool((tree.sampled & ~(readable & told(tree))).any()):
            raise SpecDecError(
                f"Strategy {request.stats.strategy!r} drew a token that the target cannot read, a sibling holds, or "
                "its law does not give; under this verifier `probs` must be the law that each node was drawn from."
            )
    return tree if tree.probs is not None else request.controller.prune(state.view, tree)


def emit(
    request: Request, state: DecodeState, tree: DraftTree, output: TargetOutput, plan: Plan | None
) -> tuple[list[list[int]], Judged]:
    """Judge a tree and commit what came of it. `plan` is None for the prompt's own forward.

    Returns the emitted tokens of the rows that stay, and of all rows that were decoding what was judged.
    """
    scores, acceptance = request.judge(tree, output.logits, state, plan)
    read = acceptance.on_host(tree)
    paths = [row.path for row in read]
    counts = list(map(len, paths))
    proposed = [row.tokens for row in read]
    if min(map(min, proposed)) < 0:
        raise RuntimeError("The target's law after processing is not finite (probabilities are inf, nan or all zero).")
    request.teach(state, tree)  # only now: it may write to what it is shown
    request.keep_scores(state, paths, scores, output.logits)
    stops = request.stopping.first_stops(proposed, state, request.outputs.scores_until)
    emitted = request.ends.cut(state, proposed, stops)
    accepted = [min(count, len(tokens)) for count, tokens in zip(counts, emitted)]
    drafted, reached, settled = [0] * state.rows, [0] * state.rows, list[tuple[int, int, list[int]]]()
    for row, row_id in enumerate(state.row_ids):
        if not emitted[row]:  # it has ended, and waits for its last token to be cached
            continue
        if plan is None:
            request.stats.count_emitted(row_id, 0, len(emitted[row]))
        else:
            whole = len(emitted[row]) > counts[row]
            drafted[row] = read[row].drafted if whole else len(emitted[row])
            reached[row] = min(read[row].deepest, accepted[row] + 1) if whole else accepted[row]
            request.stats.count_round(row_id, drafted[row], reached[row], accepted[row], len(emitted[row]))
            request.outputs.add_states(state, row, [0, *paths[row]][: len(emitted[row])], output.raw)
            settled.append((row, state.length(row) - 1, paths[row][: accepted[row]]))
    request.target.settle(settled)
    state.commit(emitted)
    leaving = request.ends.settle(state, request.outputs.scores_until, request.returns_cache)
    request.stream(state, accepted, emitted)
    staying = [row for row in range(state.rows) if row not in leaving]
    if leaving:
        request.leave(state, leaving, staying)
    return [emitted[row] for row in staying], Judged(drafted, reached, accepted, paths)
