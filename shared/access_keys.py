"""API keys: how they are given, kept and compared, and the rights that come with each.

A key is known here by its SHA-256 digest alone. The operator may give keys in plain or as `sha256:HEX`; what the
supervisor hands to its children, and what lies in the run directory, is always the digest. `sha256:HEX*N` gives a key
N times the share of the server that others have. `;name=TEXT`, `;rpm=N` and `;tpm=N` behind it give a name for logs
and reports, and limits of requests and tokens in a minute. In a file the same is written `KEY N name=TEXT rpm=N tpm=N`.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from shared.settings import Settings, SettingsError

_PREFIX = "sha256:"
_WEIGHT = r"[1-9][0-9]{0,3}"
# Names and their values: a name may not look like one that is made from a digest.
_OPTION = r"name=(?!key-)[A-Za-z0-9][A-Za-z0-9._-]{0,63}|(?:rpm|tpm)=[1-9][0-9]{0,11}"
_DIGEST = re.compile(rf"(sha256:[0-9a-f]{{64}})(?:\*({_WEIGHT}))?((?:;(?:{_OPTION}))*)")
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]+")


@dataclass(frozen=True)
class Caller:
    """The author of a request. `name` separates keys in logs and queues and grants no access. Empty without keys."""

    name: str = ""
    admin: bool = False
    weight: int = 1
    # Requests and tokens that the key may have in a minute; 0: any number.
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


@dataclass(frozen=True)
class AccessKeys:
    """The digests of the keys that open this server; without any, access is open."""

    users: tuple[str, ...] = ()
    admins: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> AccessKeys:
        users = [*_listed(settings.api_key, "api_key"), *_in_file(settings.api_key_file)]
        admins = _listed(settings.admin_api_key, "admin_api_key")
        _check_names([*users, *admins], made_too=bool(settings.batch_dir))
        return cls(tuple(users), tuple(admins))

    def caller(self, given: str | None) -> Caller | None:
        """Find the caller with the key `given`; None when it opens nothing. Takes as long for every wrong key."""
        digest = "" if given is None else digest_of(given)
        admins = _found(self.admins, digest)
        users = _found(self.users, digest)
        if admins or users:
            caller = _caller(admins[0] if admins else users[0])
            return dataclasses.replace(caller, admin=bool(admins), weight=max(map(_weight, [*admins, *users])))
        return None if self.users else Caller()

    @property
    def callers(self) -> list[Caller]:
        """The callers with a key, without their roles."""
        return [_caller(kept) for kept in dict.fromkeys((*self.users, *self.admins))]


def digest_of(key: str) -> str:
    """Return the digest under which a key is kept."""
    return _PREFIX + sha256(key.encode()).hexdigest()


def with_digests(settings: Settings) -> Settings:
    """Replace keys in plain by their digests. SettingsError for a key or a file that cannot be used."""
    keys = AccessKeys.of(settings)
    return dataclasses.replace(
        settings, api_key=",".join(keys.users), api_key_file="", admin_api_key=",".join(keys.admins)
    )


def _found(kept: Sequence[str], digest: str) -> list[str]:
    """Return the entries of the key: none when it is not there."""
    # All are compared, each in constant time: how long it takes says nothing about a key.
    return [known for known in kept if hmac.compare_digest(known[:_LENGTH], digest)]


# Length of a digest.
_LENGTH = len(_PREFIX) + 64


def _weight(kept: str) -> int:
    return _caller(kept).weight


@lru_cache(4096)
def _caller(kept: str) -> Caller:
    """Return the caller with a kept key, without its role."""
    weight, *options = kept[_LENGTH:].split(";")
    given = dict(option.split("=", 1) for option in options)
    return Caller(
        given.get("name", f"key-{kept[len(_PREFIX) :][:8]}"),
        weight=int(weight.removeprefix("*") or 1),
        requests_per_minute=int(given.get("rpm", 0)),
        tokens_per_minute=int(given.get("tpm", 0)),
    )


def _check_names(kept: Sequence[str], made_too: bool) -> None:
    """Raise SettingsError when two keys were given one name; `made_too`: or have it from their digests."""
    owners: dict[str, str] = {}
    for known in kept:
        name = _caller(known).name
        # Names that were made from digests may meet, as no name of an operator can. That matters where keys have files.
        matters = made_too or not name.startswith("key-")
        if matters and owners.setdefault(name, known[:_LENGTH]) != known[:_LENGTH]:
            raise SettingsError(f"two API keys have the name {name!r}: give each a name of its own")


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
    key, *words = line.split()
    kept = _kept(key, where)
    if not words:
        return kept
    weight = f"*{words.pop(0)}" if re.fullmatch(_WEIGHT, words[0]) else ""
    names = [word.partition("=")[0] for word in words]
    made = f"{kept}{weight}{''.join(f';{word}' for word in words)}"
    if len(kept) > _LENGTH or len(set(names)) < len(names) or not _DIGEST.fullmatch(made):
        raise SettingsError(
            f"{where}: after a key may come its weight, 1 to 9999, then name=TEXT (letters, digits, ._-, not key-...), "
            "rpm=N and tpm=N (requests and tokens in a minute), each once, and nothing else"
        )
    return made


def _kept(key: str, where: str) -> str:
    """Return the digest of a key. An error never repeats the key."""
    if key.startswith(_PREFIX):
        if not _DIGEST.fullmatch(key):
            raise SettingsError(
                f"{where}: sha256: must be followed by 64 lower-case hexadecimal digits, and perhaps by *WEIGHT, "
                ";name=TEXT, ;rpm=N and ;tpm=N"
            )
        return key
    if not _KEY.fullmatch(key):
        raise SettingsError(f"{where}: a key must be printable ASCII without spaces and commas, and not empty")
    return digest_of(key)
