"""A folder of case scripts is judged by what each script says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cases


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", "right"),
        ("raise SystemExit(1)", "wrong"),
        ("raise SystemExit(3)", "exit 3"),
        ("while True: pass", "too long"),
    ],
)
def test_a_case_is_what_its_exit_status_says(tmp_path: Path, text: str, result: str) -> None:
    assert cases.run_case(write(tmp_path, "c01_x.py", text), [], 1.0).result == result


@pytest.mark.slow
def test_a_case_that_is_too_long_may_end_what_it_started(tmp_path: Path) -> None:
    text = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("ended"), sys.exit(1)))
time.sleep(60)
"""
    outcome = cases.run_case(write(tmp_path, "c01_x.py", text), [], 2.0)
    assert (outcome.result, outcome.output) == ("too long", "ended\n")


def test_operators_get_the_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "lib.py", "raise SystemExit('a helper is no case')")
    write(tmp_path, "c01_right.py", f"import sys; sys.exit(sys.argv[1:] != [{str(cases.CHECKOUT)!r}])")
    assert cases.main([str(tmp_path)]) == 0
    write(tmp_path, "c02_wrong.py", "print('because'); raise SystemExit(1)")
    assert cases.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "| because" in printed
    assert printed.endswith("1 of 2 cases are right\n")
    assert cases.main([str(tmp_path), "--only", "c01"]) == 0


def test_no_case_at_all_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.main([str(tmp_path)]) == 1
    assert cases.main([str(tmp_path / "none")]) == 2
    assert "CASES=DIR" in capsys.readouterr().err


def test_clients_get_the_server_and_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is another program here: which arguments reach the script is what counts."""
    script = "import sys; sys.exit(sys.argv[1:] != ['http://127.0.0.1:1', 'a-model'])"
    write(tmp_path, "01_right.py", script)

    class Served:
        def __enter__(self) -> list[str]:
            return ["http://127.0.0.1:1", "a-model"]

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(cases, "_served", lambda model: Served())
    assert cases.main([str(tmp_path)]) == 0
