"""Images in the terminal: escape sequences that are read back to pixels, and `tokenyard chat` with a painter."""

from __future__ import annotations

import base64
import http.server
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from deploy.terminal_images import protocol, shown


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


NOISE = np.random.default_rng(1).integers(0, 256, (60, 50, 3), np.uint8)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"TERM": "xterm-kitty"}, "kitty"),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, "kitty"),
        ({"TERM": "xterm-ghostty"}, "kitty"),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, "iterm"),
        ({"TERM": "foot"}, "sixel"),
        ({"TERM": "xterm-256color"}, None),
        ({}, None),
        ({"TERM": "screen-256color", "TERM_PROGRAM": "iTerm.app"}, None),
        ({"TERM": "xterm-kitty", "TMUX": "/tmp/tmux"}, None),
    ],
)
def test_the_environment_says_what_the_terminal_can(environment: dict[str, str], found: str | None) -> None:
    assert protocol(environment) == found


def test_kitty_gets_the_file_in_pieces() -> None:
    pieces = re.findall(r"\033_G([^;]*);([^\033]*)\033\\", shown(png(NOISE), "kitty"))
    assert [options for options, _ in pieces] == ["a=T,f=100,m=1", *["m=1"] * (len(pieces) - 2), "m=0"]
    assert max(len(text) for _, text in pieces) <= 4096
    assert base64.b64decode("".join(text for _, text in pieces)) == png(NOISE)


def test_iterm_gets_the_file_whole() -> None:
    found = re.fullmatch(r"\033\]1337;File=inline=1;size=(\d+):(.*)\a", shown(png(NOISE), "iterm"))
    assert found is not None
    assert (int(found[1]), base64.b64decode(found[2])) == (len(png(NOISE)), png(NOISE))


def drawn(text: str) -> NDArray[np.uint8]:
    """The pixels that a sixel terminal draws."""
    found = re.fullmatch(r'\033Pq"1;1;(\d+);(\d+)((?:#\d+;2;\d+;\d+;\d+)+)(.*)\033\\', text)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    palette = {int(n): [int(c) for c in rgb] for n, *rgb in re.findall(r"#(\d+);2;(\d+);(\d+);(\d+)", found[3])}
    pixels = np.zeros((height + 6, width, 3), np.uint8)
    for row, line in enumerate(found[4].split("-")):
        for colour, cells in re.findall(r"#(\d+)([^#$]*)\$", line):
            runs = re.findall(r"(?:!(\d+))?([?-~])", cells)
            bits = [ord(cell) - 63 for count, cell in runs for _ in range(int(count or 1))]
            assert len(bits) == width
            for column, mask in enumerate(bits):
                for bit in range(6):
                    if mask >> bit & 1:
                        pixels[row * 6 + bit, column] = palette[int(colour)]
    return pixels[:height]


def test_sixels_are_the_pixels() -> None:
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]], np.uint8)
    pixels = colours[np.random.default_rng(2).integers(0, 4, (15, 22))]
    np.testing.assert_array_equal(drawn(shown(png(pixels), "sixel")), (pixels.astype(int) * 100 // 255))


class Painter(http.server.BaseHTTPRequestHandler):
    """A server whose only model paints noise; it refuses `refuse`."""

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "brush", "task": "paint"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/images/generations"
        assert body["model"] == "brush"
        if body["prompt"] == "refuse":
            self._send(400, {"error": {"message": "the prompt is too long"}})
        else:
            self._send(200, {"data": [{"b64_json": base64.b64encode(png(NOISE)).decode(), "seed": 7}]})

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Painter)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_saves_what_a_painter_paints(url: str, tmp_path: Path) -> None:
    lines = "A red train!\nrefuse\na red, train\n/nonsense\n/exit\n"
    command = [sys.executable, "-m", "deploy.cli", "chat", "--url", url]
    done = subprocess.run(command, input=lines, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"brush at {url}; describe an image")
    assert "a-red-train.png (seed 7)" in done.stdout
    assert "(400 Bad Request: the prompt is too long)" in done.stdout
    assert "(no such command" in done.stdout
    assert "\033" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-red-train-2.png", "a-red-train.png"]
    assert (tmp_path / "a-red-train.png").read_bytes() == png(NOISE)
