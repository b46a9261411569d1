"""One file per on-disk format of optimizer states."""
