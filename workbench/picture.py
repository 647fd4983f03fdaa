"""A picture of one view: SVG where the view draws itself as text, PNG through a browser that is on this machine.

The browser gets one file with everything in it, and no address to ask.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_HEIGHT = 2400  # px: more than any view needs; what is empty is cut off
_PATIENCE = 120.0  # seconds


def browser() -> str | None:
    """The first Chromium-like browser on the path."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def save_picture(screen: Any, path: str | os.PathLike[str], *, width: int = 1100) -> Path:
    """`screen` shows one view, and was updated. Writes .svg or .png; the path. Raises ValueError for another ending and for
    an SVG of a view that has none, RuntimeError where there is no browser for a PNG."""
    path, view = Path(path), screen.panels[0].view
    if path.suffix == ".svg":
        if not hasattr(view, "svg"):
            raise ValueError(f"{path}: {view.title!r} is drawn by the browser and has no SVG; save it as .png")
        path.write_text(view.svg(view.theme), encoding="utf-8")
    elif path.suffix == ".png":
        _screenshot(screen, path, width)
    else:
        raise ValueError(f"{path}: a picture ends in .svg or .png")
    return path


def _screenshot(screen: Any, path: Path, width: int) -> None:
    from bokeh.document import Document
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    program = browser()
    if program is None:
        raise RuntimeError(
            f"a PNG needs a browser, and none of {', '.join(BROWSERS)} is on the path; the pool map saves as .svg"
        )
    document = Document()
    document.add_root(screen.root)
    ground = screen.panels[0].view.theme.bg
    html = file_html(document, INLINE, title="kvscope").replace(
        "<body>", f'<body style="margin:0;background:{ground}">', 1
    )
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "view.html", Path(folder) / "view.png"
        page.write_text(html, encoding="utf-8")
        command = [
            program, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-background-networking",
            f"--user-data-dir={folder}/profile", f"--window-size={width},{_HEIGHT}", "--virtual-time-budget=8000",
            f"--screenshot={shot}", page.as_uri(),
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # Chromium refuses to start as root otherwise
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False)
        if not shot.exists():
            raise RuntimeError(f"{program} made no picture: {done.stderr.decode(errors='replace').strip()[-300:]}")
        _crop(shot, path)


def _crop(shot: Path, path: Path) -> None:
    """Without the empty ground below."""
    from PIL import Image, ImageChops

    with Image.open(shot) as opened:
        image = opened.convert("RGB")
    ground = Image.new("RGB", image.size, image.getpixel((image.width - 1, image.height - 1)))
    box = ImageChops.difference(image, ground).getbbox()
    image.crop((0, 0, image.width, box[3] + 12 if box else image.height)).save(path)
