"""The model card of the embedded model, written beside its weights.

Knows how to say what was measured. Does not measure (see `evaluate`).
"""

import datetime
import platform
from pathlib import Path

import torch
import transformers

from demo_model.decoder import text_model
from demo_model.evaluate import Score

_CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The tokenyard demo model

A very small chat model (Llama architecture, {parameters:.2f} million parameters,
byte-level BPE of {vocabulary} tokens, bfloat16) that ships with
tokenyard, so that chat, tools, JSON,
reasoning and streaming can be tried with no network. It knows only what its own script taught it.

## What it can do

Greetings and small talk; questions about tokenyard; capitals of thirty countries; sums and differences of 0 to 50,
tables up to 10; lists and counting; repeating and reversing words; JSON; calling the tools it is given and
using their results; short stories; remembering what was said. With `enable_thinking=True` in the chat template it
writes `<think>...</think>` before the answer. It speaks simple English only, and everything else gets "I do not know".
Do not use it for anything that matters.

Tools that it has met: `get_weather`, `get_current_weather`, `calculator`, `search`, `get_time`, and any number of
others named like `verb_noun`, with up to two arguments. Two in a hundred words of its training were made up, so it
copies the words it knows better than new ones.

## How it was made

`python -m demo_model.train` ({run}), on two CPU cores. Every training text was made by the scripts in
`demo_model/skills/`; no data was downloaded. Only the model's own turns were learned.

## Accuracy on held-out prompts

One exchange in sixteen is held out by a hash of what makes it different: the operands of a sum (in either order),
the values of a JSON
object, the name of a made-up tool, the name or fact to remember,
or the wording of the prompt where the answer can only be known by heart
(facts, tables, small talk). Held-out exchanges never enter the training text. Greedy decoding, bfloat16.

{table}

Measured {date} with `python -m demo_model.evaluate` (torch {torch}, transformers {transformers},
Python {python}).
"""


def write_model_card(folder: Path, scores: dict[str, Score], run: str) -> None:
    model = text_model(folder)
    rows = [f"| {name} | {score.right} of {score.asked} | {score.share:.1%} |" for name, score in scores.items()]
    card = _CARD.format(
        parameters=model.num_parameters() / 1e6,
        vocabulary=model.config.vocab_size,
        run=run,
        table="\n".join(("| skill | right | accuracy |", "| --- | --- | --- |", *rows)),
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        python=platform.python_version(),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
