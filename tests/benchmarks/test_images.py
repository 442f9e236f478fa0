"""The benchmark of pictures, on a tiny model: its works run, and one picture is encoded once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import images
from benchmarks.images import Stream, _gaps, chosen, picture
from tests.system.server import Server
from tests.system.test_images import FLAGS, made


def test_the_works_run_on_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = made("llava", tmp_path / "tiny-llava")
    with Server(tiny.path, FLAGS, tmp_path / "log") as server:
        assert images.main(["--url", server.url, "--short", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert list(found) == ["V1", "V2", "V3"]
        assert found["V1"]["tokens a second"] > 0
        assert found["V1"]["pictures encoded"] == 4
        assert found["V2"]["pictures encoded"] == 1, "one picture, asked about four times"
        assert found["V3"]["p99 gap beside, ms"] > 0
        assert images.main(["--url", server.url, "--model", "another"]) == 1
        assert "another" in capsys.readouterr().err


def test_gaps_are_those_of_a_time() -> None:
    stream = Stream(0.0, [1.0, 2.0, 3.0, 5.0, 9.0])
    assert _gaps([stream], 0.0, 5.0) == [1.0, 2.0]
    assert _gaps([stream], 5.0, 9.0) == [4.0]


def test_pictures_are_equal_for_equal_seeds_only() -> None:
    assert picture(1, 56) == picture(1, 56) != picture(2, 56)


def test_a_work_that_is_unknown_is_refused() -> None:
    assert [work.name for work in chosen("v2,V1", False)] == ["V2", "V1"]
    with pytest.raises(ValueError, match="V1, V2, V3, got V9"):
        chosen("V9", False)
