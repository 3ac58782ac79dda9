"""The text as numbers: characters to indices and back, and windows of it to train on."""

from __future__ import annotations

import pathlib

import torch
from torch.utils.data import Dataset

TEXT = (pathlib.Path(__file__).parent / "text.txt").read_text(encoding="utf-8")
ALPHABET = sorted(set(TEXT))


def encode(text: str) -> torch.Tensor:
    """Return the index of each character in the alphabet."""
    return torch.tensor([ALPHABET.index(character) for character in text])


def decode(indices: torch.Tensor) -> str:
    """Return the characters that the indices stand for."""
    return "".join(ALPHABET[index] for index in indices.tolist())


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Stretches of `length` characters, each with the same stretch one character later as its target."""

    def __init__(self, text: str, length: int, stride: int) -> None:
        self.characters = encode(text)
        self.length = length
        self.starts = range(0, len(text) - length, stride)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.starts[index]
        window = self.characters[start : start + self.length + 1]
        return window[:-1], window[1:]


def split(length: int) -> tuple[Windows, Windows]:
    """Return the first nine tenths of the text for training, overlapping, and the rest for validation."""
    border = len(TEXT) * 9 // 10
    training = Windows(TEXT[:border], length, stride=length // 4)
    return training, Windows(TEXT[border:], length, stride=length)
