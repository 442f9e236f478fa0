"""llama.cpp's converter, told which pre-tokenizer the standard models have: it knows only published tokenizers.

Usage: gguf_conversion.py LLAMA_CPP_SOURCES MODEL OUT TYPE [further flags of the converter, such as --mmproj]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

PRE_TOKENIZER = "gpt-2"


def main() -> None:
    sources, model, out, weights = Path(sys.argv[1]), *sys.argv[2:5]
    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    for kind in _model_kinds(converter):
        kind.get_vocab_base_pre = lambda self, tokenizer: PRE_TOKENIZER
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", weights, *sys.argv[5:]]
    converter.main()


def _model_kinds(converter: Any) -> list[Any]:
    """The classes that ask for the pre-tokenizer; newer sources keep them in a package beside the script."""
    modules = [converter]
    if (Path(converter.__file__).parent / "conversion").is_dir():
        modules.append(importlib.import_module("conversion.base"))
    kinds = [getattr(module, name, None) for module in modules for name in ("ModelBase", "TextModel")]
    return [kind for kind in kinds if kind is not None and "get_vocab_base_pre" in vars(kind)]


if __name__ == "__main__":
    main()
