"""Replaces the keys and certificates of a running process by those that the supervisor found at a SIGHUP.

Open requests and connections stay; new ones get the new keys and the new certificate.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import uvicorn
from uvicorn.config import create_ssl_context

from api_server.state import ServerState
from shared.access_keys import AccessKeys
from shared.settings import Settings, SettingsError

log = logging.getLogger("tokenyard")


class Rotation:
    """Reads keys and certificates again. `config` is loaded, so that its TLS context exists, if it has one."""

    def __init__(self, settings_file: Path, server: ServerState, config: uvicorn.Config) -> None:
        self._file = settings_file
        self._server = server
        self._config = config
        self._context = config.ssl
        if config.ssl is not None:
            # A listener keeps its first TLS context, which asks at each handshake for the current one.
            config.ssl.sni_callback = self._hand_over

    def read_again(self) -> None:
        """Handles the signal. Unreadable files change nothing; the supervisor has just checked them."""
        try:
            settings = Settings.read(self._file)
            keys = AccessKeys.of(settings)
            context = self._fresh_context(settings)
        except (OSError, ValueError, SettingsError) as error:
            log.warning("keys and certificates stay as they are: %s", error)
            return
        for state in self._server.models:
            state.keys = keys
        self._server.accounts.rotate(keys)
        self._context = context
        log.info("keys and certificates were read again")

    def _fresh_context(self, settings: Settings) -> ssl.SSLContext | None:
        if self._config.ssl is None:
            return None
        return create_ssl_context(
            certfile=settings.ssl_certfile,
            keyfile=settings.ssl_keyfile or None,
            password=None,
            ssl_version=self._config.ssl_version,
            cert_reqs=self._config.ssl_cert_reqs,
            ca_certs=settings.ssl_ca_certs or None,
            ciphers=self._config.ssl_ciphers,
        )

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if self._context is not None:
            connection.context = self._context
