"""Where commands begin: `purejaxppo`, and `python -m purejaxppo.run`, which is `purejaxppo train`."""

from __future__ import annotations

import gc
import sys

from purejaxppo import imports

sys.meta_path.insert(0, imports.Later)


def main(arguments: list[str] | None = None) -> int:
    """The console script; returns the exit status."""
    gc.disable()  # imports make many objects and no garbage: a tenth of a second to look for it
    try:
        imports.import_jax()
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
