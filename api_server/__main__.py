"""One API process: `python -m api_server --run-dir DIR --index I --listener FD`.

Loads the tokenizer, connects to the scheduler, accepts connections from the socket it was given, and ends in order.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from api_server.access_log import logged
from api_server.answers.formats import AnswerFormats
from api_server.app import create
from api_server.batch_service import run_batches
from api_server.batches.store import Store
from api_server.doors import Doors
from api_server.engine.client import EngineClient
from api_server.http.protocol import HttpProtocol
from api_server.leaving import SECONDS_FOR_LAST_FRAMES, Leaving
from api_server.media.client import ProcessLost
from api_server.rotation import Rotation
from api_server.shared_secret import shared_secret
from api_server.state import ServerState
from api_server.text.late_interaction import keep_whole, token_marks
from api_server.text.pooled_model import PooledModel
from api_server.text.speaking_model import SpeakingModel
from api_server.text.tokenizer import Tokenizer
from api_server.tracing.start import measured, traced
from shared import liveness, logs, phases
from shared.addresses import LOOPBACK_NETWORKS
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.hidden_torch import hide_torch
from shared.load_errors import may_pass
from shared.otel_settings import OtelMetricsSettings, OtelSettings
from shared.recogniser_files import RecogniserFiles
from shared.settings import Settings

log = logging.getLogger("tokenyard")


class _Server(uvicorn.Server):
    """uvicorn with the signals left to `Leaving`: its own handling ends the process before the goodbye."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    parser = argparse.ArgumentParser(prog="api_server", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument("--index", type=int, required=True, help="number of this replica, from 0")
    parser.add_argument(
        "--listener", type=int, action="append", required=True, help="descriptor of a listening socket; repeatable"
    )
    options = parser.parse_args()
    run_directory = RunDirectory(options.run_dir)
    settings = Settings.read(run_directory.settings_file)
    role = f"api_server:{options.index}"
    logs.configure(role, settings.log_level, settings.log_format)
    liveness.become(role, run_directory.stack_file(role))
    listeners = [socket.socket(fileno=number) for number in options.listener]
    doors = Doors(run_directory.doors, listeners)
    phases.phase("import")
    hide_torch()
    try:
        if (store := Store.of(settings)) is not None:
            store.check()
        phases.phase("load tokenizer")
        places = [(settings, run_directory), *of_further_models(settings, run_directory)]
        models = [_Model.load(*place) for place in places]
    except (OSError, ValueError) as error:
        phases.fatal(str(error), may_pass(error))
        log.error("%s", error)
        return 1
    uvloop.run(_serve(models, role, listeners, doors))
    return 0


def tls_options(settings: Settings) -> dict[str, Any]:
    """The TLS options for uvicorn. Empty without a certificate."""
    if not settings.ssl_certfile:
        return {}
    return {
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile or None,
        "ssl_ca_certs": settings.ssl_ca_certs or None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    }


@dataclass(frozen=True)
class _Model:
    """What an API process has of one model before it serves."""

    settings: Settings
    run_directory: RunDirectory
    tokenizer: Tokenizer
    pooled_model: PooledModel | None
    recogniser: RecogniserFiles | None
    speaking: SpeakingModel | None

    @classmethod
    def load(cls, settings: Settings, run_directory: RunDirectory) -> _Model:
        """Loads a model's tokenizer. OSError or ValueError when the model cannot be served."""
        pooled_model = PooledModel.of(settings)
        source = settings.model if pooled_model is None else pooled_model.files.tokenizer_source
        tokenizer = Tokenizer.load(source, settings.control_tokens)
        AnswerFormats.of(settings, tokenizer)
        if pooled_model is not None:
            # A file that names a token which the tokenizer lacks ends the start, and not requests.
            keep_whole(tokenizer.backend, pooled_model.files.prompt_tokens)
            token_marks(pooled_model.files, tokenizer.backend)
        recogniser = RecogniserFiles.read(settings.model, tokenizer.token_of)
        speaking = SpeakingModel.of(settings.model, tokenizer) if pooled_model is None else None
        return cls(settings, run_directory, tokenizer, pooled_model, recogniser, speaking)

    def connect(self, role: str, server_directory: RunDirectory) -> ServerState:
        """Connects to the model's scheduler. `server_directory` is the run directory of the whole server."""
        engine = EngineClient(self.run_directory.api_endpoint, role)
        engine.start()
        return ServerState(
            self.settings,
            self.tokenizer,
            engine,
            self.pooled_model,
            self.recogniser,
            self.speaking,
            processes_file=server_directory.processes_file,
            uploaded_adapters=self.run_directory.uploaded_adapters,
            uploaded_weights=self.run_directory.uploaded_weights,
            image_key=shared_secret(server_directory.image_key_file),
            painted_images=server_directory.painted_images,
            accounts_file=server_directory.accounts_file,
            live_folder=server_directory.live_directory,
        )


async def _serve(models: list[_Model], role: str, listeners: list[socket.socket], doors: Doors) -> None:
    run_directory = models[0].run_directory
    settings = models[0].settings
    server, *others = [model.connect(role, run_directory) for model in models]
    for other in others:
        server.serve_also(other)
    application = create(server)
    engines = [state.engine for state in server.models]
    tracing = traced(application, OtelSettings.of(os.environ), engines, application.metrics.traced)
    otel_metrics = measured(OtelMetricsSettings.of(os.environ))
    server.observers += [otel_metrics] if otel_metrics is not None else []
    config = uvicorn.Config(
        logged(tracing.application, settings),
        http=HttpProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=settings.keep_alive_timeout,
        # Proxy headers are for the log only: rights come from keys and from the connection (access.py).
        forwarded_allow_ips=os.environ.get("FORWARDED_ALLOW_IPS", ",".join(LOOPBACK_NETWORKS)),
        timeout_graceful_shutdown=SECONDS_FOR_LAST_FRAMES,
        **tls_options(settings),
    )
    config.load()
    rotation = Rotation(run_directory.settings_file, server, config)
    web = _Server(config)
    leaving = Leaving(web, application, engines, doors, settings.drain_delay, settings.drain_timeout)
    leaving.obey(asyncio.get_running_loop())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, rotation.read_again)
    # All objects that exist now live as long as the process: garbage collection skips them.
    gc.collect()
    gc.freeze()
    # A model that pools has no answers to constrain.
    generating = [state for state in server.models if state.pooled_model is None]
    warming = asyncio.gather(*(_warm(state) for state in generating))
    beating = asyncio.create_task(_beat())
    running = asyncio.create_task(run_batches(application))
    phases.ready(url=f"{settings.scheme}://{settings.host}:{settings.port}", pid=os.getpid())
    try:
        await web.serve(sockets=listeners)
    finally:
        warming.cancel()
        beating.cancel()
        running.cancel()
        # A server that gives up cancels what is still starting; that is no error to report.
        for ended in await asyncio.gather(warming, beating, running, return_exceptions=True):
            if isinstance(ended, Exception):
                log.warning("a helper process could not be started: %s", ended)
        try:
            for state in server.models:
                await state.constraints.close()
                await state.media.close()
        finally:
            await tracing.close()
            if otel_metrics is not None:
                await otel_metrics.close()
            application.metrics.write()  # also for requests that were cancelled meanwhile
            server.accounts.close()
            for state in server.models:
                state.engine.close()
                state.tokenizer.close()


async def _warm(server: ServerState) -> None:
    """Starts the helper processes, so that no first request waits for them: that of media once a worker takes some."""
    if server.recogniser is not None:
        with contextlib.suppress(ProcessLost):
            await server.media.clips.client.start()
        return
    await server.constraints.start()
    if server.settings.vision:
        await server.media.image_facts.warm()
    while server.max_model_len is None:  # noqa: ASYNC110 (a heartbeat brings it, and no event)
        await asyncio.sleep(1.0)
    if server.sees or server.listens:
        with contextlib.suppress(ProcessLost):
            await server.media.images.client.start()


async def _beat() -> None:
    """Beats while the event loop runs."""
    while True:
        phases.beat()
        await asyncio.sleep(phases.BEAT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
