"""`python -m tests.model_worker.cuda.compile_ahead [--few] TARGET...`: compiles the kernels for absent GPUs.

Prints a line of JSON for each: its target, its kernel, and the shared memory that a program takes. A target is sm_80 or
the like, or gfx942 or the like. With `--few` only what is served most.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

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
    int4_kernel,
    kv_write_kernel,
    norm_kernel,
    paged_attention,
    pick_kernel,
    rotary_kernel,
)
from model_worker.cuda.int4_linear import ZEROS

POINTERS = {
    "block_tables": "*i32",
    "query_start": "*i32",
    "kv_len": "*i32",
    "maximum": "*fp32",
    "total": "*fp32",
    "part": "*fp32",
    "sinks": "*fp32",
    **dict.fromkeys(("tops", "row_tops", "edges", "scratch", "changed"), "*fp32"),
    **dict.fromkeys(("firsts", "ties", "masks", "reports"), "*i32"),
    **dict.fromkeys(("masses", "kept_masses"), "*fp64"),
    "lists": "*i64",
    **dict.fromkeys(("records", "picked", "tokens", "slots"), "*i64"),
    "scores": "*fp64",
    **dict.fromkeys(("positions", "owners", "last_tokens", "logit_positions"), "*i64"),
    **dict.fromkeys(("tokens_to", "positions_to", "slots_to", "logit_positions_to"), "*i64"),
    **dict.fromkeys(("tables", "tables_to", "kv_len_to", "query_start_to"), "*i32"),
    "counts": "*i32",
    **dict.fromkeys(("pairs", "experts", "firsts", "ends"), "*i64"),
    "epsilon": "fp32",
    "scale": "fp32",
    "softcap": "fp32",
    **dict.fromkeys(("codes", "a_codes", "b_codes"), "*fp8e4nv"),
    **dict.fromkeys(("scales", "a_scales", "b_scales"), "*fp32"),
}
OF_ADAPTERS = ("shrink", "expand")
# Products with weights of four bits.
OF_INT4 = tuple(f"{size} in four bits" for size in ("few", "some", "more", "many", "experts"))
# Only cards with products of these numbers round to them.
OF_FP8 = ("round", "round groups", "few in blocks", "some in blocks", "many in blocks", "experts in FP8")
FP8_TARGETS = ("sm_89", "sm_90")


# Tensors of the model's dtype.
OF_THE_MODEL = (
    *("q", "k", "v", "k_cache", "v_cache", "out", "x", "gate", "up", "logits"),
    *("weight", "inner", "residual", "rows", "cos", "sin", "q_weight", "k_weight", "bias"),
)
FEW = (
    *("decode 4x128/128 bf16", "prompt 4x128/128 bf16"),
    *("extremes", "edge", "pick", "finish and report", "finish"),
    *("add and norm", "rotary", "gate", *OF_FP8, *OF_INT4, *OF_ADAPTERS),
)


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], str]]:
    """Yield names, kernels, constants, and the type of q, K and V."""
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
        yield f"decode {name}", paged_attention.decode_kernel, {**constants, **one}, dtype
        yield f"prompt {name}", paged_attention.prompt_kernel, {**constants, "ROWS": shape.prompt_rows}, dtype
    merged = {"PIECE": PIECE, "V_DIM": 128, "V_WIDE": 128, "WINDOW": 512}
    yield "merge", paged_attention.merge_kernel, merged, "bf16"
    sizes = {"PAGE": 16, "K_DIM": 128, "V_DIM": 128, "K_WIDE": 128, "V_WIDE": 128}
    yield "write", kv_write_kernel.write_kernel, sizes, "bf16"
    yield "extremes", extremes_kernel.extremes_kernel, {"COPY": True, "BLOCK": 1024, "BLOCKS": 8}, "bf16"
    tiles = {"TILE": 1024, "TILES": 256}
    yield "edge", edge_kernel.edge_kernel, {**tiles, "BLOCK": 4096, "ROOM": 4096}, "bf16"
    yield "pick", pick_kernel.pick_kernel, {"BLOCK": 1024, "BLOCKS": 8}, "bf16"
    last = {"TILES": 256, "PARTS": 32, "BLOCK": 1024}
    yield "finish and report", finish_kernel.finish_kernel, {**last, "REPORTS": True}, "bf16"
    yield "finish", finish_kernel.finish_kernel, {**last, "REPORTS": False}, "bf16"
    yield "norm", norm_kernel.norm_kernel, {"WIDTH": 1024, "WIDE": 1024, "FORM": 0}, "bf16"
    norms = {"WIDTH": 1024, "WIDE": 1024, "FORM": 0, "INNER": True}
    yield "add and norm", norm_kernel.add_norm_kernel, norms, "bf16"
    heads = {"Q_HEADS": 32, "KV_HEADS": 8, "HALF": 48, "HALF_WIDE": 64, "REST_WIDE": 32, "NORM": True, "FORM": 2}
    both = {"PAGE": 16, "K_DIM": 128, "V_DIM": 128, "V_WIDE": 128}
    yield "rotary", rotary_kernel.rotary_kernel, {**heads, **both}, "bf16"
    yield "fill decode", fill_kernel.fill_decode_kernel, {"BLOCK": 256}, "bf16"
    yield "fill mixed", fill_kernel.fill_mixed_kernel, {"BLOCK": 256}, "bf16"
    yield "gate", gate_kernel.gate_kernel, {"BLOCK": 1024, "ACTIVATION": 0}, "bf16"
    rounding = {"LARGEST": 448.0, "LEAST_SCALE": 1e-12}
    yield "round", fp8_kernel.round_kernel, {**rounding, "BLOCK": 1024}, "bf16"
    yield "round groups", fp8_block_kernel.round_groups_kernel, {**rounding, "SIDE": 128, "GROUPS": 8}, "bf16"
    for name, (_, rows, columns, _, _) in zip(OF_FP8[2:-1], fp8_block_kernel.TILES, strict=True):
        tile = {"ROWS": rows, "COLUMNS": columns, "SIDE": 128, "TOGETHER": 8, "BIASED": True}
        yield name, fp8_block_kernel.block_product_kernel, tile, "bf16"
    for kind, (name, (_, rows, columns, _, _, split)) in enumerate(zip(OF_INT4[:-1], int4_kernel.TILES, strict=True)):
        tile = {"ROWS": rows, "COLUMNS": columns, "STEP": 32 if kind == 1 else 128, "PER_GROUP": 1, "TOGETHER": 8}
        flags = {"BIASED": True, "SPLIT": split, "KIND": kind % 3, "MIDDLE": 8}
        yield name, int4_kernel.int4_kernel, {**tile, **flags}, "bf16"
    ranks = {"FIELDS": adapter_kernel.FIELDS, "MOST_RANK": adapter_kernel.MOST_RANK, "RANKS": 16}
    yield OF_ADAPTERS[0], adapter_kernel.shrink_kernel, {**ranks, "INPUTS": 256}, "bf16"
    yield OF_ADAPTERS[1], adapter_kernel.expand_kernel, {**ranks, "OUTPUTS": 128}, "bf16"
    of_expert = {"ROWS": 16, "COLUMNS": 64}
    experts = {**of_expert, "SIDE": 128, "BLOCKED": True}
    yield OF_FP8[-1], fp8_block_kernel.block_experts_kernel, experts, "bf16"
    codes = {**of_expert, "STEP": 128, "PER_GROUP": 1, "KIND": ZEROS, "MIDDLE": 0}
    yield OF_INT4[-1], int4_kernel.int4_experts_kernel, codes, "bf16"


def main(arguments: list[str]) -> None:
    few = "--few" in arguments
    for name in arguments:
        if name == "--few":
            continue
        amd = name.startswith("gfx")
        target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        for kind, kernel, constants, dtype in kernels():
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
                types |= {"inner": "*fp32", "y": "*bf16", "table": "*i64", "column": "*i32"}
            signature = {
                argument: "constexpr" if argument in constants else types.get(argument, "i32")
                for argument in kernel.arg_names
            }
            source = ASTSource(kernel, signature, constexprs=constants)
            made = triton.compile(source, target=target)
            print(json.dumps({"target": name, "kernel": kind, "shared": made.metadata.shared}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
