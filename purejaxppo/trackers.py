"""Where curves go beside the tables: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import inspect
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from purejaxppo.sweep import Run

Row = dict[str, Any]


class Tracker(Protocol):
    """Takes what the tables take."""

    def write(self, kind: str, rows: list[Row]) -> None:
        """Rows of runs: of metrics.csv, where kind is "", or of evaluation.csv."""
        ...

    def video(self, run: int, env_steps: int, path: Path) -> None:
        """A GIF of a run."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class TensorBoard:
    """Event files in `tensorboard/run0` and so on, for `tensorboard --logdir RUN_DIR`.

    Args:
        done: environment steps of a run after which these go on; what is there beyond is not shown.
    """

    def __init__(self, run_dir: Path, runs: list[Run], settings: Row, done: dict[int, int]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._pb: Any = event_pb2
        self._summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        self._record_writer, self._paths = RecordWriter, {}
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"
        for run in runs:
            directory = run_dir / "tensorboard" / f"run{run.number}"
            directory.mkdir(parents=True, exist_ok=True)
            steps = done.get(run.number, 0)
            # Names must differ, and their order is read.
            self._paths[run.number] = directory / f"{name}.{steps:012d}"
            events = [self._pb.Event(wall_time=time.time(), file_version="brain.Event:2")]
            if run.number in done:
                log = self._pb.SessionLog(status=self._pb.SessionLog.START)
                events.append(self._pb.Event(step=steps + 1, session_log=log))
            self._append(run.number, events)
        del settings

    def _append(self, run: int, events: list[Any]) -> None:
        """To a file that is open for no longer: a sweep may have more runs than a process may have files."""
        with self._paths[run].open("ab") as file:
            writer = self._record_writer(file)
            for event in events:
                writer.write(event.SerializeToString())

    def _event(self, env_steps: int, values: list[Any]) -> Any:
        summary = self._summary(value=values)
        return self._pb.Event(wall_time=time.time(), step=env_steps, summary=summary)

    def write(self, kind: str, rows: list[Row]) -> None:
        """Appends an event a row; see `Tracker`."""
        events = defaultdict(list)
        for row in rows:
            numbers = _numbers(row).items()
            values = [self._summary.Value(tag=kind + n, simple_value=x) for n, x in numbers]
            events[row["run"]].append(self._event(row["env_steps"], values))
        for run, own in events.items():
            self._append(run, own)

    def video(self, run: int, env_steps: int, path: Path) -> None:
        image = self._summary.Image(encoded_image_string=path.read_bytes(), colorspace=3)
        value = self._summary.Value(tag="video", image=image)
        self._append(run, [self._event(env_steps, [value])])

    def close(self) -> None:
        pass  # nothing is open


class WeightsAndBiases:
    """A run of Weights & Biases for each run, grouped, in `wandb/` of the run directory.

    Offline where there is no account at hand and WANDB_MODE says nothing; `wandb sync` uploads it.
    """

    def __init__(self, run_dir: Path, runs: list[Run], settings: Row, done: dict[int, int]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb, self._runs = wandb, {}
        if "prompt" not in inspect.signature(wandb.login).parameters:
            raise ImportError(f"wandb {wandb.__version__} is older than 0.30")
        account = wandb.login(prompt=False)
        mode = os.environ.get("WANDB_MODE") or (None if account else "offline")
        for run in runs:
            swept = {f"sweep.{name}": value for name, value in run.setting.swept.items()}
            self._runs[run.number] = wandb.init(
                project="purejaxppo",
                group=run_dir.name,
                name=f"{run_dir.name}-run{run.number}",
                config=settings | run.setting.swept | swept | {"seed": run.seed},
                dir=str(run_dir),
                mode=mode,  # type: ignore[arg-type]
                reinit="create_new",
                settings=wandb.Settings(silent=True, console="off"),
            )
            self._runs[run.number].define_metric("*", step_metric="env_steps")
        del done

    def write(self, kind: str, rows: list[Row]) -> None:
        for row in rows:
            numbers = {kind + name: value for name, value in _numbers(row).items()}
            self._runs[row["run"]].log(numbers | {"env_steps": row["env_steps"]})

    def video(self, run: int, env_steps: int, path: Path) -> None:
        film = self._wandb.Video(str(path), format="gif")
        self._runs[run].log({"video": film, "env_steps": env_steps})

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


class Trackers:
    """All that were asked for. One that fails is said once and left alone: the tables go on.

    Args:
        names: of TRACKERS.
        say: takes a line for the user.
        done: environment steps of each run that is gone on with.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        run_dir: Path,
        runs: list[Run],
        settings: Row,
        done: dict[int, int],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            self._try(name, lambda name=name: self._begin(name, run_dir, runs, settings, done))

    def _begin(self, name: str, *arguments: Any) -> None:
        self._trackers[name] = TRACKERS[name](*arguments)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except ImportError as error:
            self._leave(name, f"{error}; pip install 'purejaxppo[{name}]'")
        except Exception as error:  # whatever it is, it is not worth a training
            self._leave(name, f"{type(error).__name__}: {error}")

    def _leave(self, name: str, reason: str) -> None:
        self._trackers.pop(name, None)
        self._say(f"--log {name} stops, the training goes on: {' '.join(reason.split())}")

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try(name, lambda tracker=tracker: action(tracker))

    def write(self, kind: str, rows: list[Row]) -> None:
        """Rows of `metrics.csv`, where kind is "", or of `evaluation.csv`."""
        self._each(lambda tracker: tracker.write(kind, rows))

    def video(self, run: int, env_steps: int, path: Path) -> None:
        """A film of a run."""
        self._each(lambda tracker: tracker.video(run, env_steps, path))

    def close(self) -> None:
        """Ends them all."""
        self._each(lambda tracker: tracker.close())


def _numbers(row: Row) -> Row:
    """What of a row is a curve, and is there."""
    apart = {"run", "seed", "iteration", "env_steps"}
    return {
        name: value
        for name, value in row.items()
        if name not in apart and not name.startswith("sweep.") and value == value
    }
