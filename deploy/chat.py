"""`tokenyard chat`: a conversation in the terminal with a running server, over its OpenAI dialect. A model that paints
gets descriptions, and its images are shown where the terminal can.

Knows HTTP and server-sent events by the standard library alone; any server that speaks the dialect will do.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import re
import ssl
import sys
import urllib.parse
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.terminal_images import Protocol, protocol, shown
from shared.settings import SettingsError

_SECONDS_TO_CONNECT = 10.0
_SECONDS_BETWEEN_TOKENS = 600.0
_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"

_HELP_OF_PAINTERS = "describe an image, /exit or Ctrl-D leaves, Ctrl-C stops an image"
# Characters of a description that are no part of an image's file name.
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")
_LONGEST_NAME = 40

Message = dict[str, str]


class ServerError(Exception):
    """The server could not be reached or refused; the text names the remedy."""


def chat(url: str, model: str, system: str, key: str = "", authorities: str = "") -> int:
    """Talk until the user leaves. Returns the exit status of the process. `authorities` is a PEM file to trust."""
    server = Server(url, key, trusting(authorities))
    try:
        name, paints = server.model(model)
    except ServerError as error:
        print(f"tokenyard: {error}", file=sys.stderr)
        return 1
    _load_line_editing()
    print(f"{name} at {url}; {_HELP_OF_PAINTERS if paints else _HELP}")
    if paints:
        _paint(server, name)
    else:
        _converse(server, Conversation(name, system))
    return 0


def trusting(authorities: str) -> ssl.SSLContext:
    """The TLS options of a client. `authorities` is a PEM file to trust, or empty. Raises SettingsError."""
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"cacert {authorities!r} cannot be used: {error}; give a PEM file") from None


@dataclass
class Conversation:
    """The history of a conversation, which goes to the model as a whole with each question."""

    model: str
    system: str
    turns: list[Message] = field(default_factory=list)

    @property
    def request(self) -> dict[str, Any]:
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": self.model, "messages": [*opening, *self.turns], "stream": True}


def _converse(server: Server, conversation: Conversation) -> None:
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n({_HELP})")
            continue
        match text:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.turns.clear()
                print("(a new conversation)")
            case _ if text.startswith("/"):
                print(f"(no such command; {_HELP})")
            case _:
                _take_turn(server, conversation, text)


def _paint(server: Server, name: str) -> None:
    """Paint what the user describes, save each image in this folder, and show it where the terminal can."""
    how = protocol(os.environ) if sys.stdout.isatty() else None
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n({_HELP_OF_PAINTERS})")
            continue
        if text in ("/exit", "/quit"):
            return
        if text.startswith("/"):
            print(f"(no such command; {_HELP_OF_PAINTERS})")
        elif text:
            _paint_one(server, name, text, how)


def _paint_one(server: Server, name: str, text: str, how: Protocol | None) -> None:
    try:
        png, seed = server.image(name, text)
        path = _saved(png, text)
    except KeyboardInterrupt:
        print(" (stopped)")
        return
    except (ServerError, OSError) as error:
        print(f"({error})")
        return
    if how is not None:
        # Without it, with a file that cannot be read, or when it takes too long, the path is enough.
        with contextlib.suppress(ImportError, OSError, KeyboardInterrupt):
            print(shown(png, how))
    print(f"{path} (seed {seed})")


def _saved(png: bytes, text: str) -> Path:
    """Write an image to a new file of this folder, named after its description. Returns its path."""
    stem = _NOT_IN_NAMES.sub("-", text.lower())[:_LONGEST_NAME].strip("-") or "image"
    for number in itertools.count(1):
        path = Path(f"{stem}.png" if number == 1 else f"{stem}-{number}.png")
        try:
            with path.open("xb") as file:
                file.write(png)
            return path
        except FileExistsError:
            continue
    raise AssertionError("the numbers have no end")


def _take_turn(server: Server, conversation: Conversation, text: str) -> None:
    """Ask one question and show its answer. A refused question leaves no trace; of a stopped answer the shown part
    stays."""
    conversation.turns.append({"role": "user", "content": text})
    answer: list[str] = []
    try:
        with contextlib.closing(server.stream(conversation.request)) as pieces:
            for piece in pieces:
                answer.append(piece)
                print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" (stopped)")
    except ServerError as error:
        print(f"\n({error})")
        if not answer:
            conversation.turns.pop()
            return
    conversation.turns.append({"role": "assistant", "content": "".join(answer)})


class Server:
    """The requests that a chat needs."""

    def __init__(self, url: str, key: str = "", context: ssl.SSLContext | None = None) -> None:
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        self._url = url
        self._secure = parts.scheme == "https"
        self._context = context
        self._address = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._kept: http.client.HTTPConnection | None = None

    def first_model(self) -> str:
        return self.model("")[0]

    def model(self, named: str) -> tuple[str, bool]:
        """Return the name of the first model, or the one that is `named`, and whether it paints. Raises ServerError."""
        try:
            with self._request("GET", "/v1/models") as response:
                models = [(str(each["id"]), each.get("task") == "paint") for each in json.load(response)["data"]]
            return next(each for each in models if named in ("", each[0]))
        except (ValueError, LookupError, TypeError, AttributeError, StopIteration, ServerError) as error:
            if named:
                return named, False  # its request will say what is wrong
            if isinstance(error, ServerError):
                raise
            raise ServerError(f"{self._url} names no model at /v1/models; give one with --model") from None

    def image(self, model: str, prompt: str) -> tuple[bytes, int]:
        """Return the PNG file of an image, and its seed. Raises ServerError."""
        with self._request("POST", "/v1/images/generations", {"model": model, "prompt": prompt}) as response:
            try:
                found = json.load(response)["data"][0]
                return base64.b64decode(found["b64_json"]), int(found["seed"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(f"{self._url} answered without an image") from None

    def read(self, path: str) -> Any:
        """Get JSON over one connection, which stays open between calls. Raises ServerError."""
        with self._request("GET", path, kept=True) as response:
            try:
                return json.load(response)
            except ValueError:
                raise ServerError(f"{self._url}{path} answered no JSON: is it a tokenyard server?") from None

    def stream(self, body: dict[str, Any]) -> Generator[str]:
        """Yield pieces of the answer's text as they arrive. Closing the generator hangs up, which cancels the
        request."""
        with self._request("POST", "/v1/chat/completions", body) as response:
            for chunk in _events(response):
                if "error" in chunk:
                    raise ServerError(_reason(chunk))
                for choice in chunk.get("choices", []):
                    piece = choice.get("delta", {}).get("content")
                    if piece:
                        yield piece

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, kept: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._kept if kept else None
        self._kept = None
        try:
            if connection is None:
                connection = self._connection()
                connection.connect()
                connection.sock.settimeout(_SECONDS_BETWEEN_TOKENS)
            data = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise ServerError(f"{response.status} {response.reason}: {_reason(_parsed(response.read(65536)))}")
            yield response
            if kept:
                self._kept = connection
                connection = None
        except ssl.SSLCertVerificationError as error:
            remedy = "name the PEM file of its authority with --cacert"
            raise ServerError(
                f"the certificate of {self._url} is not trusted ({error.verify_message}); {remedy}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            remedy = "start a server with `tokenyard serve`, or name one with --url"
            raise ServerError(f"no server answers at {self._url} ({error or type(error).__name__}); {remedy}") from None
        finally:
            if connection is not None:
                connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            return http.client.HTTPSConnection(self._address, timeout=_SECONDS_TO_CONNECT, context=self._context)
        return http.client.HTTPConnection(self._address, timeout=_SECONDS_TO_CONNECT)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of a server-sent event stream, up to its `[DONE]`; comments and other fields are left out."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            return
        yield _parsed(data)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": data.decode(errors="replace")}


def _reason(answer: dict[str, Any]) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _load_line_editing() -> None:
    """Enable arrow keys and history in `input`, where Python was built with them: the import alone switches them on."""
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")
