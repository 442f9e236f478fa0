"""The constants of the GGUF format: types of tensors and of metadata, and the error for a file that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Tensors begin at multiples of this, unless general.alignment says otherwise.
ALIGNMENT = 32
MOST_DIMENSIONS = 4


class GgufError(ValueError):
    """A GGUF file that cannot be used. The message names the file, the field, the value and the remedy.

    It is one line, whatever names the file has.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in message))


class BlockType(NamedTuple):
    """How a tensor's values are stored: `inputs` neighbouring values of a row take `num_bytes`."""

    name: str
    inputs: int
    num_bytes: int

    def row_bytes(self, inputs: int) -> int:
        """Return the bytes of a row of so many values, a multiple of a block's."""
        return inputs // self.inputs * self.num_bytes


# The types that are decoded here, by their number in the file.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}

# Those that the package `gguf` decodes where it is installed: too rare, or of too few bits, for a decoder of our own.
PACKAGE_TYPES = {
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    40: BlockType("NVFP4", 64, 36),
}

# The names of the others.
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}

# Numbers of metadata types, and numpy's types of those with a fixed size.
STRING = 8
ARRAY = 9
BOOL = 7
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


def damaged(path: str, what: str) -> GgufError:
    """Return the error for a file whose parts do not fit together."""
    return GgufError(f"{path}: {what}; the file is damaged or was not copied to the end: get it again")


def is_gguf(source: str | Path) -> bool:
    """Whether a model's name is that of a GGUF file. A folder may be called so, too, and is none."""
    return str(source).endswith(SUFFIX) and not Path(source).expanduser().is_dir()
