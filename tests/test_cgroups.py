"""Limits of containers and batch systems."""

import pytest

from purejaxppo import cgroups

GIB = 2**30


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes what a system says of this process's groups, and of each of them."""
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "_MINE", tmp_path / "mine")

    def write(mine, groups):
        (tmp_path / "mine").write_text(mine)
        for group, files in groups.items():
            place = tmp_path / "groups" / group
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(f"{text}\n")

    return write


def second_version(limit, taken, read, cores):
    """Files of a group."""
    stat = f"anon {taken - read}\ninactive_file {read}"
    return {
        "memory.max": limit,
        "memory.current": taken,
        "memory.stat": stat,
        "cpu.max": f"{cores} 100000",
    }


def test_a_container_has_its_own_group_alone(write):
    """Files that were read are no memory in use: the system lets go of them."""
    write("0::/\n", {"": second_version(8 * GIB, 7 * GIB, 6 * GIB, 250_000)})
    assert cgroups.free_memory() == 7 * GIB
    assert cgroups.num_cores() == 3


def test_the_tightest_limit_around_a_process_counts(write):
    """As in a batch system, which limits the job, and not its single tasks."""
    write(
        "0::/slurm/job/task\n",
        {
            "slurm": second_version("max", 60 * GIB, 0, "max"),
            "slurm/job": second_version(16 * GIB, 5 * GIB, 1 * GIB, 400_000),
            "slurm/job/task": second_version("max", 1 * GIB, 0, "max"),
        },
    )
    assert cgroups.free_memory() == 12 * GIB
    assert cgroups.num_cores() == 4


@pytest.mark.parametrize("place", ["docker/1f", ""])
def test_groups_of_the_first_version_are_read_too(write, place):
    """Where the process says it is, or where a container shows it."""
    memory = {
        "memory.limit_in_bytes": 4 * GIB,
        "memory.usage_in_bytes": 3 * GIB,
        "memory.stat": f"total_inactive_file {2 * GIB}",
    }
    cpu = {"cpu.cfs_quota_us": 50_000, "cpu.cfs_period_us": 100_000}
    write(
        "4:memory:/docker/1f\n2:cpu,cpuacct:/docker/1f\n0::/\n",
        {f"memory/{place}": memory, f"cpu/{place}": cpu},
    )
    assert cgroups.free_memory() == 3 * GIB
    assert cgroups.num_cores() == 1


def test_no_limit_is_none(write):
    cpu = {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100_000}
    write("4:memory:/\n2:cpu:/\n0::/\n", {"": second_version("max", GIB, 0, "max"), "cpu": cpu})
    assert cgroups.free_memory() is None
    assert cgroups.num_cores() is None


def test_other_systems_have_no_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "_MINE", tmp_path / "nothing")
    assert cgroups.free_memory() is None
    assert cgroups.num_cores() is None
