"""What a command leaves out of the packages it imports, and that it is there for whom asks."""

import os
import subprocess
import sys

from trainings import SMALL

TRAINS = f"""
import sys, types
from purejaxppo import imports, run
assert run.main(["train", *{SMALL.split()}, "--total-timesteps", "32", "--run-dir", sys.argv[1]]) == 0
"""


def python(code, path, *folders):
    """Runs code that trains into a run directory within path."""
    folders = *map(str, folders), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-c", TRAINS + code, str(path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    assert (path / "run" / "learning_curve.png").exists()
    return done.stdout


def test_what_is_not_used_is_read_once_it_is_looked_into(tmp_path):
    """Matplotlib does not document itself either."""
    code = """
from matplotlib import artist, lines
assert "markersize" in artist.kwdoc(lines.Line2D) and "markersize" not in lines.Line2D.set.__doc__
read = {"jax._src.pallas.core", "mpl_toolkits.mplot3d", "orbax.checkpoint.experimental.v1.training"}
assert not read & sys.modules.keys(), read & sys.modules.keys()
for name in imports._UNUSED:
    assert type(sys.modules[name]) is not types.ModuleType, name
    sys.modules[name].__doc__
    assert type(sys.modules[name]) is types.ModuleType, name
import jax.extend.pallas, matplotlib.pyplot
from orbax.checkpoint.experimental import v1
assert jax.extend.pallas.GridMapping and jax.debug.print and v1.save
assert matplotlib.pyplot.axes(projection="3d").name == "3d"
assert read <= sys.modules.keys()
"""
    python(code, tmp_path)


def test_jax_finds_its_package_for_accelerators_of_amd(tmp_path):
    about = tmp_path / "jax_rocm7_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-rocm7-plugin\nVersion: 1.0\n")
    package = tmp_path / "jax_rocm7_plugin"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rocm_plugin_extension.py").write_text("print('this is it')")
    code = (
        "from importlib import metadata; print(*(found.name for found in metadata.distributions()))"
    )
    printed = python(code, tmp_path, tmp_path)
    assert printed.startswith("this is it\n")
    assert {"jax", "numpy", "jax-rocm7-plugin"} <= set(printed.splitlines()[-1].split())
