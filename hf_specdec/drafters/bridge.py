"""Two tokenizers and one text: which ids of them are the same string, and the ids of one for what the other wrote.

Everything is in bytes, so that half a character at a boundary is text like any other. Nothing here knows a model, and
nothing changes a tokenizer: each is encoded with through a copy that puts no space or special token before a text, so
that a text can be encoded from its middle on.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

LONGEST_OPEN = 256
"""Bytes of a row's text that are encoded anew each round, before its beginning is settled."""
LEAST_OPEN = 64
"""Bytes that stay open then."""
CUTS = 8
"""Places where it is tried to settle."""
CONTEXT_TOKENS = 8
"""Tokens before a draft that its first token may depend on."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


def without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that puts no space before a text."""
    if isinstance(part, list):
        return [each for item in part if (each := without_prefix(item)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    part = {name: without_prefix(value) for name, value in part.items()}
    if part.get("add_prefix_space"):
        part["add_prefix_space"] = False
    if part.get("type") == "Metaspace":
        part["prepend_scheme"] = "never"
    return part


class Lexicon:
    """What the ids of a tokenizer stand for.

    Byte-level vocabularies (`Ġ`), those of sentencepiece (`▁`, `<0x0A>`) and plain ones are told apart by the
    tokenizer's own normalizer, pre-tokenizer and decoder.

    Args:
        tokenizer: a tokenizer of transformers with a `backend_tokenizer`.

    Attributes:
        pieces: the bytes of each id; special tokens have none.
        ids: the id of each string of bytes; of several, one that is no byte fallback.
        special: the id of each special token by its content.
        eos: the id of the end of a text, or None.
        leads: what the tokenizer puts before every text: BOS, or nothing.
        prefixed: it puts a space before every text.
    """

    def __init__(self, tokenizer: Any):
        stored = json.loads(tokenizer.backend_tokenizer.to_str())
        parts = {name: stored[name] for name in ("normalizer", "pre_tokenizer")}
        bare = {name: without_prefix(part) for name, part in parts.items()}
        self.prefixed = bare != parts
        stored |= {**bare, "truncation": None, "padding": None}
        self._encoder = Tokenizer.from_str(json.dumps(stored))
        self._encoder.encode_special_tokens = True  # what looks like one in a text is text
        whole = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
        added = {each["id"]: each for each in stored["added_tokens"]}
        special = {index for index, each in added.items() if each["special"]} | set(tokenizer.all_special_ids)
        unknown = stored["model"].get("unk_token")
        self.special = {token: index for token, index in whole.items() if index in special or token == unknown}
        self.eos: int | None = tokenizer.eos_token_id
        self.leads = self._encoder.encode("").ids[:1]
        if self.leads != [tokenizer.bos_token_id]:
            self.leads = []
        convention = json.dumps([*parts.values(), stored["decoder"]], ensure_ascii=False)
        table = byte_characters() if '"ByteLevel"' in convention else None
        spaces = "▁" in convention
        self.pieces: dict[int, bytes] = {}
        self.ids: dict[bytes, int] = {}
        for token, index in whole.items():
            fallback = BYTE_TOKEN.fullmatch(token) if spaces or '"ByteFallback"' in convention else None
            if token in self.special:
                continue
            if index in added:
                piece = token.encode()
            elif table is not None and all(character in table for character in token):
                piece = bytes(table[character] for character in token)
            elif fallback:
                piece = bytes([int(fallback[1], 16)])
            else:
                piece = (token.replace("▁", " ") if spaces else token).encode()
            self.pieces[index] = piece
            if piece and (not fallback or piece not in self.ids):
                self.ids[piece] = index

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text that goes on from another. Bytes that are no UTF-8 become single-byte tokens where there are
        such, and are left out where not."""
        ids: list[int] = []
        for part in re.split("([\udc80-\udcff]+)", text.decode("utf-8", "surrogateescape")):
            if part and "\udc80" <= part[0] <= "\udcff":
                single = (self.ids.get(bytes([ord(character) - 0xDC00])) for character in part)
                ids += [index for index in single if index is not None]
            elif part:
                ids += self._encoder.encode(part, add_special_tokens=False).ids
        return ids

    def spelled(self, ids: Iterable[int]) -> bytes:
        """The text of these ids."""
        return b"".join(self.pieces.get(index, b"") for index in ids)


_LEXICONS: WeakKeyDictionary[Any, tuple[int, Lexicon]] = WeakKeyDictionary()


def lexicon(tokenizer: Any) -> Lexicon:
    """The `Lexicon` of a tokenizer; kept from call to call while no token is added to it."""
    if (known := _LEXICONS.get(tokenizer)) is None or known[0] != len(tokenizer):
        known = _LEXICONS[tokenizer] = (len(tokenizer), Lexicon(tokenizer))
    return known[1]


class Bridge:
    """From a target's ids to a draft model's and back.

    Args:
        target: of the target's tokenizer.
        draft: of the draft model's.
        target_size: the target reads and says ids below this.
        draft_size: the draft model reads and says ids below this.

    Attributes:
        to_target: target id of each draft id whose string both have. One to one. Special tokens count by content, and
            the end of the text as such.
        words: how many of these are text.
        context: draft id of each special token of the target that has one.
        sayable: draft ids that the target can be given as text or as its own special token.
    """

    def __init__(self, target: Lexicon, draft: Lexicon, target_size: int, draft_size: int):
        self.target, self.draft = target, draft
        both = [(index, target.ids[piece]) for piece, index in draft.ids.items() if piece in target.ids]
        text = {own: other for own, other in both if own < draft_size and other < target_size}
        special = {index: target.special[name] for name, index in draft.special.items() if name in target.special}
        self.context = {other: own for own, other in special.items() if own < draft_size}
        if target.eos is not None and draft.eos is not None and target.eos not in self.context:
            self.context[target.eos] = draft.eos
            special[draft.eos] = target.eos
        self.words = len(text)
        special = {own: other for own, other in special.items() if own < draft_size and other < target_size}
        self.to_target = {**text, **special}
        self.sayable = sorted(
            {index for index, piece in draft.pieces.items() if piece and index < draft_size} | {*special}
        )

    def target_ids(self, tokens: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What draft ids say after a row's `tokens`, in the target's ids; up to the first that it cannot say."""
        context = b""
        for token in reversed(tokens[-CONTEXT_TOKENS:]):
            if token not in self.target.pieces:
                break
            context = self.target.pieces[token] + context
        chain: list[int] = []
        said = b""
        for index in [*drafted, None]:
            if index is not None and index in self.draft.pieces:
                said += self.draft.pieces[index]
                continue
            ids = self._continued(context, said)
            chain += ids
            if index not in self.to_target or self.target.spelled(ids) != said:
                break
            chain.append(self.to_target[index])
            context = said = b""
        return chain

    def _continued(self, context: bytes, said: bytes) -> list[int]:
        """Ids of `said` after `context`: as the whole is encoded where a token ends between them, else by itself."""
        whole = self.target.encode(context + said)
        lengths = [len(self.target.pieces.get(index, b"")) for index in whole]
        ends = [0, *accumulate(lengths)]
        ids = whole[ends.index(len(context)) :] if len(context) in ends else self.target.encode(said)
        for count, index in enumerate(ids):
            if not said.startswith(self.target.spelled(ids[: count + 1])) or not self.target.pieces.get(index):
                return ids[:count]
        return ids


@lru_cache(maxsize=4)
def bridge_between(target: Lexicon, draft: Lexicon, target_size: int, draft_size: int) -> Bridge:
    """The `Bridge`, kept from call to call."""
    return Bridge(target, draft, target_size, draft_size)


class RowText:
    """A row's text in draft ids, kept up as the row grows.

    Only the open end of the text is encoded anew. Its beginning is settled where the tokenizer gives the rest the same
    ids without it.

    Attributes:
        settled: how many of the ids will never change.
    """

    def __init__(self, bridge: Bridge):
        self._bridge = bridge
        self._ids = list(bridge.draft.leads)
        self._open = b""
        self._read = 0
        self._begun = False

    @property
    def settled(self) -> int:
        """Ids from the first on that stay as they are."""
        return len(self._ids)

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft ids, at least one, of a row that has grown to these target tokens.

        A special token stands for the draft's own of the same content; one that the draft lacks is left out.
        """
        bridge = self._bridge
        for token in tokens[self._read :]:
            if (piece := bridge.target.pieces.get(token)) is not None:
                self._open += piece if self._begun else self._first(piece)
                self._begun = True
                continue
            self._ids += bridge.draft.encode(self._open)
            self._open = b""
            own = bridge.context.get(token)
            if own is not None and [own] != self._ids:  # the draft's own BOS is there already
                self._ids.append(own)
        self._read = len(tokens)
        ends = bridge.draft.encode(self._open)
        ids = [*self._ids, *ends]
        if len(self._open) > LONGEST_OPEN:
            self._settle(ends)
        return ids or [bridge.draft.eos or 0]

    def _first(self, piece: bytes) -> bytes:
        """The first piece of a text, with the space before it that the draft's tokenizer would have put there."""
        if self._bridge.target.prefixed:
            piece = piece.removeprefix(b" ")
        return b" " + piece if self._bridge.draft.prefixed else piece

    def _settle(self, ids: list[int]) -> None:
        draft, text = self._bridge.draft, self._open
        if draft.spelled(ids) == text:
            ends = [0, *accumulate(len(draft.pieces.get(index, b"")) for index in ids)]
            cuts = [count for count, end in enumerate(ends) if end <= len(text) - LEAST_OPEN]
            for cut in reversed(cuts[-CUTS:]):
                if draft.encode(text[ends[cut] :]) == ids[cut:]:
                    self._ids += ids[:cut]
                    self._open = text[ends[cut] :]
                    return
        if len(text) > 8 * LONGEST_OPEN:
            self._ids += ids
            self._open = b""


def common_prefix(first: Sequence[int], second: Sequence[int], known: int = 0) -> int:
    """How many leading ids two sequences share, given that the first `known` are equal."""
    shortest = min(len(first), len(second))
    return next((place for place in range(known, shortest) if first[place] != second[place]), shortest)
