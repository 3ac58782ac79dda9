"""Metrics whose names were made to disturb a terminal."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from determined.pytorch import Batch
from trials import LineTrial, fit

NAMES = ("[red]x[/red]", "\x1b[2Jcleared", "\x9b31mred", "a\rb\nc", ":smile:", "\u202ebackwards", "long " * 200_000)


class Disturbing(LineTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        return {**super().train_batch(batch, epoch_idx, batch_idx), **dict.fromkeys(NAMES, 1.0)}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {**super().evaluate_batch(batch, batch_idx), **dict.fromkeys(NAMES, 2.0)}


def output_of(monkeypatch: pytest.MonkeyPatch, switch: str) -> str:
    raw = io.BytesIO()
    monkeypatch.setenv("DET_PROGRESS", switch)
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="utf-8"))
    fit(Disturbing, max_length=Batch(2), reporting_period=Batch(1), validation_period=Batch(1))
    return raw.getvalue().decode()


def test_lines_show_names_with_their_control_characters_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = output_of(monkeypatch, "0")
    assert shown.replace("\n", "").isprintable()
    assert [line for line in shown.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", line)] == []
    for name in (r"[red]x[/red] 1", r"\x1b[2Jcleared 1", r"\x9b31mred 1", r"a\rb\nc 1", r"\u202ebackwards 1"):
        assert name in shown


def test_bar_is_neither_styled_nor_moved_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = output_of(monkeypatch, "1")
    for name in (r"[red]x[/red] 1", r"\x1b[2Jcleared 1", r"\x9b31mred 1", ":smile: 1"):
        assert name in shown
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("switch", ["0", "1"])
def test_name_of_a_megabyte_is_cut(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = output_of(monkeypatch, switch)
    assert "long long" in shown
    assert max(map(len, shown.splitlines())) < 5000
