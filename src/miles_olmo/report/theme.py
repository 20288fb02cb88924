"""Colours and type of the plots, and how they follow the page's light or dark scheme.

Plots are drawn in the light colours. In the page each of these colours is replaced by a CSS variable
(`--ink`, ...), so that one drawing serves both schemes; PNG files keep the light ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

INK, MUTED, GRID = "#1f2630", "#5b6673", "#dfe4ea"
LINES = ("#2a6fbb", "#c25e1f", "#2f8552", "#8250a8")
"""Colours of lines: of the metrics of one run, or of the runs that are compared."""

# Variable -> (light, dark). The light values are those that plots are drawn in.
SCHEMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ink": (INK, "#e4e9ef"),
        "muted": (MUTED, "#9aa6b4"),
        "grid": (GRID, "#313943"),
        "line-1": (LINES[0], "#6fb1f5"),
        "line-2": (LINES[1], "#f2995c"),
        "line-3": (LINES[2], "#6fcb92"),
        "line-4": (LINES[3], "#c79bec"),
        "page": ("#f6f7f9", "#12161b"),
        "card": ("#ffffff", "#1a2027"),
        "good": ("#1d7a46", "#6fcb92"),
        "bad": ("#b3261e", "#ff8a80"),
        "code": ("#eef1f5", "#232b34"),
    }
)

LOAD_COLORS = ("#8c2d04", "#e08a45", "#f1eee9", "#6ba3d6", "#173f6e")
"""Expert load from starved to overloaded; the middle is the uniform share."""

TYPE: Mapping[str, Any] = MappingProxyType(
    {
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8.5,
        "text.parse_math": False,  # a run may be called $x$
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.facecolor": "none",
        "axes.labelcolor": MUTED,
        "axes.labelsize": 8.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": INK,
        "axes.titlepad": 8,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "lines.linewidth": 1.5,
        "lines.solid_capstyle": "round",
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "legend.labelcolor": INK,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": "miles-olmo",
    }
)
