"""State that every endpoint of one API process shares.

Knows the settings, the tokenizer, the connection to the scheduler and the model's public facts; holds no state of a
request.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from api_server import access_log
from api_server.accounts.accounts import Accounts
from api_server.accounts.ledger import Ledger
from api_server.answers.formats import AnswerFormats
from api_server.answers.observer import Observer
from api_server.batches.store import Store
from api_server.body.bodies import Bodies
from api_server.constraints.compiler import ConstraintCompiler
from api_server.engine.client import EngineClient
from api_server.engine.health import Health
from api_server.engine.retry_after import RetryAfterEstimator
from api_server.errors import ErrorKind, RequestFailed
from api_server.media_readers import MediaReaders
from api_server.text.late_interaction import TokenMarks, keep_whole, token_marks
from api_server.text.pooled_model import IN_WORDS, ROUTES_OF_TASK, PooledModel
from api_server.text.sealed_text import Seal
from api_server.text.speaking_model import SpeakingModel
from api_server.text.text_batches import BatchTokenizer
from api_server.text.tokenizer import Tokenizer
from interfaces import NO_IMAGES, AdapterState, AdapterStatus
from shared import process_table
from shared.access_keys import AccessKeys
from shared.adapter_paths import ANY_MODEL
from shared.addresses import only_loopback
from shared.fetch_hosts import FetchHosts
from shared.pixel_adapters import digests
from shared.process_table import ProcessState
from shared.recogniser_files import RecogniserFiles
from shared.setting_forms import running_rows
from shared.settings import Settings

if TYPE_CHECKING:
    from api_server.chat.url_fetch import UrlFetcher


@dataclass
class ServerState:
    """State of one process, made by `api_server/__main__.py`."""

    settings: Settings
    tokenizer: Tokenizer
    engine: EngineClient
    # What the model makes of texts; None for a model that generates.
    pooled_model: PooledModel | None = None
    # The files of a model that transcribes speech; None for another.
    recogniser: RecogniserFiles | None = None
    # How texts become prompts of a model that generates speech tokens; None for another.
    speaking: SpeakingModel | None = None
    # Observers of every generation (metrics).
    observers: list[Observer] = field(default_factory=list)
    formats: AnswerFormats = field(init=False)
    media: MediaReaders = field(init=False)
    # Unix time shown as the model's creation time.
    created: int = field(default_factory=lambda: int(time.time()))
    # The supervisor's file of silent processes; None without a supervisor.
    processes_file: Path | None = None
    # The folder for adapters that come over HTTP; None without a supervisor.
    uploaded_adapters: Path | None = None
    # The folder for tensors that come over HTTP; None without a supervisor.
    uploaded_weights: Path | None = None
    # The folder for images that clients fetch by URL; None without a supervisor.
    painted_images: Path | None = None
    # Makes the hashes of images; the same in all API processes of a server, and no client knows it.
    image_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    bodies: Bodies = field(default_factory=Bodies)
    # Counts refusals and estimates Retry-After.
    retry_after: RetryAfterEstimator = field(default_factory=RetryAfterEstimator)
    keys: AccessKeys = field(init=False)
    # The file of the keys' accounts, which all API processes share; None: this process has its own.
    accounts_file: Path | None = None
    accounts: Accounts = field(init=False)
    # The folder in which API processes keep their live figures; None: this process shows its own.
    live_folder: Path | None = None
    # None where the operator has opened no host.
    url_fetcher: UrlFetcher | None = field(init=False)
    # The states of further models (setting `also`).
    others: list[ServerState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keys = AccessKeys.of(self.settings)
        self.accounts = Accounts(Ledger(self.accounts_file), self.keys)
        self.formats = AnswerFormats.of(self.settings, self.tokenizer)
        files = self.recogniser, self.speaking, self.image_key
        # A further model gets the observers of the first one.
        self.media = MediaReaders(self.settings, self.engine, *files, lambda: self.observers)
        self.url_fetcher = _url_fetcher(FetchHosts.parse(self.settings.fetch_hosts))
        self.tokenizer.images = lambda: self.media.images if self.sees or self.listens else None

    @cached_property
    def store(self) -> Store | None:
        """The folder of files and batches; None where the operator has named none."""
        return Store.of(self.settings)

    @property
    def models(self) -> list[ServerState]:
        """The states of all models of this server, this one first."""
        return [self, *self.others]

    def serve_also(self, other: ServerState) -> None:
        """Adds the state of a further model. Observers, keys, and the books of bodies and refusals are the server's."""
        other.observers = self.observers
        other.keys = self.keys
        other.accounts.close()
        other.accounts = self.accounts
        other.bodies = self.bodies
        other.retry_after = self.retry_after
        self.others.append(other)

    def of_model(self, name: object, pools: bool | None) -> ServerState:
        """The state of the model that a request names; without a name, of the first one that can do its task.

        Raises RequestFailed(MODEL_NOT_FOUND).
        """
        if name in (None, *ANY_MODEL):
            able = (state for state in self.models if pools in (None, state.pooled_model is not None))
            return next(able, self)
        for state in self.models:
            if name in (state.model_name, state.settings.model) or state.adapter_of(name) is not None:
                return state
        if isinstance(name, str):
            self.check_model(name)
        return self

    @property
    def adapters(self) -> dict[str, AdapterStatus]:
        """The adapters of this model that take requests, by name."""
        status = self.engine.status
        everyone = [] if status is None else status.adapters
        return {adapter.name: adapter for adapter in everyone if adapter.state == AdapterState.READY}

    def adapter_of(self, model: object) -> str | None:
        """The adapter that a request's `model` names, as NAME or as MODEL:NAME; None if it names none."""
        if not isinstance(model, str) or model in (*ANY_MODEL, self.model_name, self.settings.model):
            return None
        names = [model, *(model.removeprefix(f"{own}:") for own in (self.model_name, self.settings.model))]
        return next((name for name in names if name in self.adapters), None)

    @property
    def health(self) -> Health:
        """The health of the model that is least well; its reason names a further model."""
        healths = [(state, state.engine.health()) for state in self.models]
        state, health = min(healths, key=lambda found: (found[1].alive, found[1].ready))
        return health if state is self else replace(health, reason=f"{state.model_name}: {health.reason}")

    @cached_property
    def constraints(self) -> ConstraintCompiler:
        return ConstraintCompiler(self.tokenizer.grammar_vocabulary)

    @cached_property
    def pixel_adapters(self) -> dict[str, str]:
        """Digests of the adapters of a model that paints, by name. Reads all of their files."""
        return digests(self.settings.adapter_paths)

    @property
    def sees(self) -> bool:
        """True when the workers take images. Those of a recogniser, and of a model that hears, are sounds."""
        return self.recogniser is None and not self.has_ears and self.engine.model.images != NO_IMAGES

    @property
    def listens(self) -> bool:
        """True when the workers take the sounds of conversations."""
        return self.has_ears and self.engine.model.images != NO_IMAGES

    @property
    def has_ears(self) -> bool:
        """True when the model hears, whatever its workers take."""
        return self.media.has_ears

    @cached_property
    def batch_tokenizer(self) -> BatchTokenizer:
        backend = self.tokenizer.backend
        if self.pooled_model is not None:
            keep_whole(backend, self.pooled_model.files.prompt_tokens)
        return BatchTokenizer(backend, self.tokenizer.has_token_types)

    @cached_property
    def token_marks(self) -> TokenMarks | None:
        """How tokens are marked for late interaction; None for other models."""
        return None if self.pooled_model is None else token_marks(self.pooled_model.files, self.tokenizer.backend)

    @property
    def task(self) -> str:
        """The task of this server, as in the setting `task`, or "transcribe". One that generates speech tokens has
        "speak"."""
        if self.recogniser is not None:
            return "transcribe"
        if self.speaking is not None:
            return "speak"
        return "generate" if self.pooled_model is None else self.pooled_model.task

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
    def longest_text(self) -> int | None:
        """Longest text in tokens of a model that pools; None if that is not known yet."""
        known = (None if self.pooled_model is None else self.pooled_model.files.max_tokens, self.max_model_len)
        return min((limit for limit in known if limit is not None), default=None)

    @property
    def most_requests(self) -> int:
        """The most requests that may run and wait: what workers have rows for, and those that may wait. A batch of
        texts takes as many requests as fit, so a model that pools has those that wait alone."""
        settings, status = self.settings, self.engine.status
        rows = 0 if status is None else status.max_running
        if not rows and self.pooled_model is None:
            # No worker has said yet what it has memory for.
            rows = running_rows(settings.max_running, settings.devices)
        return rows + settings.max_queued

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

    def check_model(self, name: str) -> str | None:
        """The adapter that a request's `model` names; None if it means the served model itself.

        Raises RequestFailed(MODEL_NOT_FOUND) for another name, also of an adapter that was unloaded meanwhile.
        """
        if name in (*ANY_MODEL, self.model_name, self.settings.model):
            return None
        adapter = self.adapter_of(name)
        if adapter is not None:
            return adapter
        names = ", ".join(repr(name) for state in self.models for name in (state.model_name, *state.adapters))
        raise RequestFailed(
            ErrorKind.MODEL_NOT_FOUND,
            f"the model {name[:100]!r} does not exist; this server has {names}",
            field="model",
        )

    def check_family(self, pools: bool) -> None:
        """Raises RequestFailed(WRONG_TASK) where text is to be generated and the model pools, or the other way
        round."""
        if self.recogniser is None and pools == (self.pooled_model is not None):
            return
        does = f"{self.model_name!r} {IN_WORDS[self.task]} (task {self.task})"
        if pools:
            remedy = "start a server with --task embed, rerank or classify for this route, or ask /v1/chat/completions"
            message = f"{does}, and this route needs a model that makes vectors or scores of texts: {remedy}"
        else:
            remedy = f"start a server with --task generate for this route, or ask {ROUTES_OF_TASK[self.task]}"
            message = f"{does}, and this route needs a model that generates text: {remedy}"
        raise RequestFailed(ErrorKind.WRONG_TASK, message)

    @property
    def speaks(self) -> bool:
        """True when the model makes sound of texts."""
        return self.speaking is not None or (self.pooled_model is not None and self.pooled_model.speech is not None)

    def that_speaks(self, name: object) -> ServerState:
        """The state of the model that a request for speech names; without a name, of the first that speaks.

        Raises RequestFailed(MODEL_NOT_FOUND).
        """
        if name in (None, *ANY_MODEL):
            return next((state for state in self.models if state.speaks), self)
        return self.of_model(name, None)

    def that_hears(self, name: str | None) -> ServerState:
        """The state of the model that a request for a transcript names; without a name, of the first that hears.

        Raises RequestFailed(MODEL_NOT_FOUND), and RequestFailed(WRONG_TASK) for a model that does not hear.
        """
        if name in (None, *ANY_MODEL):
            able = (state for state in self.models if state.recogniser is not None or state.has_ears)
            return next(able, self)._hearing()
        named = next((state for state in self.models if name in (state.model_name, state.settings.model)), None)
        if named is None:
            self.check_model(str(name))
        return (named or self)._hearing()

    def _hearing(self) -> ServerState:
        if self.recogniser is not None or self.has_ears:
            return self
        does = f"{self.model_name!r} {IN_WORDS[self.task]} (task {self.task})"
        remedy = f"serve one, such as Whisper, for this route, or ask {ROUTES_OF_TASK[self.task]}"
        message = f"{does}, and this route needs a model that transcribes speech: {remedy}"
        raise RequestFailed(ErrorKind.WRONG_TASK, message)


def _url_fetcher(hosts: FetchHosts) -> UrlFetcher | None:
    """Makes the fetcher if hosts are open. Its HTTP client takes a seventh of a second to load."""
    if not hosts:
        return None
    from api_server.chat.url_fetch import UrlFetcher

    return UrlFetcher(hosts)
