"""Several processes that train one sweep: how they find each other, agree, and end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from purejaxppo.config import RunOptions
from purejaxppo.values import ConfigError

_PATIENCE = 300  # seconds that one waits for the others, as JAX does
_AHEAD = 2.0  # that the others have to end before process 0 takes JAX's service with it


def join(run: RunOptions) -> None:
    """Makes one program of several processes; without an address JAX asks the cluster for it.

    Raises:
        ConfigError: no cluster, nobody there, or somebody else.
    """
    hint = ""
    if run.coordinator is None:
        hint = ": without a cluster that JAX knows, give --coordinator, --num-processes and --process-id"
    else:
        host, _, port = run.coordinator.rpartition(":")
        if run.process_id == 0:
            _require_free(int(port))
        else:
            _require_somebody(host, int(port))
    try:
        jax.distributed.initialize(run.coordinator, run.num_processes, run.process_id)
    except (ValueError, RuntimeError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"--distributed: {message}{hint}") from None


def _require_free(port: int) -> None:
    """Raises ConfigError where a port is taken: JAX would share another training's, and so end that."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after one that just ended
        try:
            tried.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--coordinator: port {port}: {error}") from None


def _require_somebody(host: str, port: int) -> None:
    """Waits for process 0; raises ConfigError where it does not come, upon which JAX would abort."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except (OSError, OverflowError) as error:
            if time.monotonic() > end or isinstance(error, OverflowError):
                raise ConfigError(f"--coordinator {host}:{port}: {error}") from None
        time.sleep(0.2)


def check_devices() -> None:
    """Raises ConfigError, in all processes, unless they have equally many devices."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        shown = ", ".join(str(counts[process]) for process in sorted(counts))
        raise ConfigError(
            f"--distributed: the processes have {shown} devices, and must have equally many: "
            "JAX_NUM_CPU_DEVICES says how many on CPUs"
        )


def are_several() -> bool:
    """Whether this is one of several processes, as far as is known: without starting any device."""
    return jax.distributed.is_initialized()


def is_main() -> bool:
    """Whether this process is the one that reports."""
    return jax.process_index() == 0


def agree(*values: float) -> list[float]:
    """The greatest of each value over all processes, which must all call this."""
    if jax.process_count() == 1:
        return list(values)
    gathered = multihost_utils.process_allgather(np.array(values, np.float64))
    return [float(value) for value in gathered.max(axis=0)]


def together(action: Callable[[], Any], in_all: bool = False) -> Any:
    """What an action gives, which all processes must call for; None in those that do not report.

    Args:
        in_all: those act, too.

    Raises:
        ConfigError, OSError: where it fails; in the others ConfigError.
    """
    result, error = None, None
    if in_all or is_main():
        try:
            result = action()
        except (ConfigError, OSError) as failure:
            error = failure
    (failed,) = agree(error is not None)
    if failed:
        raise error or ConfigError("--distributed: another process could not begin")
    return result


def check_same(options: Mapping[str, Any]) -> None:
    """Raises ConfigError, in all processes, where these are not the same in all of them.

    Args:
        options: values by the names of options, as plain as YAML has them.
    """
    if jax.process_count() == 1:
        return
    texts = [json.dumps(value, sort_keys=True) for value in options.values()]
    sums = np.array([zlib.crc32(text.encode()) for text in texts], np.uint32)
    gathered = multihost_utils.process_allgather(sums)  # [processes, options]
    names = np.array([f"--{name.replace('_', '-')}" for name in options])
    different = ", ".join(names[(gathered != gathered[0]).any(axis=0)])
    if different:
        raise ConfigError(f"--distributed: the processes have different {different}")


def leave(status: int) -> None:
    """Ends the process if there are several: JAX would wait five minutes for the others, and then abort all."""
    if are_several():
        if is_main():
            time.sleep(_AHEAD)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
