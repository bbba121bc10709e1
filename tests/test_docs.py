"""Code in the documentation runs as it is printed."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from conftest import prompt, tiny
from text_models import CHAT_TEMPLATE, make_model, make_tokenizer

import hf_specdec
from hf_specdec.drafters import base
from hf_specdec.stats import SpeculationStats

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.usefixtures("constant_schedule")
def test_the_strategy_of_the_architecture_page_drafts(monkeypatch):
    monkeypatch.setattr(base, "STRATEGIES", dict(base.STRATEGIES))
    (code,) = re.findall(r"```python\n(from dataclasses.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    names: dict[str, object] = {"__name__": "phrase_book"}
    exec(compile(code, "architecture.md", "exec"), names)
    model, inputs = hf_specdec.enable(tiny()), {**prompt(3), "max_new_tokens": 12, "do_sample": False}
    plain = model.generate(**inputs)
    phrases = tuple(tuple(row) for row in plain[:, inputs["input_ids"].shape[1] :].tolist())
    output = model.generate(**inputs, assistant_strategy=names["PhraseBook"](phrases), return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculation.num_accepted_draft_tokens > 0


def test_the_fields_of_a_call_are_listed():
    section = (DOCS / "architecture.md").read_text().split("\n## What a call says")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    properties = {name for name, each in vars(SpeculationStats).items() if isinstance(each, property)}
    fields = {each.name for each in dataclasses.fields(SpeculationStats)}
    assert sorted(name.strip("`") for row in rows for name in row.split(", ")) == sorted(fields | properties)


def test_the_readme_says_what_transformers_says_without_enable():
    (said,) = re.findall(r"transformers says\n``(.*?)``", (DOCS.parent / "README.md").read_text())
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), seed=1)
    with pytest.raises(ValueError, match=re.escape(said)):
        model.generate(**prompt(3), assistant_strategy="auto")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=re.escape(said)):
        pipe("the cat sat on the", assistant_strategy="auto")
    hf_specdec.enable(pipe.model)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert pipe("the cat sat on the", assistant_strategy="auto", **options) == pipe("the cat sat on the", **options)


LAYERS = {"layer_skip": 30}
"""Of the tiny model, where an example names layers of the real one."""
NUMBER = re.compile(r"\d+(\.\d+)?")
INDEX = DOCS / "strategies" / "README.md"
PAGES = sorted(set((DOCS / "strategies").glob("*.md")) - {INDEX}, key=lambda page: page.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_strategy_page_runs(page, monkeypatch, tmp_path, capsys):
    """On a tiny model, so numbers differ from those printed there; the lines are the same."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    model = make_model(len(tokenizer), seed=1, layers=LAYERS.get(page.stem, 1))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name, dtype: model)
    text = page.read_text()
    for code, printed in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page.name, "exec"), {"__name__": page.stem})
        assert NUMBER.sub("#", capsys.readouterr().out) == NUMBER.sub("#", printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_strategy_page_lists_every_option(page):
    listed = {name for row in re.findall(r"^\| (`.*?) \|", page.read_text(), re.MULTILINE) for name in row.split(", ")}
    strategy = hf_specdec.known_strategies()[page.stem]
    options = {f"`{each.name}`" for each in dataclasses.fields(strategy) if each.init}
    assert listed == options or page.stem == "free"


def test_the_index_of_strategies_has_a_row_for_each():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+\.md)\) \|", INDEX.read_text(), re.MULTILINE)
    own = [name for name, kind in base.STRATEGIES.items() if kind.__module__.startswith("hf_specdec.")]
    assert sorted(name for name, _ in rows) == sorted(own)
    assert {page for _, page in rows} == {page.name for page in PAGES}
