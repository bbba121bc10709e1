"""Acceptance rules: pure functions of a draft tree and the target's scores, and the table of them.

`VERIFIERS` says of each rule whether it is lossless, what it needs and which shapes it takes. `bind_verifier` gives a
row of it whose rule has the user's settings.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from types import MappingProxyType
from typing import Any

from ..errors import SpecDecError, unknown_name
from .acceptance import Acceptance, Rule, follow, likeliest, most_likely, sample_with
from .lossless import block, exact, rejection
from .lossy import relative, typical

__all__ = [
    "VERIFIERS",
    "Acceptance",
    "Rule",
    "Verifier",
    "bind_verifier",
    "block",
    "exact",
    "follow",
    "likeliest",
    "most_likely",
    "rejection",
    "relative",
    "sample_with",
    "typical",
]


@dataclass(frozen=True)
class Verifier:
    """A rule and the facts that are checked before the first forward pass.

    Args:
        rule: called as `rule(tree, scores, sampling, noise)`.
        lossless: the output law is the target's.
        uses_draft_probs: reads `tree.probs`; drafts must be drawn independently of the target's noise.
        uses_noise: reads the `(B, N, V)` draws of plain sampling.
        trees: accepts more than chains.
        settings: keywords of the rule that the user may set, each with its least and its largest value. Their defaults
            are the rule's own.
    """

    rule: Rule
    lossless: bool
    uses_draft_probs: bool
    uses_noise: bool
    trees: bool
    settings: Mapping[str, tuple[float, float]] = field(default_factory=dict)


VERIFIERS: dict[str, Verifier] = {
    "exact": Verifier(exact, lossless=True, uses_draft_probs=False, uses_noise=True, trees=True),
    "rejection": Verifier(rejection, lossless=True, uses_draft_probs=True, uses_noise=False, trees=True),
    "block": Verifier(block, lossless=True, uses_draft_probs=True, uses_noise=False, trees=False),
    "typical": Verifier(
        typical,
        lossless=False,
        uses_draft_probs=False,
        uses_noise=True,
        trees=True,
        settings={"posterior_threshold": (0.0, 1.0), "posterior_alpha": (0.0, math.inf)},
    ),
    "threshold": Verifier(
        relative,
        lossless=False,
        uses_draft_probs=True,
        uses_noise=False,
        trees=False,
        settings={"threshold": (0.0, math.inf)},
    ),
}


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def bind_verifier(name: Any, options: Any = NO_OPTIONS) -> Verifier:
    """The row of `VERIFIERS` of this name, its rule with these settings.

    Args:
        options: settings by name; the others have the rule's defaults.

    Raises:
        SpecDecError: an unknown name, a setting that the rule does not have, or a value out of its range.
    """
    if not isinstance(name, str) or name not in VERIFIERS:
        raise unknown_name("verifier", name, VERIFIERS)
    verifier = VERIFIERS[name]
    if not isinstance(options, Mapping):
        raise SpecDecError(
            f"verifier_options={options!r} is no dict of settings by name; give one, as in {{'threshold': 0.5}}, or "
            "leave it out for the defaults."
        )
    if options and not verifier.settings:
        able = " or ".join(repr(other) for other, each in VERIFIERS.items() if each.settings)
        raise SpecDecError(
            f"verifier={name!r} has no settings, so verifier_options={dict(options)!r} would be ignored; leave them "
            f"out, or use verifier={able}, which have some."
        )
    for option, value in options.items():
        if option not in verifier.settings:
            raise unknown_name(f"option of verifier {name!r}:", option, verifier.settings)
        least, most = verifier.settings[option]
        number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
        if not least <= number <= most or math.isinf(number):
            span = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
            raise SpecDecError(f"verifier_options: {option}={value!r} is no number {span}; give one.")
    if not options:
        return verifier
    return replace(verifier, rule=functools.partial(verifier.rule, **options))
