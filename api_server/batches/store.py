"""The folder of files and batches. What lies there is the state: any process, and a later server, goes on from it.

    FOLDER/lock                       held by the process that runs batches
    FOLDER/tenants/TENANT/            all of a tenant:
        files/ID.json, ID.data        a file; the .json is written last, and removed first
        batches/ID/batch.json         what is known of a batch; replaced whole
        batches/ID/cancel             is there when a client has cancelled it
        batches/ID/input.jsonl        the same as the file's data, which may be deleted meanwhile; gone at the end
        batches/ID/{output,errors}.jsonl   one line for each request that has ended, appended; at the end they become
                                      files, for dialects whose batches are files

A tenant sees its own files and batches only. Knows paths, sizes and times; does not know what lines mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import BinaryIO

from api_server.batches import disk
from api_server.batches.records import Batch, StoredFile, is_id, new_file_id, read_file
from api_server.errors import ErrorKind, RequestFailed
from shared.setting_checks import parse_memory
from shared.settings import Settings, SettingsError

log = logging.getLogger("tokenyard")

# Most files, and batches, of one tenant.
MOST_ENTRIES = 10_000
# Most batches of one tenant that have not ended.
MOST_ACTIVE = 100
# Most files that one process receives at a time, from all tenants and from one.
MOST_UPLOADS = 64
MOST_UPLOADS_OF_TENANT = 8
# Seconds that a batch is kept behind its end.
KEPT_SECONDS = 30 * 24 * 3600
# Seconds without a change after which a file that was not completed is left by a process that is gone.
_LEFTOVER_SECONDS = 3600
_RETRY_SECONDS = 60
# The tenant of a server without keys; no key has such a name.
_OPEN = "_open"


class Store:
    """The folder, and its limit in bytes."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        # Bytes that are promised to the files that this process receives, by their tenants and ids.
        self._promised: dict[tuple[str, str], int] = {}
        # One thread at a time asks for room, or makes a batch.
        self._book = threading.Lock()
        # Paths of batches that could not be read, which have been logged.
        self._broken: set[Path] = set()

    @classmethod
    def of(cls, settings: Settings) -> Store | None:
        """The store of a server; None where the operator has named no folder."""
        if not settings.batch_dir:
            return None
        most = parse_memory(settings.batch_space, "batch_space") or 0
        return cls(Path(settings.batch_dir).expanduser().resolve(), most)

    def check(self) -> None:
        """Makes the folder. Raises SettingsError where this process cannot write there."""
        try:
            disk.make_writable(self.folder)
        except OSError as error:
            raise SettingsError(
                f"batch_dir {self.folder} cannot be written: {error}; name a folder that the server's user may write"
            ) from None

    def room(self) -> int:
        """The bytes that may still be written. Walks the folder."""
        promised = dict(self._promised)
        received = {f"{name}.part" for _, name in promised}
        found = (disk.facts_of(path) for path in disk.walk(self.folder) if path.name not in received)
        # Files with several names count once.
        taken = sum({facts.st_ino: facts.st_size for facts in found if facts}.values())
        return self._most_bytes - taken - sum(promised.values())

    # Files.

    def begin(self, tenant: str, wanted: int) -> tuple[str, BinaryIO, int]:
        """Opens a new file for writing. Returns its id, and the bytes it may have: at most the wanted ones.

        `commit` or `drop` must follow. Raises RequestFailed where there are too many files, or is no room.
        """
        folder = self._files(tenant)
        if sum(1 for _ in folder.glob("*.json")) >= MOST_ENTRIES:
            message = f"there are {MOST_ENTRIES} files already, which is the most for a key: delete some"
            raise RequestFailed(ErrorKind.INVALID, message, field="file")
        name = new_file_id()
        with self._book:
            owners = [owner for owner, _ in list(self._promised)]
            if len(owners) >= MOST_UPLOADS or owners.count(tenant) >= MOST_UPLOADS_OF_TENANT:
                message = "file: as many are being uploaded as may be at a time: try again when one of them is there"
                raise RequestFailed(ErrorKind.RATE_LIMITED, message, field="file", retry_after=1)
            room = self.room()
            if room <= 0:
                raise no_room("file")
            content = (folder / f"{name}.part").open("wb")
            most = min(room, wanted)
            self._promised[tenant, name] = most
            return name, content, most

    def commit(self, tenant: str, file: StoredFile, content: BinaryIO) -> StoredFile:
        """Makes a written file visible."""
        content.flush()
        os.fsync(content.fileno())
        content.close()
        folder = self._files(tenant)
        with disk.replacing(folder / f"{file.id}.json", asdict(file)):
            os.replace(folder / f"{file.id}.part", folder / f"{file.id}.data")
        self._promised.pop((tenant, file.id), None)
        return file

    def drop(self, tenant: str, name: str, content: BinaryIO) -> None:
        """Removes a file that will not be complete."""
        # What was not yet written may find no room at the close, too.
        with contextlib.suppress(OSError):
            content.close()
        for ending in ("json", "part", "data"):
            (self._files(tenant) / f"{name}.{ending}").unlink(missing_ok=True)
        self._promised.pop((tenant, name), None)

    def add(self, tenant: str, file: StoredFile, source: Path) -> None:
        """Makes a file of one that is there. Does nothing the second time."""
        folder = self._files(tenant)
        data = folder / f"{file.id}.data"
        if not data.exists():
            os.link(source, data)
        disk.replace_whole(folder / f"{file.id}.json", asdict(file))

    def files(self, tenant: str) -> list[StoredFile]:
        """The files of a tenant, newest first."""
        found = [file for path in disk.inside(self._files(tenant), ".json") if (file := read_file(path))]
        return sorted(found, key=lambda file: (file.created_at, file.id), reverse=True)

    def file(self, tenant: str, name: str) -> StoredFile:
        """The facts of a file. Raises RequestFailed(NOT_FOUND)."""
        file = read_file(self._files(tenant) / f"{name}.json") if is_id(name) else None
        if file is None:
            raise _missing("file", name)
        return file

    def content(self, tenant: str, name: str) -> Path:
        """The path of a file's content. Raises RequestFailed(NOT_FOUND)."""
        path = self._files(tenant) / f"{self.file(tenant, name).id}.data"
        if not path.exists():
            raise _missing("file", name)
        return path

    def delete_file(self, tenant: str, name: str) -> None:
        """Removes a file. Raises RequestFailed(NOT_FOUND)."""
        self.file(tenant, name)
        for ending in ("json", "data"):
            (self._files(tenant) / f"{name}.{ending}").unlink(missing_ok=True)

    # Batches.

    def create(self, batch: Batch, source: Path) -> Batch:
        """Makes a batch of the lines in `source`. Raises RequestFailed where there are too many, or is no room."""
        with self._book:
            if self.room() <= 0:
                raise no_room("input_file_id")
            self._make_place(batch.tenant)
            return self._create(batch, source)

    def _make_place(self, tenant: str) -> None:
        """Deletes the oldest batch that has ended where there are too many. Raises RequestFailed where none has."""
        folders = list(self._batches(tenant).iterdir())
        active = [folder for folder in folders if (folder / "input.jsonl").exists()]
        if len(active) >= MOST_ACTIVE:
            message = f"{MOST_ACTIVE} batches have not ended, which is the most for a key: wait for one, or cancel it"
            raise RequestFailed(ErrorKind.RATE_LIMITED, message, field="input_file_id", retry_after=_RETRY_SECONDS)
        if len(folders) >= MOST_ENTRIES:
            ended = [batch for folder in folders if (batch := self._batch_in(folder)) and not batch.active]
            if not ended:
                message = f"there are {MOST_ENTRIES} batches already, which is the most for a key: delete some"
                raise RequestFailed(ErrorKind.INVALID, message, field="input_file_id")
            self.delete_batch(min(ended, key=lambda batch: batch.created_at))

    def _create(self, batch: Batch, source: Path) -> Batch:
        folder = self._batches(batch.tenant)
        draft = self._made(batch.tenant, "drafts") / batch.id
        draft.mkdir()
        try:
            os.link(source, draft / "input.jsonl")
        except FileNotFoundError:
            draft.rmdir()
            raise _missing("file", batch.input_file_id) from None
        disk.replace_whole(draft / "batch.json", asdict(batch))
        draft.rename(folder / batch.id)
        disk.sync(folder)
        return batch

    def batch(self, tenant: str, name: str) -> Batch:
        """The facts of a batch. Raises RequestFailed(NOT_FOUND)."""
        batch = self._batch_in(self._batches(tenant) / name) if is_id(name) else None
        if batch is None:
            raise _missing("batch", name)
        return self._with_cancel(batch)

    def batches(self, tenant: str, dialect: str) -> list[Batch]:
        """The batches of a tenant that came by a dialect, newest first."""
        found = (self._batch_in(folder) for folder in self._batches(tenant).iterdir())
        mine = [batch for batch in found if batch and batch.dialect == dialect]
        return [self._with_cancel(b) for b in sorted(mine, key=lambda b: (b.created_at, b.id), reverse=True)]

    def fresh(self, known: Container[str]) -> list[Batch]:
        """The batches of all tenants whose ids are not among the known ones, oldest first."""
        found = (self._batch_in(folder) for folder in self._all("batches") if folder.name not in known)
        return sorted((batch for batch in found if batch), key=lambda batch: (batch.created_at, batch.id))

    def _batch_in(self, folder: Path) -> Batch | None:
        """The batch of a folder; None where there is none that can be read, which is logged once."""
        try:
            facts = disk.read(folder / "batch.json")
            # A later version may have written more.
            known = {part.name: facts[part.name] for part in fields(Batch) if part.name in facts} if facts else None
            return Batch(**known) if known else None
        except (ValueError, TypeError, OSError) as error:
            if folder not in self._broken:
                self._broken.add(folder)
                log.warning("the batch in %s cannot be read, and is left alone: %s", folder, error)
            return None

    def delete_expired(self) -> None:
        """Removes the files and the ended batches whose time has passed."""
        now = time.time()
        for path in self._all("files", ".json"):
            file = read_file(path)
            if file and file.expires_at is not None and file.expires_at <= now:
                path.unlink(missing_ok=True)
                path.with_suffix(".data").unlink(missing_ok=True)
        for folder in self._all("batches"):
            written = disk.facts_of(folder / "batch.json")
            if written and written.st_mtime + KEPT_SECONDS <= now:
                batch = self._batch_in(folder)
                if batch and not batch.active:
                    self.delete_batch(batch)

    def tidy(self) -> None:
        """Removes what processes that are gone have left: for the process that runs batches, before it begins."""
        for folder in self._all("batches"):
            if (folder / "input.jsonl").exists() and (batch := self._batch_in(folder)) and not batch.active:
                self.give_back(batch)
        latest = time.time() - _LEFTOVER_SECONDS
        for path in disk.walk(self.folder / "tenants"):
            draft = path.suffix in (".part", ".new") or "drafts" in path.parts[-3:-1]
            lost = path.suffix == ".data" and not path.with_suffix(".json").exists()
            if (draft or lost) and (facts := disk.facts_of(path)) and max(facts.st_mtime, facts.st_ctime) <= latest:
                path.unlink(missing_ok=True)
                if path.parent.parent.name == "drafts":
                    with contextlib.suppress(OSError):
                        path.parent.rmdir()

    def give_back(self, batch: Batch) -> None:
        """Removes what a batch that has ended needs no more: files have names of their own."""
        folder = self.folder_of(batch)
        published = batch.input_file_id and batch.status != "failed"
        for name in ("input", *(("output", "errors") if published else ())):
            (folder / f"{name}.jsonl").unlink(missing_ok=True)

    def save(self, batch: Batch) -> None:
        """Replaces the facts of a batch: for the process that runs batches."""
        disk.replace_whole(self.folder_of(batch) / "batch.json", asdict(batch))

    def cancel(self, batch: Batch) -> None:
        """Leaves word that a batch is to end."""
        (self.folder_of(batch) / "cancel").touch()

    def cancelled_at(self, batch: Batch) -> int:
        """When a client has cancelled a batch; 0 if none has."""
        try:
            return int((self.folder_of(batch) / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return 0

    def delete_batch(self, batch: Batch) -> None:
        shutil.rmtree(self.folder_of(batch), ignore_errors=True)

    def folder_of(self, batch: Batch) -> Path:
        return self._batches(batch.tenant) / batch.id

    def _with_cancel(self, batch: Batch) -> Batch:
        """A batch whose end is under way shows it, although the process that runs batches has not seen it."""
        asked = self.cancelled_at(batch) if batch.active else 0
        if not asked:
            return batch
        return replace(batch, status="cancelling", times={**batch.times, "cancelling": asked})

    def _files(self, tenant: str) -> Path:
        return self._made(tenant, "files")

    def _batches(self, tenant: str) -> Path:
        return self._made(tenant, "batches")

    def _made(self, tenant: str, kind: str) -> Path:
        # Some file systems do not tell capital letters from small ones; no name of a key has a plus.
        name = re.sub("[A-Z]", lambda found: f"+{found[0].lower()}", tenant or _OPEN)
        folder = self.folder / "tenants" / name / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _all(self, kind: str, ending: str = "") -> Iterator[Path]:
        """The entries of all tenants."""
        for tenant in disk.inside(self.folder / "tenants"):
            yield from disk.inside(tenant / kind, ending)


def no_room(field: str) -> RequestFailed:
    message = "this server has no room for files: delete some, or wait until batches have ended"
    return RequestFailed(ErrorKind.INVALID, message, field=field)


def _missing(kind: str, name: str) -> RequestFailed:
    return RequestFailed(ErrorKind.NOT_FOUND, f"there is no {kind} {name[:100]!r}", field=f"{kind}_id")
