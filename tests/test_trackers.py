"""TensorBoard and Weights & Biases have what the tables have, and never stop a training."""

import csv
import dataclasses
import json
import os
import resource
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import train

from purejaxppo import trackers
from purejaxppo.config import Config, Hyper
from purejaxppo.sweep import Run, Setting
from purejaxppo.trackers import Trackers

RUNS = [Run(i, 10 + i, Setting({"gamma": 0.9 + i / 100}, Config(), Hyper())) for i in range(2)]


def rows_of(run, steps, **values):
    return [{"run": run, "seed": 9, "iteration": s // 8, "env_steps": s} | values for s in steps]


def begin(names, path, said, done=None):
    return Trackers(names, path, RUNS, {"num_envs": 8}, done or {}, said.append)


def scalars(path, tag):
    events = EventAccumulator(str(path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_has_what_the_tables_have(tmp_path):
    run_dir = tmp_path / "run"
    options = "--env CartPole-v1 --total-timesteps 128 --eval-every 64"
    options += " --eval-episodes 3 --num-seeds 2 --log tensorboard --run-dir"
    assert train(*options.split(), str(run_dir)) == 0
    for name, prefix in (("metrics.csv", ""), ("evaluation.csv", "evaluation/")):
        with (run_dir / name).open() as file:
            rows = list(csv.DictReader(file))
        curves = set(rows[0]) - {"run", "seed", "iteration", "env_steps"}
        assert len(curves) >= 4
        for run in ("0", "1"):
            for curve in curves:
                values = [(row["env_steps"], row[curve]) for row in rows if row["run"] == run]
                expected = [(int(steps), float(value)) for steps, value in values if value]
                found = scalars(run_dir / "tensorboard" / f"run{run}", prefix + curve)
                assert len(found) == len(expected) >= 1
                np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_tensorboard_shows_nothing_twice_after_a_resumption(tmp_path):
    for done, steps in ((None, (8, 16, 24)), ({0: 16, 1: 16}, (24, 32))):
        tracked = begin(("tensorboard",), tmp_path, [], done)
        tracked.write("", rows_of(0, steps, loss=1.0 + len(steps)))
        tracked.close()
    assert scalars(tmp_path / "tensorboard" / "run0", "loss") == [(8, 4), (16, 4), (24, 3), (32, 3)]


def test_tensorboard_shows_nothing_twice_where_a_training_begins_anew(tmp_path):
    for done, steps in ((None, (8, 16)), ({0: 0, 1: 0}, (8, 16, 24))):
        tracked = begin(("tensorboard",), tmp_path, [], done)
        tracked.write("", rows_of(0, steps, loss=1.0 + len(steps)))
        tracked.close()
    assert scalars(tmp_path / "tensorboard" / "run0", "loss") == [(8, 4), (16, 4), (24, 4)]


def test_tensorboard_takes_more_runs_than_a_process_may_have_files(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    runs, said = [dataclasses.replace(RUNS[0], number=i) for i in range(100)], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 50, limits[1]))
    try:
        tracked = Trackers(("tensorboard",), tmp_path, runs, {}, {}, said.append)
        for steps in (8, 16):
            tracked.write("", [row for run in runs for row in rows_of(run.number, [steps], loss=1)])
        tracked.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert said == []
    assert scalars(tmp_path / "tensorboard" / "run99", "loss") == [(8, 1), (16, 1)]


def test_tensorboard_has_the_films(tmp_path):
    gif = tmp_path / "film.gif"
    gif.write_bytes(b"GIF89a and so on")
    said = []
    tracked = begin(("tensorboard",), tmp_path, said)
    tracked.video(1, 24, gif)
    tracked.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "run1"))
    events.Reload()
    (image,) = events.Images("video")
    assert (image.step, image.encoded_image_string) == (24, b"GIF89a and so on")
    assert said == []


def wandb_records(path):
    """The records of an offline run: LevelDB's log format, which wandb's own core reads."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_has_what_the_tables_have(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no account there
    said, run_dir = [], tmp_path / "sweep"
    run_dir.mkdir()
    tracked = begin(("wandb",), run_dir, said)
    nan = float("nan")
    tracked.write("", rows_of(0, (8, 16), loss=2.5, **{"sweep.gamma": "0.9"}))
    tracked.write("", rows_of(1, (8,), loss=3.5, kl=nan))
    tracked.write("evaluation/", rows_of(1, (16,), return_mean=7.0))
    tracked.close()
    sys.modules["wandb"].teardown()  # as at the end of the process: its core writes files later
    assert said == []
    found = {}
    for path in run_dir.glob("wandb/offline-run-*/*.wandb"):
        records = list(wandb_records(path))
        (about,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        assert (about.project, about.run_group) == ("purejaxppo", "sweep")
        config = {item.key: json.loads(item.value_json) for item in about.config.update}
        rows = [r.history.item for r in records if r.WhichOneof("record_type") == "history"]
        named = [
            {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in rows
        ]
        found[about.display_name] = (
            config,
            [{k: v for k, v in row.items() if not k.startswith("_")} for row in named],
        )
    assert set(found) == {"sweep-run0", "sweep-run1"}
    config, rows = found["sweep-run0"]
    assert (config["num_envs"], config["gamma"], config["seed"]) == (8, 0.9, 10)
    assert rows == [{"loss": 2.5, "env_steps": 8}, {"loss": 2.5, "env_steps": 16}]
    expected = [{"loss": 3.5, "env_steps": 8}, {"evaluation/return_mean": 7.0, "env_steps": 16}]
    assert found["sweep-run1"][1] == expected


class Broken:
    """Fails at the second rows."""

    def __init__(self, *_):
        self.rows = 0

    def write(self, kind, rows):
        self.rows += 1
        if self.rows > 1:
            raise OSError(28, "No space left on device")

    def close(self):
        raise AssertionError("it was left alone")


def test_one_that_fails_is_said_once_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Broken)
    said = []
    tracked = begin(("wandb", "tensorboard"), tmp_path, said)
    for steps in (8, 16, 24):
        tracked.write("", rows_of(0, (steps,), loss=1.0))
    tracked.close()
    assert len(said) == 1
    assert "--log wandb stops, the training goes on: OSError: [Errno 28] No space left" in said[0]
    assert len(scalars(tmp_path / "tensorboard" / "run0", "loss")) == 3


OLD = SimpleNamespace(login=lambda: False, __version__="0.29.0")


@pytest.mark.parametrize(("module", "reason"), [(None, "wandb"), (OLD, "0.29.0 is older than")])
def test_one_that_is_not_installed_or_too_old_is_said(tmp_path, monkeypatch, module, reason):
    monkeypatch.setitem(sys.modules, "wandb", module)
    said = []
    tracked = begin(("wandb",), tmp_path, said)
    tracked.write("", rows_of(0, (8,), loss=1.0))
    (line,) = said
    assert reason in line
    assert "pip install 'purejaxppo[wandb]'" in line
