"""A Triton kernel that ends a draw: a row's token from those of its parts, put where the next step finds it, and what
the row reports of it.

Knows columns; knows no requests and no batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from model_worker.cuda.draw_rows import CHANGED, GREEDY, PLACE, REPORT, SLOT, integer, largest_of_row
from model_worker.cuda.report_rows import report

# triton leaves its decorator untyped.
_jit: Any = triton.jit


@_jit(do_not_specialize=["tiles", "parts", "draws", "keeps", "counted", "most", "report_words"])
def finish_kernel(
    tokens,
    reports,
    last_tokens,
    counts,
    tops,
    firsts,
    masses,
    kept_masses,
    edges,
    ties,
    scores,
    picked,
    logits,
    changed,
    lists,
    records,
    row_stride,
    changed_stride,
    count_stride,
    width,
    tiles,
    parts,
    draws,
    keeps,
    counted,
    most,
    report_words,
    REPORTS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's token, -1 where its largest logit is not finite. Programs: row.

    It is the first of the largest logit, or of the largest score where the step `draws` and the row is not greedy.
    `keeps`: the last token of the row's place becomes it, and 0 for a bad row. `counted`: it is counted, if the row
    counts. With REPORTS a row that reports has the next `report_words` of `reports`; of a bad row these are anything.
    Rows may have their logits in `changed`.
    """
    row = tl.program_id(0)
    top, is_finite = largest_of_row(tops, row, tiles, TILES)
    tile = tl.arange(0, TILES)
    found = tl.load(tops + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    # Of a bad row some tile.
    first = tl.minimum(tl.min(tl.where(found == top, tile, TILES), 0), tiles - 1)
    token = tl.load(firsts + row * tiles + first).to(tl.int64)
    if (draws != 0) & (integer(records, row, GREEDY) == 0):
        part = tl.arange(0, PARTS)
        score = tl.load(scores + row * parts + part, mask=part < parts, other=float("-inf"))
        # The first of equal scores, as everywhere.
        best = tl.minimum(tl.min(tl.where(score == tl.max(score, 0), part, PARTS), 0), parts - 1)
        token = tl.load(picked + row * parts + best)
    tl.store(tokens + row, tl.where(is_finite, token, -1))
    token = tl.where(is_finite, token, 0)
    if keeps != 0:
        tl.store(last_tokens + integer(records, row, PLACE), token)
    slot = integer(records, row, SLOT)
    if (counted != 0) & (slot >= 0):
        to = counts + slot * count_stride + token
        tl.store(to, tl.load(to) + 1)
    if REPORTS:
        place = integer(records, row, REPORT)
        if is_finite & (place >= 0):
            source = logits + row.to(tl.int64) * row_stride
            to = reports + place * report_words
            # Their types differ: each has its own code.
            changed_place = integer(records, row, CHANGED)
            if changed_place >= 0:
                own = changed + changed_place * changed_stride
                report(
                    to,
                    token,
                    own,
                    tops,
                    masses,
                    kept_masses,
                    edges,
                    ties,
                    lists,
                    records,
                    row,
                    top,
                    most,
                    width,
                    tiles,
                    parts,
                    TILES,
                    PARTS,
                    BLOCK,
                )
            else:
                report(
                    to,
                    token,
                    source,
                    tops,
                    masses,
                    kept_masses,
                    edges,
                    ties,
                    lists,
                    records,
                    row,
                    top,
                    most,
                    width,
                    tiles,
                    parts,
                    TILES,
                    PARTS,
                    BLOCK,
                )
