from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared import kernel_cache
from shared.kernel_cache import KEPT, forget_old_kernels, kernel_cache_directory


def test_each_state_of_the_sources_has_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shared"
    (tmp_path / "model_worker" / "attention").mkdir(parents=True)
    monkeypatch.setattr(kernel_cache, "__file__", str(folder / "kernel_cache.py"))
    source = tmp_path / "model_worker" / "attention" / "kernel.py"
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        found.append(kernel_cache_directory(environ))
    assert found[0] == found[2] != found[1]
    assert found[0].parent == tmp_path / "cache" / "tokenyard" / "numba"


def test_the_operator_decides() -> None:
    assert kernel_cache_directory({"NUMBA_CACHE_DIR": "/kernels"}) == Path("/kernels")


def test_few_old_states_are_kept(tmp_path: Path) -> None:
    present = kernel_cache_directory({"XDG_CACHE_HOME": str(tmp_path)})
    for age in range(KEPT + 3):
        old = present.parent / f"state-{age}"
        old.mkdir(parents=True)
        os.utime(old, (1000 - age, 1000 - age))
    present.mkdir()
    forget_old_kernels(present)
    assert {path.name for path in present.parent.iterdir()} == {present.name, "state-0", "state-1", "state-2"}


def test_a_folder_of_the_operators_is_left_alone(tmp_path: Path) -> None:
    for name in map(str, range(KEPT + 3)):
        (tmp_path / name).mkdir()
    forget_old_kernels(tmp_path / "0")
    assert len(list(tmp_path.iterdir())) == KEPT + 3
