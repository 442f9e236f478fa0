"""`interfaces` is light: it imports at once, and nothing of it pulls in what its users may not want."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import interfaces

FORBIDDEN = ("torch", "zmq", "starlette", "transformers", "uvicorn", "fastapi")
FOLDER = Path(interfaces.__file__).parent
ALLOWED = {"numpy", "msgpack", "msgpack_numpy", "msgspec", "pydantic", "pydantic_core", "interfaces"}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_importing_is_quick() -> None:
    code = "import time; t = time.process_time(); import interfaces; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_using_every_name_is_quick_enough_and_pulls_in_nothing_heavy() -> None:
    code = f"""
import sys, interfaces
for name in interfaces.__all__:
    getattr(interfaces, name)
print(sorted(set({FORBIDDEN!r}) & set(sys.modules)))
"""
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_a_module_imports_only_what_is_allowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = {(node.module or "").split(".")[0]}
        else:
            continue
        assert roots <= ALLOWED | sys.stdlib_module_names


def test_names_are_loaded_when_they_are_used() -> None:
    code = """
import sys, interfaces
before = 'interfaces.pipelines.open_responses' in sys.modules
interfaces.OpenResponsesRequest
print(before, 'interfaces.pipelines.open_responses' in sys.modules)
"""
    assert run(code).split() == ["False", "True"]
    assert set(interfaces.__all__) <= set(dir(interfaces))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = interfaces.Nothing  # type: ignore[attr-defined]
