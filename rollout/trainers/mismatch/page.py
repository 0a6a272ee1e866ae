"""A mismatch as one HTML page: suspects, a heat map of layers and ops, a histogram of ratios."""

from __future__ import annotations

import math

import numpy as np

from rollout.report.page import render_page
from rollout.report.panels import Chart, Panel, make_line, make_panel
from rollout.report.tables import Cell, Row, Table
from rollout.report.verdict import Verdict
from rollout.trainers.mismatch.result import Mismatch, OpDifference
from rollout.trainers.mismatch.table import figures

_SIZES = {"xLabel": "layer", "yLabel": "op"}


def mismatch_page(found: Mismatch, subtitle: str = "") -> bytes:
    """The page as HTML, which loads nothing else."""
    first = found.suspects[0] if found.suspects else None
    sentence = f"{first.cause}: {first.sentence}" if first else "Trainer and engine agree."
    return render_page(
        "Trainer against engine",
        [_heat_map(found), _ratios(found), _positions(found)],
        subtitle=subtitle,
        notes=found.notes,
        verdicts=[Verdict("", "", sentence, list(figures(found)), [])],
        tables=[_suspects(found), _ops(found)],
    )


def _suspects(found: Mismatch) -> Table:
    rows = [
        Row([Cell(str(place), place), Cell(each.cause, each.cause), Cell(each.where, each.where),
             Cell(each.sentence, each.sentence)])
        for place, each in enumerate(found.suspects, start=1)
    ]  # fmt: skip
    columns, caption = ["", "cause", "where", "what was seen"], "The likeliest first."
    return Table("suspects", "Suspects", caption, columns, rows, "Nothing differs beyond rounding.")


def _ops(found: Mismatch) -> Table:
    rows = [
        Row([Cell(op.where, op.where), Cell(f"{op.difference:.3g}", op.difference),
             Cell(f"{op.rounding:.1g}", op.rounding), Cell(f"{op.share:.2%}", op.share)])
        for op in found.ops
    ]  # fmt: skip
    caption = "Each op of the engine on the trainer's input, relative to a row's largest value."
    columns = ["op", "largest difference", "rounding explains", "share of all"]
    return Table("ops", "Ops", caption, columns, rows, "No op was compared.")


def _heat_map(found: Mismatch) -> Chart:
    names = list(dict.fromkeys(op.name for op in sorted(found.ops, key=_place)))
    layers = sorted({op.layer for op in found.ops if op.layer is not None})
    columns = ["", *map(str, layers)]  # the first: outside the layers
    cells = [
        {"series": series, "points": [
            [0 if op.layer is None else layers.index(op.layer) + 1, names.index(op.name),
             f"{op.where}: {op.difference:.2g}, rounding explains {op.rounding:.1g}", _opacity(op)]
            for op in found.ops if op.is_explained == explained
        ]}
        for series, explained in ((0, True), (1, False))
    ]  # fmt: skip
    caption = "Colour by size: blue where rounding explains the difference, orange where not."
    panel: Panel = {"caption": "", "x": {"names": columns}, "y": {"names": names}, "cells": cells,
                    **_SIZES}  # fmt: skip
    return Chart("heat", "Layers and ops", caption, [panel] if names else [], _missing(names))


def _missing(names: list[str]) -> str:
    return "" if names else "No op was compared."


def _place(op: OpDifference) -> tuple[bool, bool]:
    """Ops before the layers, in them, and after them."""
    return op.layer is None, op.name != "embed_tokens"


def _opacity(op: OpDifference) -> float:
    """0.06 for no difference, 0.5 where rounding ends, 1 at a hundred times that."""
    if not op.difference:
        return 0.06
    size = 0.5 + math.log10(op.difference / op.rounding) / 4
    return round(min(max(size, 0.12), 1.0), 2)


def _ratios(found: Mismatch) -> Chart:
    middle = np.array([(low + high) / 2 for low, high, _ in found.ratios])
    counts = np.array([float(count) for _, _, count in found.ratios])
    panel = make_panel("tokens by ratio", lines=[make_line("tokens", middle, counts, 0, dots=True)])
    panel["x"] = {"from": 0.7, "to": 1.3}
    caption = "Probability by the trainer over that of the rollout; beyond 0.7 and 1.3 at the ends."
    return Chart("ratios", "Ratios", caption, [panel])


def _positions(found: Mismatch) -> Chart:
    x = np.array([int(bucket.name.split()[0]) for bucket in found.by_position], dtype=float)
    lines = [
        make_line(name, x, np.array([getattr(each, field) for each in found.by_position]), series)
        for series, (name, field) in enumerate((("mean", "mean"), ("largest", "max")))
    ]
    panel = make_panel("difference of logprobs, by position in the output", lines=lines)
    return Chart(
        "positions", "Positions", "Of the sampled tokens, trainer against engine.", [panel]
    )
