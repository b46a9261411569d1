"""`python -m squisher` is the command `squisher`."""

from .cli import main

if __name__ == "__main__":
    main()
