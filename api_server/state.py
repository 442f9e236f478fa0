"""State that every endpoint of one API process shares.

Knows the settings, the tokenizer, the connection to the scheduler and the model's public facts; holds no state of a
request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from api_server import access_log
from api_server.answers.formats import AnswerFormats
from api_server.answers.observer import Observer
from api_server.body.bodies import Bodies
from api_server.constraints.compiler import ConstraintCompiler
from api_server.engine.client import EngineClient
from api_server.engine.retry_after import RetryAfterEstimator
from api_server.errors import ErrorKind, RequestFailed
from api_server.text.sealed_text import Seal
from api_server.text.tokenizer import Tokenizer
from shared import process_table
from shared.access_keys import AccessKeys
from shared.addresses import only_loopback
from shared.fetch_hosts import FetchHosts
from shared.process_table import ProcessState
from shared.settings import Settings

if TYPE_CHECKING:
    from api_server.chat.url_fetch import UrlFetcher

# Names that clients send when they accept any model (huggingface_hub sends tgi or dummy).
_ANY_MODEL = ("", "default", "tgi", "dummy")


@dataclass
class ServerState:
    """State of one process, made by `api_server/__main__.py`."""

    settings: Settings
    tokenizer: Tokenizer
    engine: EngineClient
    # Observers of every generation (metrics).
    observers: list[Observer] = field(default_factory=list)
    formats: AnswerFormats = field(init=False)
    # Unix time shown as the model's creation time.
    created: int = field(default_factory=lambda: int(time.time()))
    # The supervisor's file of silent processes; None without a supervisor.
    processes_file: Path | None = None
    bodies: Bodies = field(default_factory=Bodies)
    # Counts refusals and estimates Retry-After.
    retry_after: RetryAfterEstimator = field(default_factory=RetryAfterEstimator)
    keys: AccessKeys = field(init=False)
    # None where the operator has opened no host.
    url_fetcher: UrlFetcher | None = field(init=False)

    def __post_init__(self) -> None:
        self.keys = AccessKeys.of(self.settings)
        self.formats = AnswerFormats.of(self.settings, self.tokenizer)
        self.url_fetcher = _url_fetcher(FetchHosts.parse(self.settings.fetch_hosts))

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.tokenizer.grammar_vocabulary)

    @cached_property
    def model_name(self) -> str:
        """Name under which clients see the model."""
        return self.settings.public_model_name

    @cached_property
    def is_local(self) -> bool:
        """True when only callers on this host can connect."""
        return only_loopback(self.settings.host)

    @cached_property
    def seal(self) -> Seal:
        return Seal(self.model_name)

    @cached_property
    def fingerprint(self) -> str:
        """A fingerprint of the settings. It changes when answers to one seed may change."""
        return f"fp_{blake2b(self.settings.to_json().encode(), digest_size=5).hexdigest()}"

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt + answer in tokens; None until the first worker has reported it."""
        return self.engine.max_model_len

    @property
    def processes(self) -> dict[str, ProcessState]:
        """All processes of this server, from the supervisor's file."""
        return {} if self.processes_file is None else process_table.read(self.processes_file)

    def record_failure(self, path: str, error: RequestFailed) -> None:
        """Must be called once for each error response, before rendering it."""
        if error.kind is ErrorKind.OVERLOADED and error.retry_after is None:
            error.retry_after = self.retry_after.record_refusal()
        if (entry := access_log.current.get()) is not None:
            entry.error = error
        for observer in () if error.counted else self.observers:
            observer.failed(path, error)

    def check_model(self, name: str) -> None:
        """Raises RequestFailed(MODEL_NOT_FOUND) unless `name` means the served model."""
        if name in _ANY_MODEL or name in (self.model_name, self.settings.model):
            return
        raise RequestFailed(
            ErrorKind.MODEL_NOT_FOUND,
            f"the model {name[:100]!r} does not exist; this server has {self.model_name!r}",
            field="model",
        )


def _url_fetcher(hosts: FetchHosts) -> UrlFetcher | None:
    """Makes the fetcher if hosts are open. Its HTTP client takes a seventh of a second to load."""
    if not hosts:
        return None
    from api_server.chat.url_fetch import UrlFetcher

    return UrlFetcher(hosts)
