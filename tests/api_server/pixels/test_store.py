"""Images by URL: what is kept, for how long, and under which names."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_server.pixels.store import SECONDS_KEPT, ImageStore


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_an_image_is_found_for_an_hour_by_every_process(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (ImageStore(tmp_path / "images", clock=clock) for _ in range(2))
    name = one.put(b"picture", "webp")
    assert other.find(name) == (b"picture", "webp")
    clock.now += SECONDS_KEPT - 1
    assert other.find(name) == (b"picture", "webp")
    clock.now += 2
    assert other.find(name) is None
    other.put(b"another", "png")
    assert len(list((tmp_path / "images").iterdir())) == 1


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    clock = Clock()
    store = ImageStore(tmp_path, most_bytes=25, clock=clock)
    names = []
    for i in range(4):
        clock.now += 1
        names.append(store.put(bytes([i]) * 10, "png"))
    assert [store.find(name) is not None for name in names] == [False, False, True, True]


@pytest.mark.parametrize("name", ["", "x.png", "../secret", "0" * 32, f"{'0' * 32}.png", f"{'0' * 32}.png.part"])
def test_other_names_are_not_found(tmp_path: Path, name: str) -> None:
    store = ImageStore(tmp_path)
    store.put(b"picture", "png")
    (tmp_path / "secret").write_text("x")
    assert store.find(name) is None
