"""API keys: who is let in, what is kept of a key, and errors that never repeat one."""

from __future__ import annotations

import dataclasses
import secrets
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.access_keys import AccessKeys, digest_of, with_digests
from shared.settings import Settings, SettingsError

keys = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters=","), min_size=1).filter(
    lambda key: not key.startswith("sha256:")
)


@given(st.lists(keys, min_size=1, unique=True), st.lists(keys, unique=True), st.text())
def test_exactly_the_given_keys_open(users: list[str], admins: list[str], other: str) -> None:
    found = AccessKeys.of(Settings(api_key=",".join(users), admin_api_key=",".join(admins)))
    for key in {*users, *admins}:
        caller = found.caller(key)
        assert caller is not None
        assert caller.admin == (key in admins)
        assert caller.name == f"key-{sha256(key.encode()).hexdigest()[:8]}"
    if other not in {*users, *admins}:
        assert found.caller(other) is None
    assert found.caller(None) is None


def test_without_keys_everybody_may_come_and_nobody_is_admin() -> None:
    caller = AccessKeys().caller("whatever")
    assert caller is not None
    assert (caller.name, caller.admin) == ("", False)


def test_an_admin_key_alone_leaves_the_server_open() -> None:
    found = AccessKeys.of(Settings(admin_api_key="boss"))
    stranger, boss = found.caller(None), found.caller("boss")
    assert stranger is not None
    assert boss is not None
    assert (stranger.admin, boss.admin) == (False, True)


@given(st.lists(keys, min_size=1), st.lists(keys, min_size=1))
def test_what_is_written_down_has_no_key_and_opens_for_the_same(users: list[str], admins: list[str]) -> None:
    plain = Settings(api_key=",".join(users), admin_api_key=",".join(admins))
    kept = with_digests(plain)
    assert kept.api_key == ",".join(map(digest_of, users))
    assert AccessKeys.of(kept) == AccessKeys.of(plain)
    assert with_digests(kept) == kept


def test_a_file_has_one_key_a_line(tmp_path: Path) -> None:
    first, second = secrets.token_urlsafe(), secrets.token_urlsafe()
    file = tmp_path / "keys"
    file.write_text(f"# team a\n{first}\n\n  {digest_of(second)}  \n")
    kept = with_digests(Settings(api_key_file=str(file)))
    assert kept.api_key_file == ""
    found = AccessKeys.of(kept)
    assert found.caller(first) is not None
    assert found.caller(second) is not None
    assert found.caller("# team a") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_key": "good,"}, "api_key: a key must be printable ASCII"),
        ({"api_key": "has space"}, "api_key: a key must be"),
        ({"admin_api_key": "gehe\u00efm"}, "admin_api_key: a key must be"),
        ({"api_key": "sha256:1234"}, "api_key: sha256: must be followed by 64"),
        ({"api_key_file": "/no/such/file"}, "api_key_file /no/such/file cannot be read: .*No such file"),
    ],
)
def test_a_bad_key_is_refused_but_not_repeated(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as failure:
        AccessKeys.of(Settings(**settings))  # type: ignore[arg-type]
    for secret in ("good", "has space", "gehe", "1234"):
        assert secret not in str(failure.value)


def test_a_file_without_keys_is_no_open_door(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# to come\n")
    with pytest.raises(SettingsError, match="has no key"):
        AccessKeys.of(Settings(api_key_file=str(tmp_path / "keys")))


def test_settings_do_not_show_keys() -> None:
    assert "sesame" not in repr(Settings(api_key="sesame-1", admin_api_key="sesame-2"))


def test_a_line_gives_a_key_its_weight_name_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one 3 name=team-a rpm=60 tpm=5000\ntwo rpm=5\nthree\n")
    kept = with_digests(Settings(api_key_file=str(file)))
    assert with_digests(kept) == kept
    found = AccessKeys.of(kept)
    one, two, three = (found.caller(key) for key in ("one", "two", "three"))
    assert one is not None
    assert (one.name, one.weight, one.requests_per_minute, one.tokens_per_minute) == ("team-a", 3, 60, 5000)
    assert two is not None
    assert (two.name, two.weight, two.requests_per_minute, two.tokens_per_minute) == (
        f"key-{sha256(b'two').hexdigest()[:8]}", 1, 5, 0,
    )  # fmt: skip
    assert three is not None
    assert (three.requests_per_minute, three.tokens_per_minute) == (0, 0)
    assert [caller.name for caller in found.callers] == [one.name, two.name, three.name]
    assert AccessKeys.of(Settings(api_key=f"{digest_of('x')}*2;rpm=7")).caller("x") == dataclasses.replace(
        two, name=f"key-{sha256(b'x').hexdigest()[:8]}", weight=2, requests_per_minute=7
    )


@pytest.mark.parametrize(
    "line",
    ["k 0", "k 3 4", "k rpm=0", "k rpm=1 rpm=2", "k name=key-1", "k name=a,b", "k name=", "k mood=1", "k tpm=-1"],
)
def test_another_word_behind_a_key_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"good\n{line}\n")
    with pytest.raises(SettingsError, match=r"line 2 of api_key_file .*: after a key may come its weight"):
        AccessKeys.of(Settings(api_key_file=str(tmp_path / "keys")))


def test_a_name_belongs_to_one_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one name=team\ntwo name=team\n")
    with pytest.raises(SettingsError, match="two API keys have the name 'team'"):
        AccessKeys.of(Settings(api_key_file=str(tmp_path / "keys")))


def test_names_that_are_made_may_meet_unless_keys_have_files() -> None:
    keys = f"sha256:{'a' * 64},sha256:{'a' * 8}{'b' * 56}"
    assert len(AccessKeys.of(Settings(api_key=keys)).users) == 2
    with pytest.raises(SettingsError, match="two API keys have the name 'key-aaaaaaaa'"):
        AccessKeys.of(Settings(api_key=keys, batch_dir="/batches"))
    assert len(AccessKeys.of(Settings(api_key=keys.replace(",", ";name=a,"), batch_dir="/batches")).users) == 2
