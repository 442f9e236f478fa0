"""Shows image files in terminals that can: by kitty's, iTerm2's or sixel's escape sequences.

Knows environment variables and escape sequences; knows no server.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Protocol = Literal["kitty", "iterm", "sixel"]

# Most bytes of base64 in one of kitty's sequences.
_PIECE = 4096
# Colours of a sixel image, and its longest side: larger ones take seconds to draw.
_COLOURS = 64
_MOST_SIDE = 800
# Lines of pixels that one row of sixels has.
_LINES = 6


def protocol(environment: Mapping[str, str]) -> Protocol | None:
    """Return the protocol of the terminal by its environment variables; None for one that shows no images.

    A multiplexer (tmux, screen) hides the terminal, and passes none of these sequences on by itself.
    """
    terminal = environment.get("TERM", "")
    program = environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or terminal.startswith(("screen", "tmux")):
        return None
    if "KITTY_WINDOW_ID" in environment or "kitty" in terminal or program == "ghostty" or "ghostty" in terminal:
        return "kitty"
    if program in ("iTerm.app", "WezTerm", "vscode", "mintty"):
        return "iterm"
    return "sixel" if terminal.startswith(("foot", "mlterm", "contour", "yaft")) or "sixel" in terminal else None


def shown(png: bytes, how: Protocol) -> str:
    """Return what shows a PNG file when it is written to the terminal. ImportError without Pillow, for sixel."""
    match how:
        case "kitty":
            return _kitty(base64.b64encode(png).decode())
        case "iterm":
            return f"\033]1337;File=inline=1;size={len(png)}:{base64.b64encode(png).decode()}\a"
        case "sixel":
            return _sixel(png)


def _kitty(text: str) -> str:
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    last = len(pieces) - 1
    starts = ["a=T,f=100," if i == 0 else "" for i in range(len(pieces))]
    return "".join(f"\033_G{starts[i]}m={int(i < last)};{piece}\033\\" for i, piece in enumerate(pieces))


def _sixel(png: bytes) -> str:
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(png), formats=("PNG",)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((_MOST_SIDE, _MOST_SIDE))
    reduced = image.quantize(_COLOURS)
    numbers = np.asarray(reduced)
    palette = np.array(reduced.getpalette()).reshape(-1, 3) * 100 // 255
    colours = "".join(f"#{i};2;{red};{green};{blue}" for i, (red, green, blue) in enumerate(palette.tolist()))
    size = f'"1;1;{image.width};{image.height}'
    rows = ("".join(_colour_rows(numbers[top : top + _LINES])) for top in range(0, image.height, _LINES))
    return f"\033Pq{size}{colours}{'-'.join(rows)}\033\\"


def _colour_rows(lines: NDArray[np.integer[Any]]) -> Iterator[str]:
    """Yield one row of sixels for each of its colours, which are drawn over each other."""
    import numpy as np

    weights = (1 << np.arange(len(lines)))[:, None]
    for colour in np.unique(lines).tolist():
        sixels = ((lines == colour) * weights).sum(0).tolist()
        runs = ((chr(63 + bits), len(list(same))) for bits, same in groupby(sixels))
        yield f"#{colour}" + "".join(f"!{count}{sixel}" if count > 3 else sixel * count for sixel, count in runs) + "$"
