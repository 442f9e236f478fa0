"""Waits until the server answers `/ready`, then shows the operator its address and a first request."""

from __future__ import annotations

import json
import shlex
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.pooling_files import task_of
from shared.recogniser_files import is_speech
from shared.settings import Settings
from shared.tokenizer_files import read_json

_SECONDS_BETWEEN_TRIES = 0.05
_SECONDS_PER_TRY = 2.0

_TEXT = {"input": "Hello!"}
# A path and the fields of a body by the server's task.
_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
    "embed": ("/v1/embeddings", _TEXT),
    "embed_tokens": ("/pooling", _TEXT),
    "sparse": ("/embed_sparse", {"inputs": "Hello!"}),
    "rerank": ("/v1/rerank", {"query": "Who is there?", "documents": ["Hello!", "A train."]}),
    "classify": ("/classify", _TEXT),
    "classify_tokens": ("/pooling", _TEXT),
    "speak": ("/v1/audio/speech", {"input": "Hello!", "response_format": "wav"}),
    "paint": ("/v1/images/generations", {"prompt": "A red train in the rain"}),
}


def url_of(settings: Settings) -> str:
    """Return the address for a client on this machine; a server that listens everywhere is also at its loopback
    address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{settings.scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"


def example(settings: Settings) -> str:
    """Return a curl line that works as pasted."""
    key = ' -H "Authorization: Bearer $TOKENYARD_API_KEY"' if settings.api_key else ""
    if Path(settings.model).is_dir() and is_speech(read_json(settings.model, "config.json")):
        return f"curl {url_of(settings)}/v1/audio/transcriptions{key} -F file=@speech.wav"
    path, fields = _EXAMPLES.get(_task(settings), _EXAMPLES["generate"])
    data = shlex.quote(json.dumps({"model": settings.public_model_name, **fields}, ensure_ascii=False))
    return f"curl {url_of(settings)}{path} -H 'Content-Type: application/json'{key} -d {data}"


def _task(settings: Settings) -> str:
    """Return the server's task; of a name on the hub without a setting, the usual one."""
    is_known = settings.task != "auto" or Path(settings.model).is_dir()
    return task_of(settings.model, settings.task) if settings.model and is_known else "generate"


class Announcer:
    """Asks `/ready` in a thread of its own, so that the supervisor never waits for HTTP."""

    def __init__(self, settings: Settings, scheduler_problem: Callable[[], str | None], patience: float = 60.0) -> None:
        """Take the address and patience of the wait.

        `scheduler_problem` gives the reason why the scheduler is not ready, or None. It is asked where HTTP wants a
        client's certificate, which this process does not have.
        """
        self._settings = settings
        self._problem = scheduler_problem if settings.ssl_ca_certs else self._http_problem
        self._patience = patience
        self._started_at = time.monotonic()
        self._stop = threading.Event()

    def start(self, say: Callable[[str, str], None]) -> None:
        """Start the thread. `say` takes a level and a text, as the supervisor's observer does."""
        threading.Thread(target=self._announce, args=(say,), name="announcer", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _announce(self, say: Callable[[str, str], None]) -> None:
        answer = self._wait()
        if self._stop.is_set():
            return
        url = url_of(self._settings)
        if answer is not None:
            say("WARNING", f"{url}/ready does not answer 200 after {self._patience:g} s: {answer}")
            return
        say("INFO", f"ready after {time.monotonic() - self._started_at:.1f} s: {url} (API page: {url}/docs)")
        say("INFO", f"try: {example(self._settings)}")
        if _task(self._settings) == "generate":
            say("INFO", f"or:  tokenyard chat --url {url}")

    def _wait(self) -> str | None:
        """Wait for the server. None as soon as it is ready; its last answer when it never was."""
        deadline = time.monotonic() + self._patience
        answer: str | None = "no answer yet"
        while time.monotonic() < deadline and not self._stop.wait(_SECONDS_BETWEEN_TRIES):
            answer = self._problem()
            if answer is None:
                break
        return answer

    def _http_problem(self) -> str | None:
        """Ask `/ready`: None for 200, else its answer."""
        try:
            with self._open(f"{url_of(self._settings)}/ready", timeout=_SECONDS_PER_TRY):
                return None
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read(500).decode(errors='replace')}"
        except OSError as error:
            return str(error)

    def _open(self, url: str, timeout: float) -> Any:
        """Open a URL without the proxies of the environment: they cannot reach this machine's loopback address."""
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self._settings.ssl_certfile:
            # The certificate names the public host, not the loopback address, and this is our own server.
            handlers.append(urllib.request.HTTPSHandler(context=ssl._create_unverified_context()))
        return urllib.request.build_opener(*handlers).open(url, timeout=timeout)
