"""Kernels as they are compiled elsewhere, and with every index checked. Last in this folder: others run meanwhile."""

from __future__ import annotations

import pytest

from tests.model_worker.apart import RUNS, SECONDS_TO_COMPILE, Apart

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_COMPILE + 30)]


@pytest.mark.parametrize("apart_run", RUNS)
def test_kernels_compiled_in_another_way_pass_their_tests(apart: Apart, apart_run: str) -> None:
    failure = apart.failure(apart_run)
    assert not failure, failure
