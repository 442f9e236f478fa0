"""A tokenizer trained on the spot, a scheduler double on the real wire, and the real server over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
import uvloop
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from api_server.__main__ import _Server, tls_options
from api_server.access_log import logged
from api_server.app import create
from api_server.batch_service import run_batches
from api_server.engine.client import EngineClient
from api_server.http.protocol import HttpProtocol
from api_server.state import ServerState
from api_server.text.pooled_model import PooledModel
from api_server.text.tokenizer import Tokenizer
from api_server.tracing.start import traced
from shared.endpoints import RunDirectory
from shared.otel_settings import OtelSettings
from shared.settings import Settings
from tests.api_server.scheduler_double import SchedulerDouble

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today?",
    "Größe, naïve café, Übermut; 日本語のテキスト、漢字かな交じり。 Привет, мир! 😀😃👩‍👩‍👧 مرحبا",
    '{"name": "x", "value": [1, 2, 3]} def f(x):\n    return x + 1\n',
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return backend


def metaspace_backend() -> Backend:
    """Like Llama 2: spaces are ▁, unknown characters are bytes, a leading space is stripped when decoding."""
    alphabet = {f"<0x{byte:02X}>": i + 3 for i, byte in enumerate(range(256))}
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?", "▁the", "▁fox", "ö", "日"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | alphabet | {word: 259 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like a model's, without weights."""
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model") / "tiny-chat"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [0], "top_k": 20, "transformers_version": "5"}')
    return path


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.load(str(model_directory))


@dataclass
class LiveServer:
    """The real application in a thread of its own, with the double behind it."""

    state: ServerState
    double: SchedulerDouble
    url: str


def raw_post(url: str, path: str, body: object, **headers: str) -> socket.socket:
    """Sends a request and returns the connection; nothing is read yet."""
    target = urlsplit(url)
    connection = socket.create_connection((target.hostname, target.port or 0), timeout=90)
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
    return connection


def leave_when(condition: Callable[[], Any], live: LiveServer, path: str, body: object, **headers: str) -> None:
    """Sends a request, and closes its connection when the condition holds, before anything is answered."""
    connection = raw_post(live.url, path, body, **headers)
    live.double.wait(condition)
    connection.close()


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture
def double(run_directory: RunDirectory, tokenizer: Tokenizer) -> Iterator[SchedulerDouble]:
    """Answers "Hello, world!" unless a test says otherwise."""
    eos = tokenizer.eos_token_ids[0]
    ids = encode(tokenizer, "Hello, world!")
    scheduler = SchedulerDouble(run_directory.api_endpoint, lambda _: [*ids, eos], vocab_size=tokenizer.vocab_size)
    yield scheduler
    scheduler.close()


class PromptServer(_Server):
    """uvicorn looks only ten times a second whether it is to end, which would be most of a small test's time."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop = asyncio.get_running_loop()
        self._ordered = asyncio.Event()

    def end(self) -> None:
        """Safe from any thread."""
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._ordered.set)

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ordered.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()


@contextmanager
def serving(
    double: SchedulerDouble,
    run_directory: RunDirectory,
    tokenizer: Tokenizer,
    settings: Settings,
    otel: OtelSettings | None = None,
) -> Iterator[LiveServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    found: dict[str, Any] = {}

    async def serve() -> None:
        engine = EngineClient(run_directory.api_endpoint, "test")
        engine.start()
        found["state"] = ServerState(settings, tokenizer, engine, PooledModel.of(settings))
        application = create(found["state"])
        tracing = traced(application, otel, [engine], application.metrics.traced)
        found["web"] = PromptServer(
            uvicorn.Config(
                logged(tracing.application, settings),
                http=HttpProtocol,
                ws="none",
                loop="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=settings.keep_alive_timeout,
                timeout_graceful_shutdown=1,
                **tls_options(settings),
            )
        )
        serving = asyncio.ensure_future(found["web"].serve(sockets=[listener]))
        batches = asyncio.ensure_future(run_batches(application))
        started.set()
        await serving
        batches.cancel()
        await asyncio.gather(batches, return_exceptions=True)
        await tracing.close()
        await found["state"].media.close()
        await found["state"].constraints.close()
        engine.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    state: ServerState = found["state"]
    double.wait(lambda: state.engine.health().ready)
    yield LiveServer(state, double, f"http://127.0.0.1:{listener.getsockname()[1]}")
    found["web"].end()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def live(
    double: SchedulerDouble,
    run_directory: RunDirectory,
    tokenizer: Tokenizer,
    model_directory: Path,
) -> Iterator[LiveServer]:
    with serving(double, run_directory, tokenizer, Settings(model=str(model_directory))) as server:
        yield server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer._backend.encode(text, add_special_tokens=False).ids
    return ids
