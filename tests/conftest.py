"""For all tests: eight CPU devices, a compilation cache, and a registry that each leaves as it was."""

import gc
import os
import shutil
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from trainings import train

from purejaxppo import envs

# What a test compiles runs once or twice; trainings say themselves how they are compiled.
QUICK = "--xla_backend_optimization_level=0 --xla_gpu_autotune_level=0"
if jax.__version_info__ < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"
CACHE = Path(__file__).parent.parent / ".cache" / "jax"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # for commands that tests start
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
jax.devices()  # or a test that trains one run would come first, and leave one device to all
# Accelerators cut the numbers of products short, unless asked otherwise.
if jax.default_backend() != "cpu":
    jax.config.update("jax_default_matmul_precision", "highest")
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(envs, "_REGISTRY", dict(envs._REGISTRY))


@pytest.fixture(autouse=True, scope="module")
def nothing_of_the_module_before():
    """Lets go of what it compiled, 3 GB in the end, through which Python's collector goes.

    Turns on the cache, too, which EnvPool turns off for its process.
    """
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # what stays is modules: the collector need not go through them again
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A directory with checkpoints of iterations 9 and 11."""
    path = tmp_path_factory.mktemp("checkpoint") / "run"
    assert train(path, 11, "--metrics-rows", "3") == 0
    return path


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "a run")


def pytest_collection_modifyitems(items):
    """The longest first, or one worker would wait for them in the end."""
    if jax.default_backend() != "cpu":
        left_out = pytest.mark.skip(reason="of CPUs: JAX_PLATFORMS=cpu")
        for item in items:
            if item.get_closest_marker("on_cpus"):
                item.add_marker(left_out)
    longest = ("killed_twenty_times", "two_processes_of_two", "one_process_less_cache")
    items.sort(key=lambda item: not any(name in item.name for name in longest))
