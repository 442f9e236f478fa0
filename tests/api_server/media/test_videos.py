"""Opening videos: each container and form gives its frames in order, and hostile bytes are refused with a reason."""

from __future__ import annotations

import builtins
import os
from typing import Any

import numpy as np
import pytest

from api_server.media import videos
from api_server.media.decode import ImageRefused
from api_server.media.videos import open_video
from tests.api_server.media import clips

pytest.importorskip("av", reason="video files need the extra video")


@pytest.mark.parametrize(
    ("codec", "form"),
    [
        ("libx264", "mp4"),
        ("libx264", "mov"),
        ("libx264", "mpegts"),
        ("libvpx", "webm"),
        ("libvpx-vp9", "matroska"),
        ("libsvtav1", "webm"),
        ("mpeg4", "avi"),
        ("mpeg2video", "mpeg"),
    ],
)
def test_a_file_gives_the_frames_that_are_asked_for(codec: str, form: str) -> None:
    source = open_video([clips.file(codec=codec, form=form)], False, None)
    clip = source.clip
    assert (clip.count, clip.width, clip.height) == (20, 64, 48)
    assert clip.fps == pytest.approx(10)
    assert clip.seconds == pytest.approx(2)
    assert [clips.number(image) for image in source.frames([0, 3, 3, 7, 19])] == [0, 3, 3, 7, 19]


def test_a_video_is_decoded_by_one_thread() -> None:
    source = open_video([clips.file(codec="libsvtav1", form="webm", size=(640, 480))], False, None)
    frames = source.frames(range(20))
    before = threads()
    next(frames)
    assert threads() == before


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_a_video(form: str) -> None:
    source = open_video([clips.animation(form)], False, None)
    assert (source.clip.count, source.clip.width, source.clip.height) == (6, 64, 48)
    assert source.clip.fps == pytest.approx(10)
    assert [clips.number(image) for image in source.frames([0, 2, 5])] == [0, 2, 5]


def test_images_are_the_frames_of_a_video() -> None:
    source = open_video([clips.still(i) for i in (4, 9)], True, 2.0)
    assert (source.clip.count, source.clip.seconds, source.is_sampled) == (2, 1.0, False)
    assert [clips.number(image) for image in source.frames([0, 1])] == [4, 9]
    with pytest.raises(ImageRefused, match="a frame, number 1, that is damaged"):
        list(open_video([clips.still(0), clips.still(1)[:90]], True, None).frames([0, 1]))


def test_a_phones_video_is_turned_upright() -> None:
    data = bytearray(clips.file())
    matrix = data.index(b"tkhd") + 4 + 40  # of a header of version 0
    quarter = np.array([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30], ">i4")
    data[matrix : matrix + 36] = quarter.tobytes()
    source = open_video([bytes(data)], False, None)
    assert (source.clip.width, source.clip.height) == (48, 64)
    (image,) = source.frames([10])
    assert image.size == (48, 64)
    pixels = np.asarray(image)
    # A quarter to the right: what was left is on top.
    assert pixels[8, 24, 0] > 200 > 100 > pixels[56, 24, 0]


def test_a_playlist_opens_no_other_file() -> None:
    for text in (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(ImageRefused, match="is no video that can be read here: send MP4"):
            open_video([text], False, None)


def test_hostile_bytes_are_refused() -> None:
    good = {form: clips.file(12, codec=codec, form=form) for codec, form in (("libx264", "mp4"), ("libvpx", "webm"))}
    generator = np.random.default_rng(47)
    refused = 0
    for data in [*good.values(), clips.animation()]:
        for _ in range(40):
            broken = bytearray(data[: generator.integers(1, len(data) + 1)])
            for place in generator.integers(0, len(broken), generator.integers(1, 30)):
                broken[place] = generator.integers(0, 256)
            try:
                source = open_video([bytes(broken)], False, None)
                images = list(source.frames([0, source.clip.count - 1]))
                assert all(image.mode == "RGB" for image in images)
            except ImageRefused:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MOST_FILE_FRAMES", 10, "has more than 10 frames: send"),
        ("MOST_SECONDS", 1.0, "is 2 s long; at most 1 s"),
        ("MOST_PIXELS", 1000, "has frames of 64 x 48 pixels; at most 1000"),
    ],
)
def test_limits_are_named(name: str, value: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = clips.file()
    monkeypatch.setattr(videos, name, value)
    with pytest.raises(ImageRefused, match=complaint):
        open_video([data], False, None)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clips.file()
    usual = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return usual(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImageRefused, match=r"install tokenyard\[video\]"):
        open_video([data], False, None)
    assert open_video([clips.animation()], False, None).clip.count == 6
