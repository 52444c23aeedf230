"""Where commands begin: `purejaxppo`, and `python -m purejaxppo.run`, which is `purejaxppo train`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType

# Packages that are needed import these, which are not: a twentieth of the time of a second start.
_UNUSED = ("jax.extend.pallas", "matplotlib.projections", "orbax.checkpoint.experimental.v1")


class _Later:
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


sys.meta_path.insert(0, _Later)


def main(arguments: list[str] | None = None) -> int:
    """The console script; returns the exit status."""
    gc.disable()  # imports make many objects and no garbage: a tenth of a second to look for it
    try:
        from purejaxppo import cli
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()
        gc.enable()
    return cli.main(sys.argv[1:] if arguments is None else arguments)


# CPython keeps the frames of calls in chunks of 16 KiB. JAX traces at a depth where calls cross the end of one
# again and again, and each maps memory and gives it back: up to a tenth of the time to start. All that a frame
# with so large a stack calls lies in its own chunk.
main.__code__ = main.__code__.replace(co_stacksize=1 << 16)


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
