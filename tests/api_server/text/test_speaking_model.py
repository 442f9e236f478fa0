"""Prompts of models that generate speech tokens: voices, instructions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from api_server.errors import RequestFailed
from api_server.text.speaking_model import SpeakingModel
from api_server.text.tokenizer import Tokenizer
from interfaces import CodecFacts
from shared.speech_tokens import ORDER
from tests.api_server.conftest import byte_level_backend

CODEC = CodecFacts(8000, 80, 3, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|say|>", "<|quiet|>")])
    names = [f"<|c{place}_{code}|>" for place in range(2) for code in range(8)]
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|quiet|>").save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "codec").mkdir()
    codec = {"model_type": "dac", "n_codebooks": 2, "codebook_size": 8, "sampling_rate": 8000}
    (folder / "codec" / "config.json").write_text(json.dumps(codec))
    first = [backend.token_to_id(f"<|c{place}_1|>") for place in range(2)]
    given = {
        "codec": "codec",
        "prompt": ["<|say|>", "{voice} ({instructions}): {text}", "<|say|>"],
        "slots": [[0, "<|c0_0|>"], [1, "<|c1_0|>"]],
        "stop": ["<|quiet|>"],
        "voices": {"Ada": {}, "Bob": {"tokens": first, "transcript": "well then."}},
        "sampling": {"temperature": 0.5},
    }
    (folder / "speech.json").write_text(json.dumps(given))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[SpeakingModel]:
    tokenizer = Tokenizer.load(str(folder))
    found = SpeakingModel.of(str(folder), tokenizer)
    assert found is not None
    yield found
    tokenizer.close()


def test_a_prompt_has_the_clients_text_in_its_places(model: SpeakingModel) -> None:
    say = model.tokenizer.ids_of("<|say|>")
    inner = model.tokenizer.ids_of("Ada (gladly): one {voice} two")
    assert model.prompts(["one {voice} two"], model.voice("Ada"), "gladly") == [[*say, *inner, *say]]
    assert len(model.prompts(["one", "two"], model.voice(None), "")) == 2


def test_a_voice_may_be_what_the_speech_goes_on_from(model: SpeakingModel) -> None:
    bob = model.voice("Bob")
    (prompt,) = model.prompts(["one two"], bob, "")
    inner = model.tokenizer.ids_of("Bob (): well then. one two")
    say = model.tokenizer.ids_of("<|say|>")
    assert prompt == [*say, *inner, *say, *bob.tokens]
    assert model.codes_of(list(bob.tokens), 0) == [1, 1]


def test_sampling_keeps_to_the_order_of_the_tokens(model: SpeakingModel) -> None:
    sampling = model.sampling(7, 10, CODEC, 100)
    assert (sampling.seed, sampling.temperature, sampling.max_new_tokens) == (7, 0.5, 90)
    assert list(model.ends) == sampling.stop_token_ids
    order = json.loads(sampling.named_processors[ORDER])
    assert order == {"zeros": list(model.zeros), "codes": 8, "ends": list(model.ends)}
    # 120 s of 100 frames with two codes each.
    assert model.sampling(7, 10, CODEC, None).max_new_tokens == 24_000


def test_what_cannot_be_spoken_is_refused(model: SpeakingModel) -> None:
    voice = model.voice(None)
    with pytest.raises(RequestFailed, match="input has nothing to speak"):
        model.prompts([], voice, "")
    with pytest.raises(RequestFailed, match="instructions must be plain text, and it has the model's token"):
        model.prompts(["one"], voice, "<|quiet|>")
    with pytest.raises(RequestFailed, match="voice 'Eve' is unknown: this model has Ada, Bob"):
        model.voice("Eve")
    with pytest.raises(RequestFailed, match="a part of input takes 99 tokens, and 100 are possible"):
        model.sampling(7, 99, CODEC, 100)


def test_a_token_that_the_vocabulary_lacks_ends_the_start(folder: Path, tmp_path: Path) -> None:
    given = json.loads((folder / "speech.json").read_text()) | {"codec": str(folder / "codec"), "stop": ["<|hush|>"]}
    (tmp_path / "speech.json").write_text(json.dumps(given))
    tokenizer = Tokenizer.load(str(folder))
    with pytest.raises(ValueError, match=r"the vocabulary has no token '<\|hush\|>': name one that it has"):
        SpeakingModel.of(str(tmp_path), tokenizer)
    tokenizer.close()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sampling": {"temperature": -1}}, "sampling: temperature must be"),
        (
            {"slots": [[0, "<|c0_0|>"], [1, 993]]},
            "slots has tokens up to 1000, and the model has 0 to 999: name others",
        ),
        ({"slots": [[0, "<|c0_0|>"], [1, 992]]}, ""),
        ({"stop": [1000]}, "stop has tokens up to 1000, and the model has 0 to 999: name others"),
        (
            {"voices": {"Bob": {"tokens": [1, 2], "transcript": "well then."}}},
            "voices.Bob.tokens must be codes in the order of slots: encode the voice again",
        ),
    ],
)
def test_values_that_no_request_could_use_end_the_start(
    folder: Path, tmp_path: Path, fields: dict[str, Any], problem: str
) -> None:
    given = json.loads((folder / "speech.json").read_text()) | {"codec": str(folder / "codec"), "voices": ["Ada"]}
    (tmp_path / "speech.json").write_text(json.dumps(given | fields))
    (tmp_path / "config.json").write_text('{"vocab_size": 1000}')
    tokenizer = Tokenizer.load(str(folder))
    if problem:
        with pytest.raises(ValueError) as caught:
            SpeakingModel.of(str(tmp_path), tokenizer)
        assert str(caught.value).startswith(f"speech.json of {tmp_path}: {problem}")
    else:
        assert SpeakingModel.of(str(tmp_path), tokenizer) is not None
    tokenizer.close()
