"""A mismatch as one HTML page: figures, suspects, a heat map of layers and ops, the ratios, and the
differences by position."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rollout.report.page import render_page
from rollout.report.panels import Chart, Panel, make_line, make_panel
from rollout.report.verdict import Verdict
from rollout.trainers.mismatch.result import Mismatch, OpDifference
from rollout.trainers.mismatch.table import figures, verdicts


def mismatch_page(found: Mismatch, subtitle: str = "") -> bytes:
    """The page as HTML, which loads nothing else."""
    sentence, *others = (f"{cause}: {text}" for cause, text in verdicts(found))
    return render_page(
        "Trainer against engine",
        [_heat_map(found), _tokens(found)],
        subtitle=subtitle,
        notes=[*others, *found.notes],
        verdicts=[Verdict("", "", sentence, list(figures(found)), [])],
        tables=[],
    )


def _heat_map(found: Mismatch) -> Chart:
    outer_last = sorted(found.ops, key=lambda op: (op.name != "embed_tokens", op.layer is None))
    names = list(dict.fromkeys(op.name for op in outer_last))
    layers = sorted({op.layer for op in found.ops if op.layer is not None})
    cells = [
        {"series": series, "points": [
            [0 if op.layer is None else layers.index(op.layer) + 1, names.index(op.name),
             f"{op.where}: {op.difference:.2g}, rounding explains {op.rounding:.1g}", _opacity(op)]
            for op in found.ops if op.is_explained == is_explained
        ]}
        for series, is_explained in enumerate((True, False))
    ]  # fmt: skip
    panel: Panel = {
        "caption": "", "x": {"names": ["", *map(str, layers)]}, "y": {"names": names},
        "cells": cells, "xLabel": "layer", "yLabel": "op",
    }  # fmt: skip
    caption = "Blue where rounding explains an op's difference, orange where it does not."
    missing = "" if names else "No op was compared."
    return Chart("heat", "Layers and ops", caption, [panel] if names else [], missing)


def _opacity(op: OpDifference) -> float:
    """0.06 for no difference, 0.5 where rounding ends, 1 at a hundred times that."""
    size = 0.5 + math.log10(op.difference / op.rounding) / 4 if op.difference else 0.06
    return round(min(max(size, 0.06), 1.0), 2)


def _tokens(found: Mismatch) -> Chart:
    ratios, counts = zip(*found.ratios, strict=True)
    spreads = found.by_position.values()
    panels = [
        _panel("tokens by ratio of probabilities", {"tokens": counts}, ratios, "ratio"),
        _panel(
            "difference of logprobs by position",
            {"mean": [each.mean for each in spreads], "largest": [each.max for each in spreads]},
            list(found.by_position),
            "position in the output",
        ),
    ]
    caption = (
        "A ratio is the trainer's probability over the rollout's; the outer bins have the rest."
    )
    return Chart("tokens", "Tokens", caption, panels)


def _panel(
    caption: str, lines: Mapping[str, Sequence[float]], x: Sequence[float], x_label: str
) -> Panel:
    drawn = [
        make_line(name, np.array(x, dtype=float), np.array(values, dtype=float), series, dots=True)
        for series, (name, values) in enumerate(lines.items())
    ]
    axis = {"from": x[0], "to": x[-1] if len(x) > 1 else x[0] + 1}
    return make_panel(caption, lines=drawn, xLabel=x_label, x=axis)
