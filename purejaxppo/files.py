"""Files that are there as a whole or not at all, and errors that name them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """What fails, as on a full disk, says which file it is: one that is open does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside the one that it becomes in the end; an error leaves that as it is."""
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """A file that is never seen half written."""
    with naming(path), replacing(path) as part:
        part.write_text(text)
