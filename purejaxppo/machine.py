"""What a training runs on: devices, the compilation cache, memory, and the signals that stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import platform
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import purejaxppo
from purejaxppo import cgroups, cpu, processes
from purejaxppo.config import RunOptions
from purejaxppo.values import ConfigError, parse_bytes

# What Ctrl-C is answered, and the seconds that Python has to end by itself after a second one.
_STOPS = b"\nstops after what is being compiled, trained or evaluated; once more: at once\n"
_PATIENCE = 1.0


def configure(run: RunOptions, num_runs: int, one_thread: bool = False) -> None:
    """Devices, processes and compilation cache; must come before anything runs.

    Args:
        one_thread: XLA is to use no more for a device of a CPU, unless PJRT_NPROC says how many.

    Raises:
        ConfigError: the other processes cannot be reached or have other devices, or there are no such.
    """
    wanted = num_cores()
    if run.shard == "runs" and not run.distributed:
        wanted = min(wanted, num_runs)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        with contextlib.suppress(RuntimeError):  # the backend is up already, as in tests
            jax.config.update("jax_num_cpu_devices", wanted)
    if run.deterministic:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()
    if run.distributed:
        processes.join(run)
    _configure_cache(run)
    asked = "PJRT_NPROC" in os.environ
    if not asked:  # XLA knows of no limits of containers
        os.environ["PJRT_NPROC"] = "1" if one_thread else str(num_cores())
    start_devices()  # which reads it, once
    if not asked:
        del os.environ["PJRT_NPROC"]
    processes.check_devices()


def start_devices() -> None:
    """Has JAX look for its devices; raises ConfigError where those asked for are not there."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter without a word
        names = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
        asked = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
        reason = " ".join(str(error).split()) or "JAX has no such devices here"
        raise ConfigError(
            f"{' '.join(asked)}: {reason}; the extras cuda12, cuda13 and tpu bring accelerators"
        ) from None


def _configure_cache(run: RunOptions) -> None:
    """Where compiled programs are kept."""
    if not run.compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "purejaxppo"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def num_cores() -> int:
    """CPU cores that this process may use, also within a container."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    cores = len(affinity) or os.cpu_count() or 1
    return min(cores, cgroups.num_cores() or cores)


def _stopping() -> list[signal.Signals]:
    """The signals that stop a training: that of a closed terminal too, unless it is ignored, as under `nohup`."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if (
        hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    ):  # no Windows
        numbers.append(signal.SIGHUP)
    return numbers


class Interrupt:
    """The first Ctrl-C, SIGTERM or SIGHUP lets the chunk in progress end; a second one stops at once.

    Python's handlers run between steps of the main thread, and so not while that waits for XLA. A thread
    that a socket wakes answers meanwhile, and ends the process where a second signal cannot.

    Attributes:
        signal: that stopped the training, 0 while nothing has.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._requested = 0
        self._over = threading.Event()

    def check(self) -> bool:
        """Whether to stop, which all processes ask at the same points and answer alike."""
        (requested,) = processes.agree(self._requested)
        self.signal = int(requested)
        return bool(requested)

    def __enter__(self) -> Interrupt:
        heard, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._before = {number: signal.signal(number, self._stop) for number in _stopping()}
        self._woken_before = signal.set_wakeup_fd(self._wakes.fileno())
        threading.Thread(target=self._listen, args=(heard,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not KeyboardInterrupt:  # after which Python may still wait for what compiles
            self._over.set()
        signal.set_wakeup_fd(self._woken_before)
        self._wakes.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: Any) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = number

    def _listen(self, heard: socket.socket) -> None:
        """Takes the number of each signal, until `_wakes` is closed."""
        count = 0
        with heard:
            while number := int.from_bytes(heard.recv(1)):
                count += number in self._before
                if count == 1 and number == signal.SIGINT:
                    with contextlib.suppress(OSError):  # nobody to tell
                        os.write(2, _STOPS)
                if count == 2:
                    if not self._over.wait(_PATIENCE):
                        os._exit(128 + number)
                    return


@dataclass(frozen=True)
class Memory:
    """What arrays may take.

    Attributes:
        size: bytes, in whichever process there is least.
        per_device: of each device; else of each process, whose devices share it.
    """

    size: int
    per_device: bool

    def of(self, num_devices: int) -> int:
        """Bytes that so many devices, of all processes, may hold together."""
        return self.size * (num_devices if self.per_device else jax.process_count())

    def without(self, size: int) -> Memory:
        """What is left where so many bytes of it are taken."""
        return dataclasses.replace(self, size=self.size - size)


def memory_for_arrays(limit: str | None) -> Memory:
    """What is free, or what a limit leaves: of each accelerator, or of each process on CPUs.

    Raises:
        ConfigError: the limit leaves nothing to a process on CPUs.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        size = parse_bytes(limit) - resident_bytes() if limit else _available_bytes()
    else:
        stats = device.memory_stats() or {}
        size = parse_bytes(limit) if limit else stats.get("bytes_limit", 2**62)
    (negative,) = processes.agree(-max(0, size))  # all processes must plan the same
    if limit and not negative and device.platform == "cpu":
        taken = gib(resident_bytes())
        raise ConfigError(f"--memory-limit {limit}: a process has {taken} before it trains")
    return Memory(-int(negative), per_device=device.platform != "cpu")


def resident_bytes() -> int:
    """Bytes of memory this process has; 0 where that is not known."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    """Bytes of memory that are free, also within the container; all there are if that is unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limited = cgroups.free_memory()
    return free if limited is None else min(free, limited)


def gib(size: float) -> str:
    """Bytes for a person to read."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.1f} MiB"


def lacks_memory(error: Exception) -> str:
    """What a device says whose memory ran out, and what needs less; nothing for other errors."""
    _, found, said = str(error).partition("RESOURCE_EXHAUSTED")
    if not found or not isinstance(error, jax.errors.JaxRuntimeError):
        return ""
    reason, *_ = said.strip(": .").splitlines() or ["out of memory"]
    return (
        f"{reason}: fewer runs or environments at a time take less (--runs-per-block, "
        "--num-envs, --eval-episodes, --episodes)"
    )


@functools.cache
def versions() -> dict[str, str]:
    """Of what a result depends on."""
    found = {"purejaxppo": purejaxppo.__version__, "python": platform.python_version()}
    for name in (
        "jax", "jaxlib", "flax", "optax", "gymnax", "brax", "mujoco", "mujoco-mjx", "playground",
        "craftax", "envpool", "octax", "xminigrid", "numpy",
    ):  # fmt: skip
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an extra
            found[name] = importlib.metadata.version(name)
    return found


def device_name() -> str:
    """Kind and platform of the devices; of CPUs the model and its widest vectors, where the system says it.

    XLA compiles for those, and rounds with them as it does; models of one name may differ in them.
    """
    device = jax.devices()[0]
    kind = device.device_kind
    if device.platform == "cpu":
        kind = (cpu.model() or kind) + (" with AVX-512" if cpu.has_avx512() else "")
    return f"{kind} ({device.platform})"
