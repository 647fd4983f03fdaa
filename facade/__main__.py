"""`python -m kvscope` and the console script: both hand over to the command line in the workbench."""

import sys


def main() -> int:
    from kvscope.workbench.cli import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
