"""Errors of the package. Each says what was asked, why it cannot be, and what to do instead.

All are raised before the target's first forward pass. They subclass `ValueError`, which is what `generate` raises for
options that do not fit.
"""

import difflib
import os.path
from collections.abc import Iterable


class SpecDecError(ValueError):
    """A request that cannot be carried out as asked."""


class UnsupportedOptionError(SpecDecError):
    """An option of `generate` that speculative decoding cannot honour."""


class UnsupportedModelError(SpecDecError):
    """A model whose cache, positions or masks cannot verify a block of tokens exactly."""


def no_directory(name: object) -> str | None:
    """That a model's name is the path of nothing; None for other names."""
    path = str(name)
    if path.startswith(("/", ".", "~")) and not os.path.exists(path):
        return f"There is no directory {path!r}."
    return None


def unknown_name(kind: str, name: object, known: Iterable[str]) -> SpecDecError:
    """An error for a name that is not among `known`, with the nearest valid one."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return SpecDecError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")
