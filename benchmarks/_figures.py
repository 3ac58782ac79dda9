"""Figures of several contenders: as a table, as JSON, as a plot."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Column:
    """One quantity of all contenders: a value for each round. Empty for those that cannot do it."""

    title: str
    unit: str
    values: dict[str, list[float]]

    def above(self, name: str, reference: str) -> list[float]:
        """Return the differences to another contender, round by round."""
        return [a - b for a, b in zip(self.values[name], self.values[reference], strict=True)]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def table(column: Column, reference: str) -> str:
    lines = [f"{column.title}, {column.unit}: median (quartiles), above {reference}, ratio"]
    lines += [f"  {name:11} {_row(column, name, reference)}" for name in column.values]
    return "\n".join(lines)


def _row(column: Column, name: str, reference: str) -> str:
    values = column.values[name]
    if not values:
        return "-".rjust(8)
    digits = 2 if median(column.values[reference]) < 10 else 1
    own = f"{median(values):8.{digits}f} {_spread(values, digits, '')}"
    if name == reference:
        return own
    above = column.above(name, reference)
    ratio = median([a / b for a, b in zip(values, column.values[reference], strict=True)])
    return f"{own:30} {median(above):+8.{digits}f} {_spread(above, digits, '+'):22} {ratio:6.2f}"


def _spread(values: Sequence[float], digits: int, sign: str) -> str:
    low, high = quartiles(values)
    return f"({low:{sign}.{digits}f} to {high:{sign}.{digits}f})"


def plot(columns: Sequence[Column], path: pathlib.Path, caption: str) -> None:
    """Draw bars of the medians, with the quartiles as spread."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(columns), figsize=(3 * len(columns), 3), layout="constrained")
    for panel, column in zip(panels, columns, strict=True):
        names = list(column.values)[::-1]  # bars are drawn from below
        for name in names:
            _bar(panel, name, column.values[name])
        panel.set(title=column.title, xlabel=column.unit)
        panel.spines[["top", "right"]].set_visible(False)
        if panel is not panels[0]:
            panel.set_yticklabels([])
    figure.supxlabel(caption, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bar(panel: object, name: str, values: Sequence[float]) -> None:
    color = {"plain": "0.6", "Resolute": "tab:blue"}.get(name, "0.8")
    middle = median(values) if values else 0.0
    low, high = quartiles(values) if values else (0.0, 0.0)
    panel.barh(name, middle, color=color, xerr=[[middle - low], [high - middle]])  # type: ignore[attr-defined]
    text = f" {middle:.4g}" if values else " -"
    panel.text(high, name, text, va="center", fontsize="small")  # type: ignore[attr-defined]
