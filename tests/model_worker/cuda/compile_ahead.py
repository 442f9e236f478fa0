"""`python -m tests.model_worker.cuda.compile_ahead [--few] TARGET...`: compiles the kernels for absent GPUs.

Prints a line of JSON for each: its target, its kernel, and the shared memory that a program takes. A target is sm_80 or
the like, or gfx942 or the like. With `--few` only what is served most.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_worker.attention.triton import PIECE, _shape
from model_worker.cuda import (
    adapter_kernel,
    edge_kernel,
    extremes_kernel,
    fill_kernel,
    finish_kernel,
    fp8_block_kernel,
    fp8_kernel,
    gate_kernel,
    grouped_experts_kernel,
    grouped_kernel,
    kv_write_kernel,
    norm_kernel,
    paged_attention,
    pick_kernel,
    product_tiles,
    rotary_kernel,
)
from model_worker.cuda.grouped_linear import OFFSETS, TABLE, ZEROS
from model_worker.sampling import draw_triton

POINTERS = {
    "block_tables": "*i32",
    "query_start": "*i32",
    "kv_len": "*i32",
    "maximum": "*fp32",
    "total": "*fp32",
    "part": "*fp32",
    "sinks": "*fp32",
    **dict.fromkeys(("tops", "row_tops", "edges", "scratch", "changed"), "*fp32"),
    **dict.fromkeys(("firsts", "ties", "masks", "reports", "arrived"), "*i32"),
    **dict.fromkeys(("masses", "kept_masses"), "*fp64"),
    "lists": "*i64",
    **dict.fromkeys(("records", "picked", "tokens", "slots"), "*i64"),
    "scores": "*fp64",
    **dict.fromkeys(("positions", "owners", "last_tokens", "logit_positions"), "*i64"),
    **dict.fromkeys(("tokens_to", "positions_to", "slots_to", "logit_positions_to"), "*i64"),
    **dict.fromkeys(("tables", "tables_to", "kv_len_to", "query_start_to"), "*i32"),
    "counts": "*i32",
    "order": "*i32",
    **dict.fromkeys(("pairs", "experts", "firsts", "ends"), "*i64"),
    "epsilon": "fp32",
    "scale": "fp32",
    "softcap": "fp32",
    **dict.fromkeys(("codes", "a_codes", "b_codes"), "*fp8e4nv"),
    **dict.fromkeys(("scales", "a_scales", "b_scales"), "*fp32"),
}
OF_ADAPTERS = ("shrink", "shrink many rows", "expand", "gather")
# Products with weights of four bits: each tile, other forms of these, and each tile of experts.
EXPERT_ROWS = (16, 32, 64)
# The table of MXFP4: the numbers of its codes, doubled.
E2M1 = int.from_bytes(
    bytes(number & 255 for number in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)), "little"
)
INT4_TILES = tuple(f"{size} in four bits" for size in ("few", "some", "more", "many"))
INT4_EXPERTS = tuple(f"experts in four bits, {rows} rows" for rows in EXPERT_ROWS)
IN_ONE_PIECE, FLOAT32_SCALES, FLOAT16 = "more in one piece", "some with float32 scales", "few in float16"
OF_TABLES = ("few with a table", "experts with a table, 16 rows")
INT8_TILES = ("few in eight bits", "many in eight bits")
OF_INT4 = (*INT4_TILES, *INT8_TILES, IN_ONE_PIECE, FLOAT32_SCALES, FLOAT16, *OF_TABLES, *INT4_EXPERTS)
# Only cards with products of these numbers round to them.
FP8_TILES = ("few in blocks", "some in blocks", "many in blocks")
FP8_EXPERTS = tuple(f"experts in FP8, {rows} rows" for rows in EXPERT_ROWS)
FP8_OUTPUTS = "experts in FP8 with a scale for an output"
OF_FP8 = ("round", "round groups", *FP8_TILES, *FP8_EXPERTS, FP8_OUTPUTS)
FP8_TARGETS = ("sm_89", "sm_90")


# Tensors of the model's dtype.
OF_THE_MODEL = (
    *("q", "k", "v", "k_cache", "v_cache", "out", "x", "gate", "up", "logits"),
    *("weight", "inner", "residual", "rows", "cos", "sin", "q_weight", "k_weight", "bias"),
)
FEW = (
    *("decode 4x128/128 bf16", "prompt 4x128/128 bf16"),
    *("extremes", "plain extremes", "edge", "pick", "finish and report", "finish"),
    *("add and norm", "rotary", "gate", *OF_FP8, *OF_INT4, *OF_ADAPTERS),
)


# Numbers that a launcher is free to specialise, and that are no multiples of 16.
ODD = ("pieces", "steps_of_piece", "spare_block", "spare_slot")
MULTIPLE = ("tt.divisibility", 16)


class Case(NamedTuple):
    """A kernel as it is launched: the type of q, K and V, what its launch says of warps and stages, and other types."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    dtype: str
    options: dict[str, int] | None = None
    types: dict[str, str] | None = None


def kernels() -> Iterator[Case]:
    """Yield what is compiled."""
    for group, k_dim, v_dim, dtype in ((4, 128, 128, "bf16"), (16, 576, 512, "bf16"), (8, 256, 256, "fp32")):
        shape = _shape(group, k_dim, v_dim, 4 if dtype == "fp32" else 2)
        rich = dtype == "bf16" and k_dim == 128
        constants = {
            **shape.constants,
            "HEADS": shape.heads,
            "GROUP": group,
            "TILE": shape.tile,
            "PAGE": 16,
            "WINDOW": 512 if rich else 0,
            "SOFTCAP": rich,
            "SINKS": rich,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        }
        name = f"{group}x{k_dim}/{v_dim} {dtype}"
        one = {"ROWS": max(16, triton.next_power_of_2(shape.heads)), "PIECE": PIECE, "SPLIT": True}
        yield Case(f"decode {name}", paged_attention.decode_kernel, {**constants, **one}, dtype)
        yield Case(f"prompt {name}", paged_attention.prompt_kernel, {**constants, "ROWS": shape.prompt_rows}, dtype)
    merged = {"PIECE": PIECE, "V_DIM": 128, "V_WIDE": 128, "WINDOW": 512}
    yield Case("merge", paged_attention.merge_kernel, merged, "bf16")
    sizes = {"PAGE": 16, "K_DIM": 128, "V_DIM": 128, "K_WIDE": 128, "V_WIDE": 128}
    yield Case("write", kv_write_kernel.write_kernel, sizes, "bf16")
    yield Case("extremes", extremes_kernel.extremes_kernel, {"COPY": True, "BLOCK": 1024, "BLOCKS": 8}, "bf16")
    plain = {"COPY": False, "BLOCK": 1024, "BLOCKS": 8}
    yield Case("plain extremes", extremes_kernel.extremes_kernel, plain, "bf16")
    tiles = {"TILE": 1024, "TILES": 256}
    yield Case(
        "edge",
        edge_kernel.edge_kernel,
        {**tiles, "BLOCK": 4096, "ROOM": 4096},
        "bf16",
        {"num_warps": draw_triton._EDGE_WARPS},
    )
    yield Case("pick", pick_kernel.pick_kernel, {"BLOCK": 1024, "BLOCKS": 8}, "bf16")
    reporting = {"num_warps": draw_triton._REPORT_WARPS}
    last = {"TILES": 256, "PARTS": 32, "BLOCK": 1024}
    yield Case("finish and report", finish_kernel.finish_kernel, {**last, "REPORTS": True}, "bf16", reporting)
    yield Case("finish", finish_kernel.finish_kernel, {**last, "REPORTS": False}, "bf16", {"num_warps": 1})
    yield Case("norm", norm_kernel.norm_kernel, {"WIDTH": 1024, "WIDE": 1024, "FORM": 0}, "bf16")
    norms = {"WIDTH": 1024, "WIDE": 1024, "FORM": 0, "INNER": True}
    yield Case("add and norm", norm_kernel.add_norm_kernel, norms, "bf16")
    heads = {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": 48, "HALF_WIDE": 64, "REST_WIDE": 32, "NORM": True, "FORM": 2}
    both = {"PAGE": 16, "K_DIM": 128, "V_DIM": 128, "V_WIDE": 128}
    yield Case("rotary", rotary_kernel.rotary_kernel, {**heads, **both}, "bf16", {"num_warps": 1})
    yield Case("fill decode", fill_kernel.fill_decode_kernel, {"BLOCK": 256}, "bf16")
    yield Case("fill mixed", fill_kernel.fill_mixed_kernel, {"BLOCK": 256}, "bf16")
    yield Case("gate", gate_kernel.gate_kernel, {"BLOCK": 1024, "ACTIVATION": 0}, "bf16")
    rounding = {"LARGEST": 448.0, "LEAST_SCALE": 1e-12}
    yield Case("round", fp8_kernel.round_kernel, {**rounding, "BLOCK": 1024}, "bf16")
    yield Case("round groups", fp8_block_kernel.round_groups_kernel, {**rounding, "SIDE": 128, "GROUPS": 8}, "bf16")
    for name, (_, rows, columns, warps, stages) in zip(FP8_TILES, fp8_block_kernel.TILES, strict=True):
        tile = {"ROWS": rows, "COLUMNS": columns, "SIDE": 128, "TOGETHER": 8, "BIASED": True}
        options = {"num_warps": warps, "num_stages": stages}
        yield Case(name, fp8_block_kernel.block_product_kernel, tile, "bf16", options)
    yield from four_bits()
    yield from adapters()
    for name, rows in zip(FP8_EXPERTS, EXPERT_ROWS, strict=True):
        yield _fp8_experts(name, rows, True)
    yield _fp8_experts(FP8_OUTPUTS, 16, False)


def adapters() -> Iterator[Case]:
    """Yield what adapters add to rows: a step of few of them, and one of many."""
    tile = {"FIELDS": adapter_kernel.FIELDS, "TILE": adapter_kernel._TILE, "RANKS": adapter_kernel.RANKS}
    inputs = {"INPUTS": adapter_kernel._INPUTS, "PIECE": 1024}
    few, many, expand, gather = OF_ADAPTERS
    yield Case(few, adapter_kernel.shrink_kernel, {**tile, **inputs, "TOGETHER": False}, "bf16")
    yield Case(many, adapter_kernel.shrink_kernel, {**tile, **inputs, "TOGETHER": True}, "bf16")
    yield Case(expand, adapter_kernel.expand_kernel, {**tile, "OUTPUTS": adapter_kernel._OUTPUTS}, "bf16")
    del tile["TILE"]
    yield Case(gather, adapter_kernel.gather_kernel, tile, "bf16")


def four_bits() -> Iterator[Case]:
    """Yield products with weights of four and eight bits, of all kinds of zeros by turns."""
    more, some, few = (product_tiles.TILES[place] for place in (2, 1, 0))
    for kind, (name, tile) in enumerate(zip(INT4_TILES, product_tiles.TILES, strict=True)):
        yield _in_groups(name, tile, kind % 3)
    for name, tile in zip(INT8_TILES, (few, product_tiles.TILES[-1]), strict=True):
        yield _in_groups(name, tile, ZEROS, types={"zeros": "*i16"}, bits=8)
    yield _in_groups(IN_ONE_PIECE, more._replace(is_split=False), OFFSETS)
    yield _in_groups(FLOAT32_SCALES, some, OFFSETS, types=dict.fromkeys(("scales", "zeros"), "*fp32"))
    yield _in_groups(FLOAT16, few, ZEROS, "fp16")
    yield _in_groups(OF_TABLES[0], few, TABLE, types={"scales": "*u8"})
    yield _grouped_experts(OF_TABLES[1], 16, TABLE)
    for name, rows, kind in zip(INT4_EXPERTS, EXPERT_ROWS, (ZEROS, TABLE, TABLE), strict=True):
        yield _grouped_experts(name, rows, kind)


def _in_groups(
    name: str,
    tile: product_tiles.Tile,
    kind: int,
    dtype: str = "bf16",
    types: dict[str, str] | None = None,
    bits: int = 4,
) -> Case:
    step = 32 if kind in (ZEROS, TABLE) and bits == 4 else 128
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "STEP": step, "PER_GROUP": 1, "BITS": bits}
    table = E2M1 if kind == TABLE else 0
    flags = {"TOGETHER": 8, "BIASED": True, "SPLIT": tile.is_split, "KIND": kind, "MIDDLE": 8, "TABLE": table}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Case(name, grouped_kernel.grouped_kernel, {**sizes, **flags}, dtype, options, types)


def _grouped_experts(name: str, rows: int, kind: int) -> Case:
    has_table = kind == TABLE
    sizes = {"ROWS": rows, "COLUMNS": 64, "STEP": 32 if has_table else 128, "PER_GROUP": 1, "BITS": 4}
    table = E2M1 if has_table else 0
    codes = {"BIASED": True, "ORDERED": kind == ZEROS, "KIND": kind, "MIDDLE": 0, "TABLE": table}
    kernel = grouped_experts_kernel.grouped_experts_kernel
    powers = {"scales": "*u8"} if has_table else None
    return Case(name, kernel, {**sizes, **codes}, "bf16", {"num_warps": 4, "num_stages": 4}, powers)


def _fp8_experts(name: str, rows: int, blocked: bool) -> Case:
    _, _, columns, warps, stages = next(tile for tile in fp8_block_kernel.TILES if rows <= tile[1])
    constants = {"ROWS": rows, "COLUMNS": columns, "SIDE": 128, "BLOCKED": blocked, "BIASED": blocked}
    options = {"num_warps": warps, "num_stages": stages}
    return Case(name, fp8_block_kernel.block_experts_kernel, constants, "bf16", options)


def attributes(kernel: Any, signature: dict[str, str]) -> dict[tuple[int, ...], list[Any]]:
    """Return what a launcher says of arguments: memory and sizes begin at, and are, multiples of 16."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for place, parameter in enumerate(kernel.params):
        kind = signature[parameter.name]
        is_size = kind == "i32" and not parameter.do_not_specialize and parameter.name not in ODD
        if kind.startswith("*") or is_size:
            found[place,] = [list(MULTIPLE)]
    return found


def main(arguments: list[str]) -> None:
    few = "--few" in arguments
    for name in arguments:
        if name == "--few":
            continue
        amd = name.startswith("gfx")
        target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        for kind, kernel, constants, dtype, options, other_types in kernels():
            if (few and kind not in FEW) or (kind in OF_FP8 and name not in FP8_TARGETS):
                continue
            types = {
                **POINTERS,
                **dict.fromkeys(OF_THE_MODEL, f"*{dtype}"),
            }
            if kind in OF_INT4:
                zeros = "*i8" if constants["KIND"] == ZEROS else "*fp16"
                types |= {"codes": "*u8", "scales": "*fp16", "zeros": zeros, "parts": "*fp32", "arrived": "*i32"}
            if kind in OF_ADAPTERS:
                types |= {
                    "inner": "*fp32",
                    "y": "*bf16",
                    "rows": "i32",
                    "base": f"*{dtype}",
                    "table": "*i64",
                    "column": "*i32",
                }
            types |= other_types or {}
            signature = {
                argument: "constexpr" if argument in constants else types.get(argument, "i32")
                for argument in kernel.arg_names
            }
            source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes(kernel, signature))
            made = triton.compile(source, target=target, options=options)
            print(json.dumps({"target": name, "kernel": kind, "shared": made.metadata.shared}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
