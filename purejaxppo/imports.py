"""Imports of other packages without what no command needs of them: a tenth of the time of a second start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from importlib.util import LazyLoader
from pathlib import Path
from types import ModuleType

# Packages that are needed import these, which are not.
_UNUSED = (
    "fontTools.agl",
    "google.protobuf.text_format",
    "gymnasium.wrappers",
    "jax.debug",
    "jax.extend.pallas",
    "jaxlib.mosaic.python.mosaic_gpu",
    "jaxlib.mosaic.python.tpu",
    "matplotlib.projections",
    "orbax.checkpoint.experimental.v1",
)


class Later:
    """A finder of modules that are not read before something is looked up in them."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of those that may wait, and of no others."""
        spec = PathFinder.find_spec(name, path, target) if name in _UNUSED else None
        if spec and spec.loader:
            spec.loader = LazyLoader(spec.loader)
        return spec


def import_jax() -> None:
    """JAX reads the descriptions of all installed packages to find its own for AMD's accelerators.

    Here it gets those of that name.
    """

    def rocm(**_: object) -> Iterator[Distribution]:
        for folder in sys.path:
            yield from map(Distribution.at, Path(folder).glob("jax_rocm*.dist-info"))

    with _replaced(metadata, "distributions", rocm):
        import jax  # noqa: F401


def import_matplotlib() -> None:
    """Matplotlib writes down what each of its classes can be given: over a quarter of its import."""
    from matplotlib import artist

    with _replaced(artist, "kwdoc", lambda _: ""):
        import matplotlib.figure  # noqa: F401


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """While other modules are imported, which use it."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
