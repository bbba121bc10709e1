"""Code in the documentation runs as it is printed."""

import re
from pathlib import Path

import torch
from conftest import prompt, tiny

import hf_specdec
from hf_specdec.drafters import base

DOCS = Path(__file__).parent.parent / "docs"


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
