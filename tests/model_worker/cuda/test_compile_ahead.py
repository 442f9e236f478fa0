"""The Triton kernels compile for GPUs that are not here, and take no more shared memory than a program has there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.model_worker.cuda.interpreter import FOLDER, need_triton

need_triton()

from tests.model_worker.cuda.compile_ahead import FEW  # noqa: E402

# Bytes of shared memory of a program: NVIDIA's tables of compute capabilities.
LIMITS = {"sm_90": 232_448}


@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(FOLDER)
    command = [sys.executable, "-m", "tests.model_worker.cuda.compile_ahead", "--few", *LIMITS]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert {one["target"] for one in found} == set(LIMITS)
    assert sorted(one["kernel"] for one in found) == sorted(FEW)
    for one in found:
        assert one["shared"] <= LIMITS[one["target"]], one
