"""The command `squisher`, also as `python -m squisher`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly, also while modules are being imported."""
    try:
        from .cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # the status that shells expect after an interrupt


if __name__ == "__main__":
    main()
