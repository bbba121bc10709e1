"""One self-contained HTML page: no remote resource, no script, light and dark, readable on a phone and on paper.

Everything that comes from a run (labels, prompt ids, errors, tokens) goes through Jinja's autoescape; only the charts'
own SVG is trusted.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from .charts import Chart
from .config import PLAIN


@dataclass(frozen=True)
class Grid:
    """A table of finished texts; the first column names the line.

    Args:
        best: index of the row to stress.
        notes: sentences below the table.
        folded: shown on demand.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    best: int | None = None
    folded: bool = False


@dataclass(frozen=True)
class Token:
    """A token's text: where it came from, and whether plain's text parts from this one here."""

    text: str
    accepted: bool
    parted: bool = False


@dataclass(frozen=True)
class Answer:
    """One turn of a prompt as its rounds: accepted draft tokens, closed by a token of the target."""

    rounds: Sequence[Sequence[Token]]
    note: str


@dataclass(frozen=True)
class TokenText:
    """What one method answered to one prompt."""

    sample: str
    part: str
    method: str
    answers: Sequence[Answer]


def token_texts(
    rows: list[dict[str, Any]], method: str, count: int, decode: Callable[[list[int]], list[str]]
) -> list[TokenText]:
    """Up to `count` prompts that `method` answered, taken in turn from all parts of all tasks.

    Args:
        decode: the text piece of each token id.
    """
    by_part: dict[tuple[str, str], list[TokenText]] = {}
    seen = set()
    for row in sorted(rows, key=lambda row: (row["unit"], row["repeat"])):
        turns = row["methods"].get(method, {}).get("turns", [])
        if row["unit"] in seen or not turns or any(turn["token_sources"] is None for turn in turns):
            continue
        seen.add(row["unit"])
        plain = row["methods"].get(PLAIN, {}).get("turns", [])
        for place, sample in enumerate(row["samples"]):
            chosen = by_part.setdefault((row["task"], sample["part"]), [])
            if len(chosen) < count:
                pairs = list(zip_longest(turns, plain[: len(turns)]))
                answers = [_answer(turn, other, place, decode) for turn, other in pairs]
                chosen.append(TokenText(sample["id"], sample["part"], method, answers))
    in_turn = zip_longest(*by_part.values())
    return [text for texts in in_turn for text in texts if text is not None][:count]


def _answer(
    turn: dict[str, Any], plain: dict[str, Any] | None, place: int, decode: Callable[[list[int]], list[str]]
) -> Answer:
    ids, sources = turn["token_ids"][place], turn["token_sources"][place]
    other = plain["token_ids"][place] if plain else ids
    parted = next((at for at, pair in enumerate(zip_longest(ids, other)) if pair[0] != pair[1]), None)
    rounds: list[list[Token]] = [[]]
    for at, (piece, accepted) in enumerate(zip(decode(ids), sources, strict=True)):
        rounds[-1].append(Token(piece.replace("\n", "↵\n"), bool(accepted), at == parted))
        if not accepted:
            rounds.append([])
    rounds = [each for each in rounds if each]
    same = "the same text as plain" if parted is None else f"parts from plain's text at token {parted + 1}"
    if plain is None:
        same = "plain has no text to compare"
    return Answer(rounds, f"{len(ids)} tokens in {len(rounds)} rounds, {sum(sources)} of them accepted drafts; {same}")


def render_page(
    title: str,
    sentences: Sequence[str],
    subtitle: str,
    charts: Sequence[Chart],
    grids: Sequence[Grid],
    texts: Sequence[TokenText],
    config: str,
) -> str:
    """The page.

    Args:
        title: the headline.
        sentences: what follows it.
        subtitle: what was run, in a few words.
        config: the run's settings as JSON.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["trusted"] = Markup
    environment.filters["breakable"] = _breakable
    template = environment.from_string(_TEMPLATE)
    return template.render(
        title=title,
        sentences=sentences,
        subtitle=subtitle,
        charts=charts,
        shown=[grid for grid in grids if not grid.folded],
        folded=[grid for grid in grids if grid.folded],
        texts=texts,
        config=config,
        style=Markup(_STYLE),
    )


def _breakable(text: str) -> Markup:
    """`text`, escaped, that may be broken after the punctuation of labels."""
    return Markup("<wbr>").join(re.split(r"(?<=[_:,=/@])|(?=\()", text))


_STYLE = """
:root { color-scheme: light dark; --surface: #fcfcfa; --card: #ffffff; --ink: #1d1d1b; --muted: #66655f;
  --grid: #e2e1da; --ours: #2468c4; --stock: #85847d; --prefill: #8a5fd0; --verify: #2f7fd8; --draft: #e09a00;
  --overhead: #d9483b; --undivided: #b3b2aa; --accepted: #c9ecd6; --accepted-ink: #0d3d22; --parted: #d9483b; }
@media (prefers-color-scheme: dark) { :root { --surface: #161615; --card: #1f1f1d; --ink: #eeede8; --muted: #a3a29a;
  --grid: #373733; --ours: #6aa6f0; --stock: #94938b; --prefill: #a988e6; --verify: #4a90e0; --draft: #d39a1e;
  --overhead: #e8675b; --undivided: #6f6e68; --accepted: #1c4a30; --accepted-ink: #c6f0d6; --parted: #f0796e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--ink); overflow-wrap: anywhere;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.6rem, 1.1rem + 2.4vw, 2.7rem); line-height: 1.15; letter-spacing: -.02em; margin: .3rem 0 1rem;
  max-width: 26em; text-wrap: balance; }
h2 { font-size: 1.35rem; letter-spacing: -.01em; margin: 3rem 0 1rem; }
h3 { font-size: 1.02rem; margin: 0 0 .3rem; }
.eyebrow, figcaption p, .note, .legend, .meta { color: var(--muted); font-size: .875rem; }
.eyebrow { margin: 0; }
.lead { font-size: 1.1rem; max-width: 44em; margin: 0; }
.lead p { margin: .5rem 0; }
.charts { columns: 2 27rem; column-gap: 1.25rem; }
figure, .text, .table { background: var(--card); border: 1px solid var(--grid); border-radius: 12px;
  margin: 0 0 1.25rem; padding: 1.1rem 1.2rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; margin-top: .8rem; overflow: visible;
  stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif !important; }
figcaption p { margin: 0; }
.meta { margin: .3rem 0; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; margin: .6rem 0 0; padding: 0; }
.legend i { display: inline-block; width: .75em; height: .75em; border-radius: 3px; margin-right: .45em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%;
  overflow-wrap: normal; }
th, td { text-align: left; padding: .45rem 1rem .45rem 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--muted); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 600; max-width: 18rem; overflow-wrap: break-word; }
thead th:first-child, tbody th { position: sticky; left: 0; background: var(--card); }
td { min-width: 9rem; max-width: 36rem; overflow-wrap: anywhere; }
.short { min-width: 0; white-space: nowrap; }
.best th, .best td { background: color-mix(in srgb, var(--ours) 12%, var(--card)); }
.note { margin: .6rem 0 0; }
details { margin: .6rem 0; }
summary { cursor: pointer; font-weight: 600; padding: .3rem 0; }
.tokens { white-space: pre-wrap; line-height: 2; margin: .6rem 0 0; font-size: .95rem; }
.round { border-right: 1px solid var(--muted); padding-right: 1px; margin-right: 1px; }
.accepted { background: var(--accepted); color: var(--accepted-ink); border-radius: 3px; padding: .1em 0; }
.target { text-decoration: underline dotted var(--muted); text-underline-offset: .3em; }
.parted { outline: 2px solid var(--parted); outline-offset: 1px; border-radius: 2px; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0 0 1.2rem; }
pre { overflow-x: auto; font-size: .8rem; }
@media (max-width: 40rem) { main { padding: 1.5rem .9rem 3rem; } figure, .text, .table { padding: .9rem; }
  tbody th.short { white-space: normal; } }
"""

_TEMPLATE = """
{%- macro short(text) %}{% if text | length < 26 %} class="short"{% endif %}{% endmacro %}
{%- macro table(grid) %}
<div class="scroll"><table>
<thead><tr>{% for column in grid.columns %}<th scope="col">{{ column }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in grid.rows %}
<tr{% if loop.index0 == grid.best %} class="best"{% endif %}>
<th scope="row"{{ short(row[0]) }}>{{ row[0] | breakable }}</th>
{%- for cell in row[1:] %}<td{{ short(cell) }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% for note in grid.notes %}
<p class="note">{{ note }}</p>
{% endfor %}
{% endmacro -%}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="hf_specdec">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>{{ style }}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">{{ subtitle }}</p>
<h1>{{ title }}</h1>
<div class="lead">
{% for sentence in sentences %}
<p>{{ sentence }}</p>
{% endfor %}
</div>
</header>
{% if charts %}
<h2>At a glance</h2>
<div class="charts">
{% for chart in charts %}
<figure id="{{ chart.name }}">
<figcaption><h3 id="{{ chart.name }}-title">{{ chart.title }}</h3><p>{{ chart.caption }}</p></figcaption>
{% if chart.legend %}
<ul class="legend">
{% for role, text in chart.legend %}
<li><i style="background: var(--{{ role }})"></i>{{ text }}</li>
{% endfor %}
</ul>
{% endif %}
{{ chart.svg | trusted }}
</figure>
{% endfor %}
</div>
{% endif %}
<h2>In numbers</h2>
{% for grid in shown %}
<section class="table"><h3>{{ grid.title }}</h3>{{ table(grid) }}</section>
{% endfor %}
{% if texts %}
<h2>Where the tokens came from</h2>
<p class="key meta"><span><span class="accepted">draft, accepted</span></span> <span><span class="target">the
model's own token</span></span> <span><span class="round">end of a round&nbsp;</span></span> <span><span
class="parted">plain went on differently</span></span> <span>↵ line break</span></p>
{% for text in texts %}
<article class="text">
<h3>{{ text.sample }}</h3>
<p class="meta">{{ text.part }}, answered by {{ text.method }}</p>
{% for answer in text.answers %}
<p class="meta">{% if text.answers | length > 1 %}Turn {{ loop.index }}: {% endif %}{{ answer.note }}.</p>
<div class="tokens">
{%- for round in answer.rounds -%}
<span class="round">
{%- for token in round -%}
<span class="{{ 'accepted' if token.accepted else 'target' }}{{ ' parted' if token.parted }}">{{ token.text }}</span>
{%- endfor -%}
</span>
{%- endfor -%}
</div>
{% endfor %}
</article>
{% endfor %}
{% endif %}
<h2>Details</h2>
{% for grid in folded %}
<details><summary>{{ grid.title }}</summary>{{ table(grid) }}</details>
{% endfor %}
<details><summary>Settings of the run</summary><pre>{{ config }}</pre></details>
</main>
</body>
</html>
"""
