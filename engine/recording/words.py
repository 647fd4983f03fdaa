"""The names of numbers, kept once: events repeat the same few sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[tuple[str, ...], tuple[bool, ...]]  # names, and which of them are whole numbers


class Words:
    """Gives each set of names, in order and with whether each number is whole, a number of its own: its shape. Only grows."""

    def __init__(self, shapes: list[Shape] | None = None):
        self.shapes = [] if shapes is None else shapes
        self._shape_of = {shape: i for i, shape in enumerate(self.shapes)}

    def shape_of(self, numbers: Mapping[str, Any]) -> tuple[int, list]:
        """(shape, values)."""
        values = list(numbers.values())
        return self.number_of((tuple(numbers), tuple([not isinstance(value, float) for value in values]))), values

    def number_of(self, shape: Shape) -> int:
        number = self._shape_of.get(shape)
        if number is None:
            number = self._shape_of[shape] = len(self.shapes)
            self.shapes.append(shape)
        return number

    def named(self, shape: int, values: list[float]) -> dict[str, Any]:
        """What `shape_of` was given."""
        names, whole = self.shapes[shape]
        return {
            name: int(value) if is_whole else value for name, value, is_whole in zip(names, values, whole, strict=True)
        }
