"""Keys and certificates of a server: checked at start, and read again while the server runs.

They may change their values at a SIGHUP, so that an old key closes and a new one opens without a restart. Whether there
are any does not change: a file that is being written, or a line that is missing, must not open a door.
"""

from __future__ import annotations

import dataclasses
import os
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.access_keys import with_digests
from shared.endpoints import RunDirectory
from shared.settings import Settings, SettingsError

_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_ROTATED = ("api_key", "admin_api_key", *_TLS)


class Credentials:
    """The keys and certificates of a running server. `given` are the current settings of the operator's flags and
    files."""

    def __init__(
        self,
        settings: Settings,
        directory: RunDirectory,
        given: Callable[[], Settings],
        say: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._given = given
        self._say = say

    def read_again(self) -> None:
        """Write new values to the run directory, where processes find them; values that cannot be used change
        nothing."""
        try:
            given = self._given()
            fresh = self._checked(given)
            write(fresh, self._directory)
        except (SettingsError, OSError) as error:
            self._say("WARNING", f"keys and certificates stay as they are: {error}")
            return
        changed = [name for name in _ROTATED if getattr(fresh, name) != getattr(self._settings, name)]
        self._settings = fresh
        self._say("INFO", f"keys and certificates were read again; changed: {', '.join(changed) or 'no key'}")
        for text in exposed(given):
            self._say("WARNING", text)

    def _checked(self, given: Settings) -> Settings:
        found = with_digests(resolve_tls(given))
        for name in _ROTATED:
            if bool(getattr(found, name)) != bool(getattr(self._settings, name)):
                raise SettingsError(
                    f"{name} was {'added' if getattr(found, name) else 'taken away'}, which takes a restart"
                )
        return dataclasses.replace(self._settings, **{name: getattr(found, name) for name in _ROTATED})


def write(settings: Settings, directory: RunDirectory) -> None:
    """Write the settings file that every process of the server reads: atomically, and for this user only."""
    draft = directory.settings_file.with_suffix(".new")
    draft.touch(0o600)
    draft.write_text(settings.to_json())
    draft.replace(directory.settings_file)


def resolve_tls(settings: Settings) -> Settings:
    """Make the paths of certificates absolute. SettingsError when they do not fit together."""
    given: dict[str, str] = {name: getattr(settings, name) for name in _TLS}
    paths = {name: os.path.abspath(Path(path).expanduser()) if path else "" for name, path in given.items()}
    if not paths["ssl_certfile"]:
        for name in _TLS:
            if paths[name]:
                raise SettingsError(f"{name} {paths[name]!r} has no effect without ssl_certfile; set that as well")
        return settings
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    name = "ssl_certfile"
    try:
        # A password prompt would wait for ever: an encrypted key is refused instead.
        context.load_cert_chain(paths["ssl_certfile"], paths["ssl_keyfile"] or None, password=lambda: "")
        name = "ssl_ca_certs"
        if paths[name]:
            context.load_verify_locations(paths[name])
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"{name} {paths[name]!r} cannot be used: {error}; give unencrypted PEM files") from None
    certificate, key, authorities = (paths[name] for name in _TLS)
    return dataclasses.replace(settings, ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=authorities)


def exposed(settings: Settings) -> Iterator[str]:
    """Yield a sentence for each file with a secret that every user of this machine can read."""
    private = settings.ssl_keyfile or settings.ssl_certfile
    for name, path in (("api_key_file", settings.api_key_file), ("ssl_keyfile", private)):
        try:
            mode = os.stat(Path(path).expanduser()).st_mode if path else 0
        except OSError:
            continue
        if mode & stat.S_IROTH:
            yield f"{name} {path} can be read by every user of this machine: chmod o-r {path}"
