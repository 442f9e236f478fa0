"""The painting benchmark runs on its own random pipeline, and its images are diffusers'."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks.painting import main, psnr


def test_it_judges_speed_and_quality(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--images", "2", "--steps", "4", "--size", "16", "--rounds", "1", "--threads", "1"]
    assert main([*wanted, "--step-cache", "1", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["D1", "D8", "step_cache 1"]
    for name in ("D1", "D8"):
        assert figures[name]["largest difference"] < 1 / 255 / 100
        assert figures[name]["images/s"] > 0
    # The first two and the last are always computed.
    assert figures["step_cache 1"]["share of steps computed"] == 0.75


def test_a_threshold_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--step-cache", "2"]) == 1
    assert "step-cache must be a list of numbers above 0 and up to 1, got 2" in capsys.readouterr().err


def test_psnr() -> None:
    exact = np.zeros((4, 4, 3), np.float32)
    assert psnr([exact], [exact]) == math.inf
    assert psnr([exact + 0.1], [exact]) == pytest.approx(20, abs=1e-3)
