"""The command `squisher`, which is `python -m squisher` as well."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly, also while modules are being imported."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # what a shell expects of a program that an interrupt ended


if __name__ == "__main__":
    main()
