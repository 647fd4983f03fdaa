"""A recording as one HTML file that plays without Python, without a server and without a network: `wb.save_html("run.html")`.

The workbench's own screen is drawn at every recorded step and put on film (see `filming`). The file holds the page as it begins,
the film, BokehJS and a small player (see `film_player`). Of more than MOST_MOMENTS steps so many are kept, at even distances, and
the page says so.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from pathlib import Path

import numpy as np

from .film_player import page_html
from .filming import filmed
from .recorder import Recording
from .theme import THEMES, OwnerSlots

MOST_MOMENTS = 600


def save_html(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    title: str,
    first: int | None = None,
    last: int | None = None,
    theme: str = "light",
    slots: OwnerSlots | None = None,
) -> Path:
    """Write the steps `first` to `last` of a recording (default: all of them); the path. `theme`: in which one it opens. `slots`:
    the hues that the requests have on screen. Raises ValueError with a sentence for a wrong option, and for a path that cannot be
    written."""
    target = Path(path)
    steps = _steps(recording, first, last)
    if theme not in THEMES:
        raise ValueError(f"theme={theme!r}: must be one of {', '.join(THEMES)}")
    if not target.parent.is_dir() or target.is_dir():
        why = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise ValueError(f"path={str(target)!r}: cannot be written, because {why}")
    told, of = title, steps[-1] - steps[0] + 1
    if of > len(steps):
        told += f"; of its {of:,} steps this file keeps {len(steps):,}, at even distances"
    run, copy = filmed(recording, steps, told, theme, slots or OwnerSlots())
    packed = base64.b64encode(gzip.compress(json.dumps(run, separators=(",", ":")).encode(), 6)).decode()
    beside = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        beside.write_text(page_html(f"kvscope: {title}", copy, packed, theme), encoding="utf-8")
        os.replace(beside, target)
    except OSError as error:
        raise ValueError(f"path={str(target)!r}: cannot be written ({error.strerror})") from None
    finally:
        beside.unlink(missing_ok=True)
    return target


def _steps(recording: Recording, first: int | None, last: int | None) -> list[int]:
    """The steps that the file shows."""
    start, end = recording.first_step, recording.last_step
    for name, step in (("first", first), ("last", last)):
        if step is not None and (not isinstance(step, int) or isinstance(step, bool) or not start <= step <= end):
            raise ValueError(f"{name}={step!r}: must be a recorded step, {start} to {end}")
    start, end = start if first is None else first, end if last is None else last
    if start > end:
        raise ValueError(f"first={start}: must not be after last={end}")
    kept = np.linspace(start, end, min(MOST_MOMENTS, end - start + 1))
    return np.unique(kept.round().astype(int)).tolist()
