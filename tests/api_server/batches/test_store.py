"""The folder of files and batches: its room, its limits, and what processes that are gone have left."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from api_server.batches import store as store_module
from api_server.batches.records import Batch, StoredFile, is_id, new_batch_id
from api_server.batches.store import Store
from api_server.errors import ErrorKind, RequestFailed
from shared.settings import Settings, SettingsError
from tests.api_server.batches.test_runner import ENDPOINT, numbered, put


def test_uploads_share_the_room(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    first, content, most = store.begin("a", 700)
    assert most == 700
    content.write(b"x" * 300)
    content.flush()
    second, other, rest = store.begin("b", 700)
    assert rest == 300
    with pytest.raises(RequestFailed, match="no room for files") as refused:
        store.begin("c", 1)
    assert refused.value.kind is ErrorKind.INVALID
    store.drop("b", second, other)
    store.drop("a", first, content)
    assert store.room() == 1000
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_few_uploads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_UPLOADS", 3)
    monkeypatch.setattr(store_module, "MOST_UPLOADS_OF_TENANT", 2)
    store = Store(tmp_path, 1000)
    begun = [store.begin("a", 10) for _ in range(2)]
    other = store.begin("b", 10)
    for tenant in ("a", "c"):
        with pytest.raises(RequestFailed, match="as many are being uploaded as may be") as refused:
            store.begin(tenant, 10)
        assert (refused.value.kind, refused.value.retry_after) == (ErrorKind.RATE_LIMITED, 1)
    store.drop("b", *other[:2])
    with pytest.raises(RequestFailed, match="as many are being uploaded as may be"):
        store.begin("a", 10)
    name, content, _ = begun[0]
    store.commit("a", StoredFile(name, "x", "batch", 0, 0), content)
    store.drop("a", *store.begin("a", 10)[:2])
    store.drop("a", *begun[1][:2])


def test_a_batch_needs_room(tmp_path: Path) -> None:
    put(Store(tmp_path, 1 << 20), numbered(3))
    with pytest.raises(RequestFailed, match="no room"):
        put(Store(tmp_path, 100), numbered(3))
    full = Store(tmp_path, 100)
    (file,) = full.files("t")
    batch = Batch(new_batch_id("batch_"), "t", "openai", ENDPOINT, file.id, 0, 1)
    with pytest.raises(RequestFailed, match="no room"):
        full.create(batch, full.content("t", file.id))


def test_a_key_may_have_so_many_batches_that_have_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_ACTIVE", 2)
    store = Store(tmp_path, 1 << 20)
    first, _ = (put(store, numbered(1)) for _ in range(2))
    with pytest.raises(RequestFailed, match="2 batches have not ended") as refused:
        put(store, numbered(1))
    assert refused.value.kind is ErrorKind.RATE_LIMITED
    put(store, numbered(1), "another")
    store.save(first.became("completed"))
    store.give_back(first)
    put(store, numbered(1))


def test_the_oldest_ended_batch_makes_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_ENTRIES", 3)
    store = Store(tmp_path, 1 << 20)
    made = []
    for age in (30, 20, 10):
        batch = put(store, numbered(1))
        store.save(dataclasses.replace(batch, created_at=age, status="completed"))
        store.give_back(batch)
        store.delete_file("t", batch.input_file_id)
        made.append(batch)
    put(store, numbered(1))
    left = {batch.id for batch in store.batches("t", "openai")}
    assert made[2].id not in left
    assert len(left) == 3


def test_ended_batches_go_after_their_time(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    ended, active = (put(store, numbered(1)) for _ in range(2))
    store.save(ended.became("completed"))
    store.delete_expired()
    assert len(store.batches("t", "openai")) == 2
    long_ago = time.time() - store_module.KEPT_SECONDS - 10
    for batch in (ended, active):
        os.utime(store.folder_of(batch) / "batch.json", (long_ago, long_ago))
    store.delete_expired()
    assert [batch.id for batch in store.batches("t", "openai")] == [active.id]


def test_what_gone_processes_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1 << 20)
    batch = put(store, numbered(1))
    name, content, _ = store.begin("t", 10)
    content.close()
    files = tmp_path / "tenants" / "t" / "files"
    draft = tmp_path / "tenants" / "t" / "drafts" / "batch_x"
    draft.mkdir()
    left = [files / f"{name}.part", files / "file-x.data", files / "x.json.abcd.new", draft / "input.jsonl"]
    for path in left:
        path.write_text("x")
    store.tidy()
    assert all(path.exists() for path in left)
    monkeypatch.setattr(store_module, "_LEFTOVER_SECONDS", -10)
    store.tidy()
    assert not any(path.exists() for path in (*left, draft))
    assert store.batch("t", batch.id) == batch
    assert store.content("t", batch.input_file_id).exists()
    store.save(batch.became("completed"))
    store.tidy()
    assert not (store.folder_of(batch) / "input.jsonl").exists()


def test_facts_that_cannot_be_written_leave_no_data(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    name, content, _ = store.begin("t", 10)
    content.write(b"x")
    with pytest.raises(TypeError):
        store.commit("t", StoredFile(name, "x", "batch", 1, 0, 1 << 80), content)
    store.drop("t", name, content)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_room_is_measured_while_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1000)
    (tmp_path / "stays").write_bytes(b"x" * 10)
    monkeypatch.setattr(
        os, "walk", lambda _: [(str(tmp_path), [], ["stays", "gone"]), (str(tmp_path / "y"), [], ["z"])]
    )
    assert store.room() == 990


def test_every_name_of_a_key_has_a_folder_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    (tmp_path / "lock").touch()
    names = ["lock", "Team", "team", "", "tenants", "TEAM"]
    batches = {name: put(store, numbered(1), name) for name in names}
    for name, batch in batches.items():
        assert store.batches(name, "openai") == [batch]
    folders = [path.name for path in (tmp_path / "tenants").iterdir()]
    assert len({name.casefold() for name in folders}) == len(names)


def test_a_folder_that_cannot_be_made_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store.of(Settings(model="m", batch_dir=str(tmp_path / "file" / "batches")))
    assert store is not None
    with pytest.raises(SettingsError, match=r"batch_dir .* cannot be written"):
        store.check()
    assert Store.of(Settings(model="m")) is None
    Store(tmp_path / "new", 1).check()
    assert list((tmp_path / "new").iterdir()) == []


def test_ids_sort_by_time_within_a_second() -> None:
    made = [new_batch_id("batch_") for _ in range(100)]
    assert sorted(made) == made
    assert all(is_id(one) for one in made)
