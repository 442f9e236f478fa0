"""Trains the embedded model whole: the text model first, then its eyes.

    python -m demo_model [--minutes 42] [--conversations 10000] [--pictures 300000] [--seed 7] [--output FOLDER]

A run that is interrupted (Ctrl-C, SIGTERM) saves what it has. Knows the order. Each trainer knows its own work.
"""

import argparse
from pathlib import Path

from rich.console import Console

from demo_model import train
from demo_model.eyes import train as eyes
from deploy.embedded_model import EMBEDDED_MODEL_PATH


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_model", description="Train the embedded model.")
    parser.add_argument("--minutes", type=float, default=train.MINUTES, help="wall time for training the text model")
    parser.add_argument("--conversations", type=int, default=eyes.CONVERSATIONS, help="conversations about pictures")
    parser.add_argument("--pictures", type=int, default=eyes.PICTURES, help="pictures that are looked at")
    parser.add_argument("--seed", type=int, default=7, help="seed of all that is drawn")
    parser.add_argument("--output", type=Path, default=EMBEDDED_MODEL_PATH, help="folder for the model")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    given = parser.parse_args()
    console = Console()
    text = train.Options(given.minutes, given.seed, given.output, given.threads, start_from=None)
    if not train.train(text, console):
        console.log("interrupted: the model has no eyes; python -m demo_model.eyes.train gives it some")
        return
    eyes.train(
        eyes.Options(
            conversations=given.conversations,
            pictures=given.pictures,
            seed=given.seed,
            decoder=given.output,
            output=given.output,
            threads=given.threads,
            questions=eyes.QUESTIONS,
        ),
        console,
    )


if __name__ == "__main__":
    main()
