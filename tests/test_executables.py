"""Programs that are kept: found without a trace of them, and never where they might be others."""

import contextlib
import os
import pickle
import subprocess
import sys
import time
import types
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from trainings import MODULE, PER_ITERATION, SMALL, UNEVALUATED, assert_same, resume, train

import purejaxppo
from purejaxppo import cpu, executables, machine, ppo
from purejaxppo import train as trainer_module
from purejaxppo.envs import is_shipped, register
from purejaxppo.executables import Executable, fingerprint

pytestmark = pytest.mark.on_cpus
IS_OURS = executables._is_ours


@contextlib.contextmanager
def setting(name, value):
    """One of JAX's."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where programs are kept, as if these were processes of the command line, and no code just written."""
    monkeypatch.setattr(executables, "_is_ours", lambda: True)
    monkeypatch.setattr(purejaxppo, "started", time.time() + 10)
    cache = tmp_path / "cache"
    with (
        setting("jax_compilation_cache_dir", str(cache)),
        setting("jax_persistent_cache_min_compile_time_secs", 0.0),
    ):
        compilation_cache.reset_cache()
        yield cache / "executables"
    compilation_cache.reset_cache()


def names(folder):
    """The efforts of what is kept."""
    return sorted(path.name.rpartition("-")[2] for path in folder.iterdir())


def forbid_tracing(monkeypatch, *also):
    def traced(*_, **__):
        raise AssertionError("traced")

    for module, name in ((ppo, "iterate"), (trainer_module, "evaluate"), *also):
        monkeypatch.setattr(module, name, traced)


def test_again_is_loaded_and_trains_the_same(tmp_path, monkeypatch, capsys):
    """Where it goes on, with other seeds, steps and hyperparameters too."""
    assert train(tmp_path / "whole", 8) == 0
    assert "\ncompiled in" in capsys.readouterr().out
    forbid_tracing(monkeypatch, (ppo, "init"))
    assert train(tmp_path / "parts", 4) == 0
    assert "\nloaded as compiled before, in" in capsys.readouterr().out
    assert resume(tmp_path / "parts", "--total-timesteps", 8 * PER_ITERATION) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    for number, given in enumerate((["--seed", "7"], ["--gamma", "0.9"])):
        assert train(tmp_path / str(number), 5, *given) == 0
    with pytest.raises(AssertionError, match="traced"):
        train(tmp_path / "other", 4, "--activation", "relu")


@pytest.mark.parametrize(
    "given", [["--num-seeds", "3"], ["--num-envs", "8", "--shard", "environments"]]
)
def test_programs_of_several_devices_are_kept(tmp_path, monkeypatch, given):
    batch = 128 if "--shard" in given else PER_ITERATION
    given = [*given, *UNEVALUATED]
    assert train(tmp_path / "first", 2, *given, batch=batch) == 0
    forbid_tracing(monkeypatch)
    assert train(tmp_path / "again", 2, *given, batch=batch) == 0
    assert_same(tmp_path / "first", tmp_path / "again")


def test_a_long_training_has_a_program_of_its_own(tmp_path, monkeypatch, folder):
    """How long is known without a trace."""
    assert train(tmp_path / "short", 2, *UNEVALUATED) == 0
    assert names(folder) == ["quick", "quick"]  # init, and the chunk
    assert train(tmp_path / "full", 2, "--compile-effort", "full", *UNEVALUATED) == 0
    assert names(folder) == ["full", "quick", "quick"]
    chunk = max(folder.glob("*-quick"), key=lambda path: path.stat().st_size)
    long = pickle.loads(zlib.decompress(chunk.read_bytes()))[0]
    forbid_tracing(monkeypatch)
    monkeypatch.setattr("purejaxppo.loop.Training._train", lambda self: found.append(self.layout))
    found = []
    for iterations in (int(long) - 1, int(long) + 1):
        assert train(tmp_path / str(iterations), iterations, *UNEVALUATED) == 0
    assert [each["effort"] for each in found] == ["quick", "full"]


def test_damaged_programs_are_compiled_anew(tmp_path, folder):
    assert train(tmp_path / "first", 2, *UNEVALUATED) == 0
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for path, content in before.items():
        path.write_bytes(content[:-40])
    assert train(tmp_path / "again", 2, *UNEVALUATED) == 0
    assert_same(tmp_path / "first", tmp_path / "again")
    assert {path: path.read_bytes() for path in folder.iterdir()}.keys() == before.keys()
    assert all(pickle.loads(zlib.decompress(path.read_bytes())) for path in folder.iterdir())


def test_environments_of_a_user_are_not_kept(tmp_path, monkeypatch, folder):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert train(tmp_path / "run", 2, "--env", "mine:MyEnv", *UNEVALUATED) == 0
    assert not folder.exists()


def test_a_name_of_a_suite_may_be_a_user_s():
    register("playground/Mine", object)
    for name, shipped in (
        ("CartPole-v1", True),
        ("ant", True),
        ("playground/CheetahRun", True),
        ("playground/Another", True),
        ("playground/Mine", False),
        ("mine:MyEnv", False),
    ):
        assert is_shipped(name) == shipped, name


def compiled(function, key, *arguments):
    """An Executable of a function, and the program."""
    made = Executable(jax.jit(function), arguments, "full", 1, {}, jax.devices()[:1], key)
    with ThreadPoolExecutor() as threads:
        return made, made.start(threads).result()


def test_what_calls_a_library_is_not_kept(folder):
    one = jnp.eye(3)
    for function, kept in ((jnp.linalg.cholesky, []), (lambda x: jnp.sin(x) @ x, ["full"])):
        _, program = compiled(function, "key", one)
        np.testing.assert_allclose(program(one), function(one))
        assert (names(folder) if folder.exists() else []) == kept


def test_what_a_program_takes_of_memory_is_kept_with_it(folder):
    made = [compiled(lambda x: jnp.cumsum(x)[:5], "key", jnp.ones(1000))[0] for _ in range(2)]
    assert [each.loaded for each in made] == [False, True]
    assert made[0].num_bytes == made[1].num_bytes
    assert made[0].num_bytes >= 4 * 1005  # of the argument and the result, at least


def test_what_is_lost_is_compiled_and_kept_again(folder):
    """JAX's cache has no copy, which could not be written down again without its kernels."""
    one = jnp.ones(5)
    for key in ("one", "other"):
        made, program = compiled(lambda x: jnp.cos(x) * 3, key, one)
        np.testing.assert_allclose(program(one), jnp.cos(one) * 3)
        assert not made.loaded
    (folder / "one-full").unlink()
    for loaded in (False, True):
        made, program = compiled(lambda x: jnp.cos(x) * 3, "one", one)
        np.testing.assert_allclose(program(one), jnp.cos(one) * 3)
        assert made.loaded == loaded
    assert not list(folder.parent.glob("jit_program_*"))


def test_other_arguments_are_another_program(folder):
    for argument, loaded in ((jnp.ones(3), False), (jnp.ones(3), True), ((jnp.ones(3),), False)):
        made, program = compiled(lambda x: jnp.sinh(jax.tree.leaves(x)[0]), "key", argument)
        np.testing.assert_allclose(program(argument), jnp.sinh(jnp.ones(3)))
        assert made.loaded == loaded
    assert names(folder) == ["full"]


def test_what_cannot_be_loaded_is_compiled(folder):
    """As where XLA refuses what a file has."""
    one = jnp.ones(2)
    compiled(lambda x: jnp.log(x), "key", one)
    kept = list(pickle.loads(zlib.decompress((folder / "key-full").read_bytes())))
    kept[-1] = kept[-1][:-10]
    (folder / "key-full").write_bytes(zlib.compress(pickle.dumps(tuple(kept))))
    made, program = compiled(lambda x: jnp.log(x), "key", one)
    assert not made.loaded
    np.testing.assert_allclose(program(one), jnp.log(one))


def test_a_folder_that_is_not_ours_is_read(folder, monkeypatch):
    def refused(*_):
        raise PermissionError

    compiled(lambda x: x * 2, "key", jnp.ones(2))
    monkeypatch.setattr(os, "utime", refused)
    assert compiled(lambda x: x * 2, "key", jnp.ones(2))[0].loaded


def test_the_latest_stay(folder, monkeypatch):
    compiled(lambda x: x * 2, "0", jnp.ones(2))
    size = (folder / "0-full").stat().st_size
    monkeypatch.setattr(executables, "_MOST_BYTES", int(2.5 * size))
    for number in range(1, 4):
        compiled(lambda x: x * 2, str(number), jnp.ones(2))
        os.utime(folder / f"{number}-full", (number, number))
        compiled(lambda x: x * 2, "0", jnp.ones(2))  # which is used again and again
    assert sorted(path.name for path in folder.iterdir()) == ["0-full", "3-full"]


@pytest.mark.parametrize("fails", ["os.replace", "pathlib.Path.write_bytes"])
def test_a_full_disk_is_no_matter(monkeypatch, folder, fails):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fails, full)
    _, program = compiled(lambda x: jnp.tan(x), "key", jnp.ones(2))
    np.testing.assert_allclose(program(jnp.ones(2)), jnp.tan(jnp.ones(2)))
    assert not list(folder.iterdir())


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that programs are made of, with data beside its code."""
    (tmp_path / "brax" / "assets").mkdir(parents=True)
    for name in ("__init__.py", "assets/ant.xml", "assets/ant.pyc"):
        (tmp_path / "brax" / name).write_text("one")
        os.utime(tmp_path / "brax" / name, (1, 1))
    brax = types.SimpleNamespace(__path__=[str(tmp_path / "brax")])
    monkeypatch.setitem(sys.modules, "brax", brax)
    executables._code.cache_clear()
    yield tmp_path / "brax"
    executables._code.cache_clear()


def write(path, text, time):
    path.write_text(text)
    os.utime(path, (time, time))
    executables._code.cache_clear()
    return fingerprint("chunk", 1)


def test_fingerprints_tell_programs_apart(package, monkeypatch):
    """By what they are made of, by the code that is loaded, the device, and how XLA is set."""
    first = fingerprint("chunk", 1)
    found = [first, fingerprint("chunk", 2), fingerprint("init", 1)]
    for owner, name, value in (
        (machine, "versions", lambda: {"jax": "0"}),
        (machine, "device_name", lambda: "another"),
        (machine, "num_cores", lambda: 77),
        (cpu, "features", lambda: "flags: none"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            found.append(fingerprint("chunk", 1))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        found.append(fingerprint("chunk", 1))
    with setting("jax_default_matmul_precision", "highest"):
        found.append(fingerprint("chunk", 1))
    for name in ("__init__.py", "assets/ant.xml"):
        found.append(write(package / name, "two", time=2))
        found.append(write(package / name, "three", time=2))
        assert write(package / name, "one", time=1) == first
    assert None not in found
    assert len(set(found)) == len(found)
    assert write(package / "assets" / "ant.pyc", "two", time=2) == first


def test_files_of_no_package_count_where_they_are_loaded(package, monkeypatch):
    monkeypatch.setattr(purejaxppo, "__path__", [str(package.parent / "purejaxppo")])
    path = package.parent / "purejaxppo_torso.py"
    before = write(path, "one", time=1)
    module = types.ModuleType("purejaxppo_torso")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "purejaxppo_torso", module)
    loaded = write(path, "one", time=1)
    assert len({before, loaded, write(path, "two", time=1), None}) == 4
    module.__file__ = str(path.parent / "archive.zip" / "purejaxppo_torso.py")
    executables._code.cache_clear()
    assert fingerprint() is None


def test_what_is_lazy_stays_so(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError("it is loaded")

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    executables._code.cache_clear()
    assert fingerprint() is not None
    executables._code.cache_clear()


def test_nothing_is_kept_of_code_that_changes_meanwhile(package):
    """It may have been read before."""
    assert fingerprint() is not None
    assert write(package / "__init__.py", "two", time=purejaxppo.started + 1) is None
    assert write(package / "__init__.py", "two", time=purejaxppo.started - 60) is not None


def test_nothing_is_kept_where_it_may_be_another(monkeypatch):
    assert fingerprint() is not None
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_is_ours", lambda: False)
        assert fingerprint() is None
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "flags.txt")  # whose contents nobody knows
        assert fingerprint() is None
    for name, value in (("default_backend", "gpu"), ("process_count", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(jax, name, lambda value=value: value)
            assert fingerprint() is None
    for name, value in (
        ("jax_enable_compilation_cache", False),
        ("jax_compilation_cache_dir", "gs://bucket"),
        ("jax_compilation_cache_dir", None),
    ):
        with setting(name, value):
            assert fingerprint() is None


@pytest.mark.parametrize(
    ("spec", "file", "ours"),
    [
        ("purejaxppo.run", "/lib/purejaxppo/run.py", True),
        (None, "/bin/purejaxppo", True),
        ("pytest.__main__", "/lib/pytest/__main__.py", False),
        (None, "/home/me/train.py", False),
        (None, None, False),
    ],
)
def test_only_the_command_line_keeps(monkeypatch, spec, file, ours):
    main = types.SimpleNamespace(__spec__=spec and types.SimpleNamespace(name=spec), __file__=file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert IS_OURS() == ours


def test_commands_find_what_others_compiled(tmp_path):
    """However they are started, and where one goes on."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "there")}
    module = [sys.executable, "-m", "purejaxppo.run"]
    script = [str(Path(sys.executable).with_name("purejaxppo")), "train"]
    begun = [*SMALL.split(), *UNEVALUATED, "--total-timesteps", "32", "--run-dir"]
    gone_on = ["--total-timesteps", "64", "--resume"]
    for command, options, name, said in (
        (module, begun, "first", "\ncompiled in"),
        (script, begun, "again", "\nloaded as compiled before"),
        (module, gone_on, "again", "\nloaded as compiled before"),
    ):
        given = [*command, *options, str(tmp_path / name)]
        done = subprocess.run(given, env=environment, capture_output=True, text=True, check=True)
        assert said in done.stdout
    assert resume(tmp_path / "first", "--total-timesteps", 64) == 0
    assert_same(tmp_path / "first", tmp_path / "again")
