"""The long forms: `python -m tests.chaos kills|fuzz|pictures|texts|adapters|vanish|slow|overload|unfair|soak|all`.

They start servers of a tiny model of their own (or of `--model`; texts always have a tiny encoder), so they need
nothing but a few free minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.chaos import adapters, killing, load, pictures, texts
from tests.system.served_model import make_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("forms", nargs="*", default=["kills"], help=", ".join([*FORMS, "all"]))
    parser.add_argument("--minutes", type=float, default=10.0, help="of kills, overload, unfair load and soak (10)")
    parser.add_argument("--kills", type=int, default=200, help="at most so many (200)")
    parser.add_argument("--dtype", default="float32", help="of kills: in bfloat16 equal streams are a share (float32)")
    parser.add_argument("--frames", type=int, default=100_000, help="of the fuzz (100000)")
    parser.add_argument("--clients", type=int, default=1000, help="that vanish; half as many are slow readers (1000)")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of what is random (random)")
    parser.add_argument("--model", type=Path, default=None, help="folder of a model (default: a tiny one is made)")
    parser.add_argument("--report", type=Path, default=None, help="write the figures there, as JSON")
    options = parser.parse_args()
    forms = list(FORMS) if "all" in options.forms else options.forms
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        parser.error(f"unknown form {unknown[0]!r}; the forms are {', '.join(FORMS)}, all")
    figures: dict[str, object] = {"seed": options.seed}
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        options.folder = Path(folder)
        options.model = options.model or make_model(options.folder / "model")
        options.random = random.Random(options.seed)
        for form in forms:
            print(f"== {form}", flush=True)
            try:
                figures[form] = FORMS[form](options)
            except Exception:
                for log in options.folder.glob("*.log"):
                    print(f"the end of {log.name}:", *log.read_text().splitlines()[-40:], sep="\n", flush=True)
                raise
            print(json.dumps(figures[form], indent=2), flush=True)
    if options.report is not None:
        options.report.write_text(json.dumps(figures, indent=2))
    return 0 if all(not isinstance(found, dict) or found.get("passed", True) for found in figures.values()) else 1


FORMS: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
    "kills": killing.kills,
    "fuzz": killing.fuzz,
    "pictures": pictures.pictures,
    "texts": texts.texts,
    "adapters": adapters.adapters,
    "vanish": load.vanish,
    "slow": load.slow,
    "overload": load.overload,
    "unfair": load.unfair,
    "soak": load.soak,
}

if __name__ == "__main__":
    sys.exit(main())
