"""One server with a chat model, an embedder, a reranker and a model that speaks: real processes, real models."""

from __future__ import annotations

import base64
import io
import itertools
import json
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from api_server.speech.encoding import Encoder
from api_server.speech.sentences import sentences
from demo_model.painter.judge import see
from shared.speech_files import SpeechFiles
from tests.api_server.pooling.conftest import save_tokenizer
from tests.model_worker.speech.tiny_speaker import SpeakerJudge, tiny_speaker
from tests.model_worker.speech.tiny_vits import tiny_vits
from tests.one_shot.server import VOCAB, reference, tiny_bert
from tests.one_shot.test_speech import expected
from tests.one_shot.test_speech_tokens import REF_TEXT, check_sound, clip_of
from tests.system.served_model import make_model
from tests.system.server import Server

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'tokenyard[test]'")

from playwright.sync_api import expect

from tests.ui.browser import MILLISECONDS, Visit, chromium, needs_chromium

expect.set_options(timeout=MILLISECONDS)

TEXTS = ["the quick brown fox", "def f(x): return x + 1", "Hello"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_bert(tmp_path_factory.mktemp("embedder"))
    save_tokenizer(path, 160, VOCAB)
    return path


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reranker")
    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "num_labels": 1,
        "vocab_size": 600,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = BertConfig(**sizes, intermediate_size=48, max_position_embeddings=160)
    BertForSequenceClassification(config).eval().save_pretrained(path)
    save_tokenizer(path, 160)
    return path


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vits(tmp_path_factory.mktemp("speech") / "tiny-speaker")


@pytest.fixture(scope="module")
def imitator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_speaker(tmp_path_factory.mktemp("imitator") / "tiny-imitator", length=320)


@pytest.fixture(scope="module")
def server(
    embedder: Path, reranker: Path, speaker: Path, imitator: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = ["--served-model-name", "chat", "--also", f"embed={embedder}", "--also", f"rerank={reranker}"]
    flags += ["--also", f"voice={speaker}", "--also", "painter=tokenyard-painter", "--devices", "cpu"]
    flags += ["--also", f"imitator={imitator}", "--voice-clips"]
    with pytest.MonkeyPatch.context() as patch:
        # With other sums the length of a sound, which is rounded up, may be another.
        patch.setenv("OMP_NUM_THREADS", "1")
        with Server(make_model(folder / "chat"), flags, folder / "log") as server:
            yield server


def post(server: Server, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def pixels(data: str) -> NDArray[np.int16]:
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return np.asarray(image, np.int16)


def test_all_models_are_listed(server: Server) -> None:
    names = ["chat", "embed", "rerank", "voice", "painter", "imitator"]
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == names
    anthropics = httpx.get(f"{server.url}/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in anthropics["data"]] == names
    assert (anthropics["first_id"], anthropics["last_id"]) == ("chat", "imitator")
    assert httpx.get(f"{server.url}/v1/models/embed").json()["max_model_len"] == 160
    assert httpx.get(f"{server.url}/v1/models/nope").status_code == 404


def test_the_embedded_painter_paints_what_it_is_told(server: Server) -> None:
    symbols = ("house", "star", "7", "sun", "heart", "circle", "boat", "3", "moon", "diamond")
    right = 0
    for symbol, colour in zip(symbols, itertools.cycle(("red", "blue", "green")), strict=False):
        body = {"model": "painter", "prompt": f"a {colour} {symbol}", "seed": 11, "size": "64x64"}
        answer = post(server, "/v1/images/generations", **body)
        assert answer.status_code == 200, answer.text
        with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
            found = see(np.asarray(image, np.float32) / np.float32(255))
        right += found is not None and (found.symbol, found.colour) == (symbol, colour)
    assert right >= 9


@needs_chromium
def test_the_page_paints(server: Server) -> None:
    with chromium() as browser:
        visit = Visit.begin(browser, server.url)
        visit.page.locator(".top nav").get_by_role("link", name="Images").click()
        visit.page.get_by_label("What the picture shows").fill("a red house")
        for label, value in (("Pictures", "2"), ("Seed", "11"), ("Size", "64x64")):
            visit.set(label, value)
        visit.button("Paint").click()
        made = visit.page.locator(".pictures img[alt='a red house']")
        expect(made).to_have_count(2)
        visit.page.wait_for_function("() => document.querySelector('img.made').naturalWidth === 64")
        source = made.first.get_attribute("src")
        visit.end()
    plain = {"model": "painter", "prompt": "a red house", "seed": 11, "size": "64x64"}
    (image,) = post(server, "/v1/images/generations", **plain).json()["data"]
    assert source is not None
    shown, alone = (pixels(data) for data in (source.partition(",")[2], image["b64_json"]))
    # Two images in one pass are rounded in another order.
    assert np.abs(shown - alone).max() <= 1


def test_a_response_may_be_an_image_by_the_model_beside_it(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    tool: Any = {"type": "image_generation", "size": "64x64", "partial_images": 2, "seed": 11}
    wish: Any = {"model": "chat", "tools": [tool], "tool_choice": {"type": "image_generation"}}
    turns: Any = [{"role": "assistant", "content": "What?"}, {"role": "user", "content": "a red house"}]
    answer = client.responses.create(input=turns, **wish)
    assert (answer.status, answer.model) == ("completed", "chat")
    (item,) = answer.output
    assert item.type == "image_generation_call"
    assert item.result is not None
    plain = {"model": "painter", "prompt": "a red house", "seed": 11, "size": "64x64"}
    (image,) = post(server, "/v1/images/generations", **plain).json()["data"]
    assert item.result == image["b64_json"]

    events = list(client.responses.create(input="a red house", stream=True, **wish))
    call = "response.image_generation_call"
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *(f"{call}.in_progress", f"{call}.generating", f"{call}.partial_image", f"{call}.partial_image"),
        *(f"{call}.completed", "response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    (last,) = events[-1].response.output
    assert last.type == "image_generation_call"
    assert last.result == image["b64_json"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": []}, "tools does not have"),
        ({"tools": [{"type": "image_generation", "size": 7}]}, "tools[0].size"),
        ({"tools": [{"type": "image_generation", "size": "63x64"}]}, "size"),
        ({"tools": [{"type": "image_generation", "model": "embed"}]}, "needs a model that paints"),
        (
            {"tools": [{"type": "image_generation"}], "input": [{"role": "assistant", "content": "a"}]},
            "must end with a user's text",
        ),
    ],
)
def test_images_of_responses_that_cannot_be_are_refused(server: Server, fields: dict[str, Any], said: str) -> None:
    wish: dict[str, Any] = {"model": "chat", "input": "a red house", "tool_choice": {"type": "image_generation"}}
    answer = post(server, "/v1/responses", **(wish | fields))
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_each_request_is_answered_by_the_model_that_it_names(server: Server, embedder: Path) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    chat = post(server, "/v1/chat/completions", model="chat", messages=messages, max_tokens=5).json()
    assert (chat["model"], chat["usage"]["completion_tokens"]) == ("chat", 5)
    tokenizer = AutoTokenizer.from_pretrained(embedder)
    ids = [[token % 200 for token in tokenizer(text)["input_ids"]] for text in TEXTS]
    answer = post(server, "/v1/embeddings", model="embed", input=ids).json()
    assert answer["model"] == "embed"
    found = np.array([item["embedding"] for item in answer["data"]], np.float32)
    np.testing.assert_allclose(found, reference(embedder, [np.array(i, np.int32) for i in ids]), atol=2e-5)
    ranked = post(server, "/v1/rerank", model="rerank", query="Hello", documents=TEXTS).json()
    assert sorted(item["index"] for item in ranked["results"]) == [0, 1, 2]


def test_a_request_without_a_model_is_for_the_first_that_can_do_it(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    assert post(server, "/v1/chat/completions", messages=messages, max_tokens=2).json()["model"] == "chat"
    found = post(server, "/v1/embeddings", input=[5, 6, 7])
    assert found.status_code == 200, found.text
    assert found.json()["model"] == "embed"


def test_a_wrong_name_and_a_wrong_task_are_refused(server: Server) -> None:
    unknown = post(server, "/v1/embeddings", model="nope", input="Hello")
    assert unknown.status_code == 404
    assert "this server has 'chat', 'embed', 'rerank', 'voice', 'painter', 'imitator'" in unknown.text
    for path, model, body in (
        ("/v1/embeddings", "chat", {"input": "Hello"}),
        ("/v1/chat/completions", "embed", {"messages": [{"role": "user", "content": "Hello!"}]}),
    ):
        refused = post(server, path, model=model, **body)
        assert refused.status_code == 400, refused.text
        assert f"'{model}'" in refused.text


def test_the_death_of_one_models_worker_is_that_models_alone(server: Server) -> None:
    workers = [child for child in server.children() if "also0" in " ".join(child.cmdline()) and is_worker(child)]
    assert workers
    for worker in workers:
        worker.kill()
    messages = [{"role": "user", "content": "Hello!"}]
    assert post(server, "/v1/chat/completions", model="chat", messages=messages, max_tokens=2).status_code == 200
    assert post(server, "/v1/embeddings", model="embed", input=[5, 6, 7]).status_code == 200
    server.wait_for("all models", 60, server.is_ready)


SENTENCES = ["the first train leaves at nine.", "the second one is late again.", "... no third one ever came at all!"]
ANSWER = " ".join(SENTENCES)


def spoken(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is this text, as sound."""
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": "Hello!"}],
        "modalities": ["text", "audio"],
        "structured_outputs": {"choice": [text]},
        "max_tokens": 2000,
        "seed": 7,
        **fields,
    }


def test_an_answer_is_spoken_by_a_model_beside_it(server: Server, speaker: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    asked = spoken(ANSWER, audio={"voice": "default", "format": "wav"})
    extra = {"structured_outputs": asked.pop("structured_outputs")}
    answer = client.chat.completions.create(**asked, extra_body=extra)
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio is not None
    assert message.audio.transcript == ANSWER
    assert message.audio.expires_at > answer.created
    rate = SpeechFiles.read(speaker).sample_rate
    whole = Encoder("wav", rate, rate).whole(expected(speaker, ANSWER, 7))
    assert base64.b64decode(message.audio.data) == whole
    # The conversation goes on as if the answer had been text.
    lengths = []
    for said in ({"audio": {"id": message.audio.id}}, {"content": ANSWER}, {"content": "."}):
        turns = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, **said},
            {"role": "user", "content": "Go on"},
        ]
        lengths.append(
            post(server, "/v1/chat/completions", messages=turns, max_tokens=1).json()["usage"]["prompt_tokens"]
        )
    assert lengths[0] == lengths[1] > lengths[2]


def test_a_streamed_answer_is_heard_while_it_is_written_and_survives_its_speaker(server: Server, speaker: Path) -> None:
    # Words of the model's own, token by token: one text alone would come at once.
    form = {"regex": "([a-z]{5} [a-z]{5} [a-z]{5} [a-z]{5}[.] ){50}"}
    asked = spoken("", stream=True, stream_options={"include_usage": True}, audio={"format": "pcm16"})
    asked |= {"structured_outputs": form}
    heard, said = bytearray(), ""
    text_when_first_heard = None
    chunks = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            chunks.append(chunk)
            audio = (chunk["choices"][0]["delta"].get("audio") or {}) if chunk["choices"] else {}
            said += audio.get("transcript", "")
            if audio.get("data"):
                if text_when_first_heard is None:
                    text_when_first_heard = said
                    for worker in [child for child in server.children() if is_worker(child)]:
                        if "also2" in " ".join(worker.cmdline()):
                            worker.kill()
                heard += base64.b64decode(audio["data"])
    assert text_when_first_heard is not None
    assert len(text_when_first_heard) < len(said) == 50 * 25
    rate = SpeechFiles.read(speaker).sample_rate
    assert bytes(heard) == Encoder("pcm", rate, 24_000).whole(expected(speaker, said, 7))
    *_, named, last, usage = chunks
    assert named["choices"][0]["delta"]["audio"]["id"].startswith("audio_")
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens_details"]["audio_tokens"] == 0


def test_a_client_that_leaves_ends_the_text_and_its_sound(server: Server) -> None:
    names = ('tokenyard_requests_total{outcome="cancelled"', "tokenyard_scheduler_cancelled_total")
    before = server.totals(*names)
    asked = spoken("", stream=True, audio={"format": "pcm16"})
    # Longer than anybody waits.
    asked |= {"structured_outputs": {"regex": "([a-z]{5} [a-z]{5} [a-z]{5} [a-z]{5}[.] ){80}"}}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=120) as response:
        assert any('"data"' in line for line in response.iter_lines())

    def has_ended() -> bool:
        *counts, running = server.totals(*names, "tokenyard_requests_running")
        return all(count > old for count, old in zip(counts, before, strict=True)) and not running

    server.wait_for("the end of the text and of its sound", 60, has_ended)


def test_wishes_for_spoken_answers_that_do_not_fit_are_refused_by_field(server: Server) -> None:
    for fields, field, words in (
        ({"audio": {"voice": "nobody"}}, "audio.voice", "this model has default"),
        ({"audio": {"model": "embed"}}, None, "needs a model that speaks texts"),
        ({"audio": {"ref_audio": "UklGRg=="}}, "audio.ref_audio", "this model has voices of its own only"),
        ({"audio": {"model": "imitator", "ref_audio": "UklGRg=="}}, "audio.ref_text", "must be the words"),
        (
            {"audio": {"model": "imitator", "ref_audio": "UklGRg==", "ref_text": REF_TEXT}},
            "audio.ref_audio",
            "is no sound file",
        ),
        (
            {"audio": {"model": "imitator", "ref_audio": clip_of(0.05)[0], "ref_text": "dark " * 200}},
            "audio.ref_text",
            "audio.ref_text and the clip take ",
        ),
        # The conversation is looked at first.
        (
            {"audio": {"model": "imitator", "ref_audio": "UklGRg==", "ref_text": REF_TEXT}, "max_tokens": 0},
            "max_tokens",
            "must be at least 1",
        ),
        (
            {
                "audio": {"model": "imitator", "ref_audio": "UklGRg==", "ref_text": REF_TEXT},
                "messages": [{"role": "user", "content": "too long " * 3000}],
            },
            "prompt",
            "this model's context holds",
        ),
        ({"audio": {"format": "ogg"}}, "audio.format", "Input should be 'wav'"),
        ({"stream": True}, "audio.format", "must be pcm16 with stream"),
        ({"n": 2}, "n", "must be 1"),
        ({"logprobs": True}, "logprobs", "of a spoken answer"),
        ({"modalities": ["text"], "audio": {"voice": "default"}}, "audio", "needs modalities"),
        ({"modalities": ["video"]}, "modalities[0]", "Input should be 'text' or 'audio'"),
    ):
        refused = post(server, "/v1/chat/completions", **spoken(ANSWER, **fields))
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], words in error["message"]) == (field, True), error


def test_an_answer_is_spoken_in_the_voice_of_a_clip(server: Server, imitator: Path) -> None:
    uri, samples = clip_of(0.05)
    answer = " ".join(SENTENCES[:2])
    audio = {"model": "imitator", "format": "wav", "ref_audio": uri, "ref_text": REF_TEXT}
    found = post(server, "/v1/chat/completions", **spoken(answer, audio=audio)).json()
    data = base64.b64decode(found["choices"][0]["message"]["audio"]["data"])
    with wave.open(io.BytesIO(data)) as file:
        heard = np.frombuffer(file.readframes(len(data)), np.int16)
    judge = SpeakerJudge(imitator)
    check_sound(heard, np.concatenate([judge.imitated(one, samples, REF_TEXT) for one in sentences(answer)]))
    assert found["usage"]["completion_tokens_details"]["audio_tokens"] > 0


def test_an_answer_without_words_is_silent(server: Server) -> None:
    found = post(server, "/v1/chat/completions", **spoken("1, 2!", audio={"format": "pcm16"})).json()
    assert found["choices"][0]["message"]["audio"] | {"id": "", "expires_at": 0} == {
        "id": "",
        "data": "",
        "transcript": "1, 2!",
        "expires_at": 0,
    }


def is_worker(process: psutil.Process) -> bool:
    return "-m model_worker --" in " ".join(process.cmdline())
