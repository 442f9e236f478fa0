"""Keys and certificates that change while a server runs: what is taken over, and what leaves all as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from deploy.credentials import Credentials, exposed, resolve_tls, write
from shared.access_keys import AccessKeys, with_digests
from shared.endpoints import RunDirectory
from shared.settings import Settings, SettingsError


class Yard:
    """A server's files, and what was said about them."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.certificate = folder / "keys", folder / "server.pem"
        self.keys.write_text("first\n")
        self.keys.chmod(0o600)
        self.issue()
        self.directory = RunDirectory(folder)
        self.given: Callable[[], Settings] = self.settings
        self.said: list[tuple[str, str]] = []
        effective = with_digests(resolve_tls(self.settings()))
        write(effective, self.directory)
        self.credentials = Credentials(
            effective, self.directory, lambda: self.given(), lambda level, text: self.said.append((level, text))
        )

    def issue(self) -> None:
        trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(self.certificate))
        self.certificate.chmod(0o600)

    def settings(self) -> Settings:
        return Settings(api_key_file=str(self.keys), admin_api_key="boss", ssl_certfile=str(self.certificate))

    def opens(self, key: str) -> bool:
        return AccessKeys.of(Settings.read(self.directory.settings_file)).caller(key) is not None


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


def test_the_new_key_opens_and_the_old_one_does_not(yard: Yard) -> None:
    assert (yard.opens("first"), yard.opens("second")) == (True, False)
    yard.keys.write_text("second\n")
    yard.credentials.read_again()
    assert (yard.opens("first"), yard.opens("second"), yard.opens("boss")) == (False, True, True)
    assert yard.said == [("INFO", "keys and certificates were read again; changed: api_key")]
    assert yard.directory.settings_file.stat().st_mode & 0o777 == 0o600
    assert not list(yard.directory.path.glob("*.new"))
    yard.credentials.read_again()
    assert yard.said[-1][1].endswith("changed: no key")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda yard: yard.keys.write_text("a key with spaces and more\n"), "line 1 of api_key_file"),
        (lambda yard: yard.keys.write_text(""), "has no key"),
        (lambda yard: yard.keys.unlink(), "cannot be read"),
        (lambda yard: yard.certificate.write_text("no PEM"), "ssl_certfile"),
        (lambda yard: yard.certificate.unlink(), "ssl_certfile"),
    ],
)
def test_what_cannot_be_used_leaves_the_old(yard: Yard, spoil: Callable[[Yard], None], problem: str) -> None:
    before = yard.directory.settings_file.read_text()
    spoil(yard)
    yard.credentials.read_again()
    ((level, text),) = yard.said
    assert level == "WARNING"
    assert text.startswith("keys and certificates stay as they are: ")
    assert problem in text
    assert yard.directory.settings_file.read_text() == before
    assert yard.opens("first")


@pytest.mark.parametrize("name", ["api_key_file", "admin_api_key", "ssl_certfile"])
def test_a_door_is_not_taken_away_while_it_is_used(yard: Yard, name: str) -> None:
    without: dict[str, Any] = {name: ""}
    yard.given = lambda: dataclasses.replace(yard.settings(), **without)
    yard.credentials.read_again()
    assert "was taken away, which takes a restart" in yard.said[0][1]
    assert yard.opens("first")
    assert not yard.opens("stranger")


def test_settings_that_are_wrong_now_change_nothing(yard: Yard) -> None:
    def broken() -> Settings:
        raise SettingsError("config file my.toml cannot be read: it ends early")

    yard.given = broken
    yard.keys.write_text("second\n")
    yard.credentials.read_again()
    assert "my.toml cannot be read" in yard.said[0][1]
    assert yard.opens("first")


def test_other_settings_stay_until_a_restart(yard: Yard) -> None:
    yard.given = lambda: dataclasses.replace(yard.settings(), port=9999, max_running=1)
    yard.credentials.read_again()
    assert Settings.read(yard.directory.settings_file).port == 8000


def test_secrets_that_everybody_can_read_are_named(yard: Yard) -> None:
    assert list(exposed(yard.settings())) == []
    yard.keys.chmod(0o644)
    yard.certificate.chmod(0o644)
    keys, certificate = exposed(yard.settings())
    assert keys.startswith(f"api_key_file {yard.keys} can be read by every user of this machine: chmod")
    assert str(yard.certificate) in certificate
    yard.keys.unlink()
    assert len(list(exposed(yard.settings()))) == 1
