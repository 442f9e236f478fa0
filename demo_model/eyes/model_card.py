"""The part of the model card about pictures.

Knows how to say what was measured. Does not measure (see `evaluate`).
"""

import datetime
from pathlib import Path

import torch
import transformers

from demo_model.eyes.evaluate import Score
from demo_model.eyes.model import SIDE, TOKENS
from demo_model.eyes.pictures import COLOURS, MOST_BARS, SHAPES, WORDS

MODEL_CARD = "README.md"
_TITLE = "## Pictures\n"
_SECTION = """
A SigLIP tower and a projector ({parameters:.2f} million parameters, LLaVA architecture) show the decoder pictures of
{side} x {side} pixels as {tokens} tokens. The decoder's weights are those of the text model, bit for bit: the tower was
taught to give it vectors that make it answer. It reads pictures like those of `demo_model/eyes/pictures.py` only:

- one digit, large and about the middle;
- one word in small letters, as wide as the picture: {words};
- one shape ({shapes});
- a plain colour ({colours});
- a chart of 2 to {bars} bars, each of another colour.

Ask it to describe the picture, for its colour, the digit, the word or the shape, which bar is the highest, or how many
bars there are.

`python -m demo_model.eyes.train` ({run}).
Greedy answers, in bfloat16, to questions about pictures of other seeds; an answer is right if it is the expected one to
the letter:

| picture | right | accuracy |
| --- | --- | --- |
{rows}

Measured {date} with `python -m demo_model.eyes.evaluate` (torch {torch}, transformers {transformers}).
"""


def write_pictures_section(folder: Path, scores: dict[str, Score], parameters: int, run: str) -> None:
    """Put the section at the end of the model card, in place of an older one."""
    path = folder / MODEL_CARD
    card = path.read_text(encoding="utf-8").partition(_TITLE)[0].rstrip()
    card = card.replace("pipeline_tag: text-generation\n", "pipeline_tag: image-text-to-text\n")
    rows = [f"| {kind} | {score.right} of {score.asked} | {score.share:.1%} |" for kind, score in scores.items()]
    section = _SECTION.format(
        parameters=parameters / 1e6,
        side=SIDE,
        tokens=TOKENS,
        words=", ".join(WORDS),
        shapes=", ".join(SHAPES),
        colours=", ".join(COLOURS),
        bars=MOST_BARS,
        run=run,
        rows="\n".join(rows),
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )
    path.write_text(f"{card}\n\n{_TITLE}{section}", encoding="utf-8")
