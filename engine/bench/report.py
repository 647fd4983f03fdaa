"""A benchmark's table as text, and the same figures as JSON."""

from __future__ import annotations

import json
from pathlib import Path


def print_table(title: str, facts: dict[str, str], headers: list[str], rows: list[list], file: str | None) -> None:
    """Print facts and a table in Markdown, which reads well in a terminal and in the docs; write JSON where asked."""
    print(f"\n{title}\n")
    for name, value in facts.items():
        print(f"- {name}: {value}")
    cells = [headers, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headers))]
    lines = [
        "| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    print("\n" + "\n".join(lines) + "\n")
    if file:
        figures = {"title": title, **facts, "rows": [dict(zip(headers, row, strict=True)) for row in rows]}
        Path(file).write_text(json.dumps(figures, indent=2) + "\n")


def _cell(value) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:,.0f}"
    return str(value)
