"""Two CPU devices and a compilation cache for all tests; set before JAX starts."""

import os
from pathlib import Path

import jax

CACHE = Path(__file__).parent.parent / ".cache" / "jax"

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # for commands that tests start
