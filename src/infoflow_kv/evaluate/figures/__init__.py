"""Figures of the laboratory; each `draw_…` writes a PNG and an SVG and returns their paths. Needs the extra `eval`."""

from infoflow_kv.evaluate.figures.budgets import draw_budgets
from infoflow_kv.evaluate.figures.hops import draw_hops
from infoflow_kv.evaluate.figures.layers import draw_calibration, draw_layers
from infoflow_kv.evaluate.figures.needle import draw_needle
from infoflow_kv.evaluate.figures.pareto import draw_pareto
from infoflow_kv.evaluate.figures.selection import draw_selection

__all__ = [
    "draw_budgets",
    "draw_calibration",
    "draw_hops",
    "draw_layers",
    "draw_needle",
    "draw_pareto",
    "draw_selection",
]
