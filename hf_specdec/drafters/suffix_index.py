"""A suffix trie with counts that grows one token at a time: what followed each context, and how often.

A context is a run of at most `max_context` tokens. The trie is lazy: a context that occurred once is a bare position
in the text, and becomes a `Node` when it occurs again. Adding a token therefore touches only the contexts that the end
of the text repeats: one or two in new text, `max_context` in copied text, never more as the text grows. Token ids are
not negative; `BOUNDARY` separates the texts of one index, and nothing is matched or copied across it.
"""

import heapq
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..tree import RowTree, grow_best_first

BOUNDARY = -1
DEFAULT_MAX_CONTEXT = 16
ESCAPE = 2.0
"""How little a context of one token is believed: with this weight against each different token that followed it."""
NEGLIGIBLE = 0.02
"""Weight below which shorter contexts are not asked."""
SURER, SURER_UP_TO = 0.3, 3
"""A copy that was right so far is right more often: by how much per token of it, and up to how many."""
_TO_BE_FOUND = 1 << 62  # a `best_count` above every count: the favourite has left, search when it is asked for


class Node:
    """A context that occurred more than once.

    Attributes:
        count: its occurrences, one at the very end of a text included.
        last: position of the last token of the latest occurrence.
        children: the context with one more token, by that token; a position stands for a single occurrence.
        best: the token that followed most often, the most recent of equals; `best_count` is how often it did.
    """

    __slots__ = ("best", "best_count", "children", "count", "last")

    def __init__(self, count: int, last: int):
        self.count = count
        self.last = last
        self.children: dict[int, Node | int] = {}
        self.best = BOUNDARY
        self.best_count = 0

    def favourite(self) -> tuple[int, int]:
        """`best` and `best_count`, searched for if what they were has been forgotten."""
        if self.best_count == _TO_BE_FOUND:
            self.best = max(self.children, key=lambda token: _rank(self.children[token]), default=BOUNDARY)
            self.best_count = count_of(self.children[self.best]) if self.children else 0
        return self.best, self.best_count


Context = Node | int  # an int is the position where the only occurrence ends


_Place = tuple[Sequence[Context], tuple[int, ...]]  # contexts by length, and the draft's tokens down to there


def count_of(context: Context) -> int:
    """How often a context occurred."""
    return 1 if isinstance(context, int) else context.count


def _rank(context: Context) -> tuple[int, int]:
    """Order of the contexts below a node: the most frequent, then the most recent."""
    return (1, context) if isinstance(context, int) else (context.count, context.last)


@dataclass(frozen=True)
class PathRule:
    """How far a draft goes.

    Args:
        min_probability: a draft ends before the token that takes its probability below this.
        max_tokens_factor: a match of m tokens is followed for at most `max_tokens_factor * m` tokens.
    """

    min_probability: float
    max_tokens_factor: float


@dataclass(frozen=True)
class ScoredDraft:
    """`tokens` that continue a text, their path probabilities, and the sum of these, which estimates how many are
    accepted."""

    tokens: Sequence[int] = ()
    score: float = 0.0
    values: Sequence[float] = field(default=(), compare=False)


class SuffixIndex:
    """Counts of what followed each context of at most `max_context` tokens.

    `matched[m - 1]` is the context of the last m tokens of the text; the list ends where a context occurs only there.
    Their counts include that occurrence.
    """

    def __init__(self, max_context: int = DEFAULT_MAX_CONTEXT):
        self.max_context = max_context
        self.text: list[int] = []
        self.base = 0  # position of text[0]; what came before has been forgotten
        self.root = Node(0, BOUNDARY)
        self.matched: list[Node] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Add one token to the text."""
        position = self.base + len(self.text)
        self.text.append(token)
        matched: list[Node] = []
        for node in (self.root, *self.matched):
            child = node.children.get(token)
            if child is None:
                node.children[token] = position
                count = 1
            else:
                if isinstance(child, int):
                    child = node.children[token] = self._node_at(child, len(matched) + 1)
                child.count = count = child.count + 1
                child.last = position
                matched.append(child)
            if count >= node.best_count:
                node.best, node.best_count = token, count
        del matched[self.max_context :]
        self.matched = matched

    def _node_at(self, position: int, length: int) -> Node:
        """The node of a context of `length` tokens whose only occurrence so far ends at `position`."""
        node = Node(1, position)
        follower = self.text[position + 1 - self.base]
        if follower != BOUNDARY and length <= self.max_context:
            node.children[follower] = position + 1
            node.best, node.best_count = follower, 1
        return node

    def end_text(self) -> None:
        """What is added next belongs to another text."""
        self.text.append(BOUNDARY)
        self.matched = []

    def forget_first_text(self) -> None:
        """Take back the oldest text that has ended."""
        tokens = self.text[: self.text.index(BOUNDARY)]
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.max_context + 1]:
                child = node.children[token]
                if token == node.best:
                    node.best_count = _TO_BE_FOUND
                if isinstance(child, int) or child.count == 1:
                    del node.children[token]
                    break
                child.count -= 1
                node = child
        del self.text[: len(tokens) + 1]
        self.base += len(tokens) + 1

    def match(self, tokens: Sequence[int]) -> list[Context]:
        """`[m - 1]` is the context of the last m of these tokens, which are not part of the text."""
        matched: list[Context] = []
        for token in tokens[-self.max_context :]:
            longer: list[Context] = []
            for context in (self.root, *matched):
                following = self._follow(context, token)
                if following is None:
                    break
                longer.append(following)
            matched = longer
        return matched

    def _follow(self, context: Context, token: int) -> Context | None:
        if isinstance(context, int):
            return context + 1 if self.text[context + 1 - self.base] == token else None
        return context.children.get(token)

    def draft(self, matched: Sequence[Context], limit: int, rule: PathRule, unseen: int = 0) -> ScoredDraft:
        """The draft with the highest score over the matched contexts; the longest context wins ties.

        A context that occurs exactly where the next longer one does is the same evidence and is passed over.

        Args:
            matched: contexts that end where the draft begins, by length.
            limit: at most so many tokens.
            unseen: 1 if the place where the draft begins is not part of this text, so that counts leave it out.
        """
        best = ScoredDraft()
        for length, context in enumerate(matched, 1):
            if length < len(matched) and count_of(matched[length]) == count_of(context):
                continue
            allowed = int(min(limit, rule.max_tokens_factor * length + 1e-6))
            draft = self._path(context, allowed, rule.min_probability, unseen)
            if draft.score >= best.score:
                best = draft
        return best

    def tree(self, matched: Sequence[Context], root: int, depth: int, width: int, nodes: int) -> RowTree:
        """The most probable continuations of all matched contexts together.

        Each node keeps the contexts that its path continues. The probability of a token is blended over them, from the
        longest on: a context that was followed n times by k different tokens is believed with weight
        `n / (n + k * ESCAPE / length)`, and the rest of the weight goes to the next shorter one (prediction by partial
        matching, Cleary and Witten 1984). Below drafted tokens a root of it is taken, for there they were right.

        Args:
            matched: contexts that end where the draft begins, by length.
            root: the last token of the text.
            depth, width, nodes: as in `Plan`.
        """

        def expand(place: _Place) -> Iterator[tuple[int, float, _Place]]:
            contexts, path = place
            likely = heapq.nlargest(width, self._blend(contexts, path).items(), key=operator.itemgetter(1))
            power = 1 / (1 + SURER * min(len(path), SURER_UP_TO))
            for token, probability in likely:
                yield token, probability**power, (self._advance(contexts, token, path), (*path, token))

        start: _Place = (matched, ())
        return grow_best_first(root, start, expand, depth, width, nodes)

    def _blend(self, contexts: Sequence[Context], path: tuple[int, ...]) -> dict[int, float]:
        """Probability of each token after these contexts, given by length."""
        blended: dict[int, float] = {}
        weight, occurrences = 1.0, 0
        for length in range(len(contexts), 0, -1):
            context = contexts[length - 1]
            if count_of(context) == occurrences:
                continue  # the same places as the next longer one
            occurrences = count_of(context)
            followers = self._followers(context, path)
            total = sum(followers.values())
            if not total:
                continue
            believed = weight * total / (total + len(followers) * ESCAPE / length)
            for token, count in followers.items():
                blended[token] = blended.get(token, 0.0) + believed * count / total
            weight -= believed
            if weight < NEGLIGIBLE:
                break
        return blended

    def _followers(self, context: Context, path: tuple[int, ...]) -> dict[int, int]:
        """How often each token followed a context; below the trie the latest occurrence is copied, as in `_path`."""
        if isinstance(context, Node) and context.children:
            return {token: count_of(child) for token, child in context.children.items() if token != BOUNDARY}
        token = self._token_at(1 + (context if isinstance(context, int) else context.last), path)
        return {} if token == BOUNDARY else {token: 1}

    def _token_at(self, position: int, path: Sequence[int]) -> int:
        """The token there; beyond the end of the text that of the draft, and beyond that `BOUNDARY`."""
        beyond = position - self.base - len(self.text)
        if beyond < 0:
            return self.text[position - self.base]
        return path[beyond] if beyond < len(path) else BOUNDARY

    def _advance(self, contexts: Sequence[Context], token: int, path: tuple[int, ...]) -> list[Context]:
        """The contexts with one more token, where it followed them."""
        longer: list[Context] = []
        for context in contexts:
            if isinstance(context, Node) and context.children:
                child = context.children.get(token)
            else:
                place = 1 + (context if isinstance(context, int) else context.last)
                child = place if self._token_at(place, path) == token else None
            if child is None:
                break
            longer.append(child)
        return longer

    def _path(self, context: Context, limit: int, min_probability: float, unseen: int) -> ScoredDraft:
        """Follow the favourite token, and its probability `count(child) / count(context)`, down the trie.

        The occurrence where the draft begins is counted and has no continuation yet: one earlier occurrence is
        trusted by a half. Below the trie the latest occurrence is copied; where the copy reaches the end of the text,
        it goes on in the draft, so that a repetition goes on repeating.
        """
        tokens: list[int] = []
        values: list[float] = []
        probability = count_of(context) / (count_of(context) + unseen)
        while len(tokens) < limit:
            if isinstance(context, Node) and not context.children:
                context = context.last
            if isinstance(context, int):
                context += 1
                token = self._token_at(context, tokens)
            else:
                token, count = context.favourite()
                probability *= count / context.count
                context = context.children[token]
            if token == BOUNDARY or probability < min_probability:
                break
            tokens.append(token)
            values.append(probability)
        return ScoredDraft(tokens, sum(values), values)
