"""`SpecDecConfig`: checked when it is made, frozen, and there and back through plain data."""

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
import yaml
from cases import draft_model, forward_widths, plain_model, spec_model
from conftest import prompt
from oracle import Oracle

from hf_specdec import SpecDecConfig, SpecDecError
from hf_specdec.drafters import DraftModel, LayerSkip, PromptLookup, Suffix

CONFIGS = [
    SpecDecConfig(),
    SpecDecConfig(strategy="prompt_lookup", strategy_options={"max_ngram": 4, "min_ngram": 2}, max_draft_tokens=6),
    SpecDecConfig(strategy="suffix", verifier="rejection", schedule="constant"),
    SpecDecConfig(strategy=PromptLookup(max_ngram=5, min_ngram=1), max_draft_tokens=0),
    SpecDecConfig(strategy=Suffix(), max_draft_tokens=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.strategy)[:20])
def test_round_trip_through_json(config):
    values = json.loads(json.dumps(config.to_dict()))
    again = SpecDecConfig.from_dict(values)
    assert again.to_dict() == config.to_dict()
    assert again.resolved == config.resolved
    assert again.draft_tokens() == config.draft_tokens()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.strategy)[:20])
def test_pickle(config):
    assert pickle.loads(pickle.dumps(config)) == config


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIGS[0].verifier = "rejection"


def test_defaults():
    config = SpecDecConfig(strategy="suffix")
    assert (config.verifier, config.max_draft_tokens, config.schedule) == ("exact", None, None)
    assert config.draft_tokens() == Suffix.default_draft_tokens
    assert SpecDecConfig(strategy="suffix", max_draft_tokens=0).draft_tokens() == 0


@pytest.mark.parametrize(
    "request_of",
    [lambda: "suffix", lambda: Suffix(), lambda: {"strategy": "suffix"}, lambda: SpecDecConfig(strategy="suffix")],
)
def test_every_form_means_the_same(request_of):
    assert SpecDecConfig.of(request_of()).resolved == Suffix()


def test_a_model_means_a_draft_model():
    strategy = SpecDecConfig.of(draft_model()).resolved
    assert isinstance(strategy, DraftModel)
    assert strategy.model is draft_model()


def test_the_users_options_are_not_shared():
    options = {"max_ngram": 4}
    config = SpecDecConfig(strategy="prompt_lookup", strategy_options=options)
    options["max_ngram"] = 9
    assert config.resolved.max_ngram == 4
    assert config.to_dict()["strategy_options"] == {"max_ngram": 4}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"strategy": "sufix"}, "Did you mean 'suffix'"),
        ({"strategy": "suffix", "verifier": "rejektion"}, "Did you mean 'rejection'"),
        ({"strategy": "suffix", "schedule": "const"}, "Did you mean 'constant'"),
        ({"strategy": "suffix", "max_draft_token": 3}, "Did you mean 'max_draft_tokens'"),
        ({"strategy": "prompt_lookup", "strategy_options": {"min_gram": 3}}, "Did you mean 'min_ngram'"),
        ({"strategy": "suffix", "max_draft_tokens": -1}, "max_draft_tokens=-1"),
        ({"strategy": "suffix", "max_draft_tokens": True}, "max_draft_tokens=True"),
        ({"strategy": "suffix", "max_draft_tokens": 1.0}, "max_draft_tokens=1.0"),
        ({"strategy": PromptLookup(), "strategy_options": {"max_ngram": 3}}, "strategy_options"),
        ({"strategy": PromptLookup}, "PromptLookup()"),
        ({"strategy": torch.zeros(2)}, "a factory of a CandidateGenerator"),
        ({"strategy": None}, "a factory of a CandidateGenerator"),
    ],
    ids=str,
)
def test_errors_say_what_to_do(values, says):
    with pytest.raises(SpecDecError) as caught:
        SpecDecConfig.from_dict(values)
    assert says in str(caught.value)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.strategy)[:20])
@pytest.mark.parametrize(
    ("name", "write"), [("mine.yaml", yaml.safe_dump), ("mine.yml", yaml.safe_dump), ("mine.json", json.dumps)]
)
def test_a_file_stands_for_its_config(config, name, write, tmp_path):
    file = tmp_path / name
    file.write_text(write(config.to_dict()))
    for request in (file, str(file)):
        assert SpecDecConfig.of(request).to_dict() == config.to_dict()


def test_a_file_is_an_assistant_strategy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("strategy: prompt_lookup\nstrategy_options: {max_ngram: 3}\nschedule: constant\n")
    inputs = {**prompt(), "max_new_tokens": 16, "do_sample": False}
    output = spec_model().generate(**inputs, assistant_strategy="mine.yaml", return_dict_in_generate=True)
    assert output.sequences.tolist() == spec_model().generate(**inputs).tolist()
    assert (output.speculation.strategy, output.speculation.num_draft_tokens > 0) == ("prompt_lookup", True)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("absent.yaml", None, "No such file"),
        ("odd.yaml", "strategy: [", "cannot be read"),
        ("odd.json", "strategy: suffix", "cannot be read"),
        ("odd.yaml", b"\xff\xfe\xfa", "cannot be read"),
        ("odd.yaml", "", "holds no mapping"),
        ("odd.yaml", "suffix", "holds no mapping"),
        ("odd.json", '["suffix"]', "holds no mapping"),
        ("odd.yaml", "strategi: suffix", "Did you mean 'strategy'"),
        ("odd.yaml", "strategy: sufix", "Did you mean 'suffix'"),
        ("odd.yaml", "1: suffix", "Unknown field of SpecDecConfig: 1"),
        ("odd.yaml", "strategy_options:", "strategy_options=None"),
        ("odd.yaml", "max_draft_tokens: many", "max_draft_tokens='many'"),
    ],
)
def test_an_odd_file_is_named_in_the_error(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecDecError) as caught:
        SpecDecConfig.of(str(tmp_path / name))
    assert name in str(caught.value) and says in str(caught.value)


def test_a_path_that_is_no_file_of_a_config_is_refused(tmp_path):
    with pytest.raises(SpecDecError, match=r"DraftModel\("):
        SpecDecConfig.of(tmp_path)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(SpecDecError, match="cannot be read"):
        SpecDecConfig.of(tmp_path / "folder.yaml")


def test_a_strategy_object_is_kept():
    strategy = Oracle.of([[1, 2]])
    assert SpecDecConfig(strategy=strategy).resolved is strategy


def test_a_default_length_shrinks_with_the_rows_of_a_round():
    model = LayerSkip(exit_layer=1)
    for strategy, schedule, tokens in (("suffix", "adaptive", 32), (model, "constant", 32), (model, "adaptive", 64)):
        config = SpecDecConfig(strategy=strategy, schedule=schedule)
        lengths = [config.draft_tokens(rows) for rows in (1, 2, 4, 8, 64)]
        assert lengths == sorted(lengths, reverse=True) and lengths[-1] == 2
        assert all(rows * (1 + config.draft_tokens(rows)) <= tokens for rows in range(1, 11))
    assert SpecDecConfig(model, schedule="adaptive").draft_tokens() == 9
    assert SpecDecConfig(strategy="suffix", max_draft_tokens=9).draft_tokens(64) == 9


def test_rounds_get_longer_when_rows_leave():
    inputs = {**prompt(8), "max_new_tokens": 40, "do_sample": False}
    text = plain_model().generate(**inputs)[:, 24:].tolist()
    early = {token for row in text for token in row[:6]}
    ends = [next(token for token in row if token not in {*early, *text[0]}) for row in text[1:]]
    with forward_widths(spec_model()) as widths:
        spec_model().generate(**inputs, eos_token_id=ends, assistant_strategy=Oracle.of(text))
    assert (widths[1], max(widths[1:])) == (4, 1 + Oracle.default_draft_tokens)
