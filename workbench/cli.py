"""The command line: `kvscope lab | app | replay | bench | model | doctor`. Each command imports only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvscope import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. An error that a user can mend is one sentence on stderr, no traceback."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        print(f"kvscope: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    from kvscope.engine.bench import add_command
    from kvscope.engine.bench import add_parser as add_bench

    from .bench_plot import add_parser as add_plot
    from .bench_views import add_parser as add_views
    from .cli_model import add_parser as add_model

    parser = argparse.ArgumentParser(prog="kvscope", description="Serve a language model and watch how it is done.")
    parser.add_argument("--version", action="version", version=f"kvscope {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    lab = add_command(commands, "lab", "open the notebooks in JupyterLab")
    lab.add_argument(
        "folder",
        nargs="?",
        default="kvscope-notebooks",
        help="where the notebooks are copied to (default kvscope-notebooks)",
    )
    lab.add_argument("--port", type=int, default=8888, help="first port to try (default 8888)")
    lab.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    lab.set_defaults(run=_lab)

    app = add_command(commands, "app", "serve the workbench as a page of its own")
    app.add_argument("--model", default="default", help="default, a Hugging Face id, a folder or a .gguf file")
    app.add_argument(
        "--num-blocks", type=int, help="blocks in the pool (default 512, or fewer where little memory is free)"
    )
    app.add_argument("--port", type=int, default=5006, help="port (default 5006; 0 takes a free one)")
    app.add_argument("--address", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    app.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    app.set_defaults(run=_app)

    replay = add_command(commands, "replay", "show a recording on a page of its own, with no model")
    replay.add_argument(
        "file", nargs="?", default="demo", help="what wb.save() wrote (default: the demo that comes along)"
    )
    replay.add_argument("--port", type=int, default=5006, help="port (default 5006; 0 takes a free one)")
    replay.add_argument("--address", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    replay.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
    replay.add_argument(
        "--html", metavar="OUT", help="write it to one HTML file that plays without Python, and serve nothing"
    )
    replay.set_defaults(run=_replay)

    doctor = add_command(commands, "doctor", "print versions, what works here and what to do about the rest")
    doctor.set_defaults(run=_doctor)

    add_model(commands)
    benchmarks = add_bench(commands)
    add_views(benchmarks)
    add_plot(benchmarks)
    return parser


def _lab(options: argparse.Namespace) -> int:
    from .lab import open_lab

    return open_lab(options.folder, port=options.port, browser=not options.no_browser)


def _app(options: argparse.Namespace) -> int:
    from .app import serve

    engine_options = {} if options.num_blocks is None else {"num_blocks": options.num_blocks}
    serve(
        options.model,
        port=options.port,
        address=options.address,
        show=not options.no_browser and _has_display(),
        **engine_options,
    )
    return 0


def _replay(options: argparse.Namespace) -> int:
    from .recorder import Recording, Replay

    recording = Recording.load(options.file)  # before Panel is loaded: a wrong path is told at once
    if options.html is not None:
        from .workbench import Workbench

        print(Workbench.replay(recording).save_html(options.html))
        return 0
    from .app import serve

    show = not options.no_browser and _has_display()
    serve(Replay(recording), port=options.port, address=options.address, show=show)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import report

    print(report())
    return 0


def _has_display() -> bool:
    from .lab import has_display

    return has_display()
