"""API keys: how they are given, kept and compared.

A key is known here by its SHA-256 digest alone. The operator may give keys in plain or as `sha256:HEX`; what the
supervisor hands to its children, and what lies in the run directory, is always the digest. `sha256:HEX*N` gives a key
N times the share of the server that others have; in a file, so does `KEY N`.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from shared.settings import Settings, SettingsError

_PREFIX = "sha256:"
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64})(?:\*([1-9][0-9]{0,3}))?")
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")


@dataclass(frozen=True)
class Caller:
    """The author of a request. `name` separates keys in logs and queues and grants no access. Empty without keys."""

    name: str = ""
    admin: bool = False
    weight: int = 1


@dataclass(frozen=True)
class AccessKeys:
    """The digests of the keys that open this server; without any, access is open."""

    users: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> AccessKeys:
        users = [*_listed(settings.api_key, "api_key"), *_in_file(settings.api_key_file)]
        return cls(tuple(users), tuple(_listed(settings.admin_api_key, "admin_api_key")))

    def caller(self, given: str | None) -> Caller | None:
        """Find the caller with the key `given`; None when it opens nothing. Takes as long for every wrong key."""
        digest = "" if given is None else digest_of(given)
        admin = _found(self.admins, digest)
        user = _found(self.users, digest)
        if admin or user:
            return Caller(f"key-{digest.removeprefix(_PREFIX)[:8]}", admin > 0, max(admin, user))
        return None if self.users else Caller()


def digest_of(key: str) -> str:
    """Return the digest under which a key is kept."""
    return _PREFIX + sha256(key.encode()).hexdigest()


def with_digests(settings: Settings) -> Settings:
    """Replace keys in plain by their digests. SettingsError for a key or a file that cannot be used."""
    keys = AccessKeys.of(settings)
    return dataclasses.replace(
        settings, api_key=",".join(keys.users), api_key_file="", admin_api_key=",".join(keys.admins)
    )


def _found(kept: Sequence[str], digest: str) -> int:
    """Return the weight of the key, 0 when it is not there."""
    # All are compared, each in constant time: how long it takes says nothing about a key.
    return sum([hmac.compare_digest(known.partition("*")[0], digest) * _weight(known) for known in kept])


def _weight(kept: str) -> int:
    return int(kept.partition("*")[2] or 1)


def _listed(text: str, name: str) -> list[str]:
    return [_kept(key, name) for key in text.split(",")] if text else []


def _in_file(path: str) -> list[str]:
    """Read the keys of a file, one a line; empty lines and those that start with # are left out."""
    if not path:
        return []
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"api_key_file {path} cannot be read: {error}") from None
    keys = [_line(line, f"line {n} of api_key_file {path}") for n, line in enumerate(lines, 1) if line[:1] not in "#"]
    if not keys:
        raise SettingsError(f"api_key_file {path} has no key; write one a line, or leave the setting out")
    return keys


def _line(line: str, where: str) -> str:
    key, _, weight = line.partition(" ")
    digest = _kept(key, where)
    if not weight.strip():
        return digest
    if "*" in digest or not re.fullmatch(r"[1-9][0-9]{0,3}", weight.strip()):
        raise SettingsError(f"{where}: after a key may come its weight, 1 to 9999, and nothing else")
    return f"{digest}*{weight.strip()}"


def _kept(key: str, where: str) -> str:
    """Return the digest of a key. An error never repeats the key."""
    if key.startswith(_PREFIX):
        if not _DIGEST.fullmatch(key):
            raise SettingsError(
                f"{where}: sha256: must be followed by 64 lower-case hexadecimal digits, and perhaps by *WEIGHT"
            )
        return key
    if not _KEY.fullmatch(key):
        raise SettingsError(f"{where}: a key must be printable ASCII without spaces and commas, and not empty")
    return digest_of(key)
