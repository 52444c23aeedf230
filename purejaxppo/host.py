"""A training from settings to a filled run directory: what is trained, in which order, and where."""

from __future__ import annotations

import contextlib
import gc
import platform
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from purejaxppo import checkpoint, machine, processes, rundir
from purejaxppo.checkpoint import Checkpoint, Writer
from purejaxppo.config import Config, Settings, read_settings
from purejaxppo.display import Display
from purejaxppo.loggers import Tables, keep_rows
from purejaxppo.loop import Training
from purejaxppo.plan import suits_one_thread
from purejaxppo.report import write_reports
from purejaxppo.rundir import RunDirectory, check_options, options_of, write_config
from purejaxppo.sweep import Run, make_runs, make_settings_of, programs
from purejaxppo.trackers import Trackers
from purejaxppo.values import ConfigError

_MANY = 8  # programs, before whose layout, nearly a second each, something is said


def train(settings: Settings) -> int:
    """Trains all runs of valid settings, shows it, and fills the run directory.

    Returns:
        The exit status: 0, or 1 if every run diverged, or 128 and the signal that interrupted it.

    Raises:
        ConfigError: what cannot be known before the environment is: a name, an argument, a head
            that does not fit, a directory in use, a checkpoint that cannot be gone on with. Nothing
            has been compiled by then.
        OSError: the run directory cannot be written any more.
    """
    gc.disable()  # starting makes many objects and no garbage; a training that has compiled turns it on
    try:
        return _train(settings)
    finally:
        gc.enable()
        gc.unfreeze()  # or a process that trains again and again keeps all of it


def _train(settings: Settings) -> int:
    started = time.monotonic()
    groups = programs(make_runs(make_settings_of(settings), settings.run))
    runs = sorted((run for group in groups for run in group), key=lambda run: run.number)
    configs = [group[0].setting.config for group in groups]
    if address := settings.run.coordinator:
        Display().say(f"waits at {address} for the other processes, at most five minutes")
    machine.configure(settings.run, len(runs), one_thread=all(map(suits_one_thread, configs)))
    processes.check_same(rundir.common_options(settings))
    memory = machine.memory_for_arrays(settings.run.memory_limit)
    main = processes.is_main()
    display = Display(quiet=not main)
    if len(groups) > _MANY:
        display.say(f"first, {len(groups)} programs are laid out")
    with contextlib.ExitStack() as held:
        found = _checkpoints(settings, groups, held)
        trainings: list[Training] = []
        # No name but `found` may hold a checkpoint, whose arrays are the trainings' then, who let go of them.
        for number, (group, block) in enumerate(zip(groups, _blocks(found), strict=True)):
            trainings.append(Training(settings.run, group, display, memory, found[number], block))
            memory = memory.without(trainings[-1].program.external_bytes)
        saved = [each.facts if each else None for each in found]
        del found
        caveats = _caveats(trainings, saved)
        done = all(training.done for training in trainings)
        directory = _begin(settings, groups, saved, done, held)
        display.header(_header(directory, trainings, caveats))
        before = sum(training.wall_seconds for training in trainings)
        before = max(before, rundir.read_summary(directory.path).get("wall_seconds") or 0)
        if done:
            display.say("nothing left to train: --total-timesteps goes further")
            started = time.monotonic()
        try:
            facts, signal = _run(trainings, directory, caveats, display)
            facts["wall_seconds"] = before + time.monotonic() - started
            summary = write_reports(directory.path, facts, display.say) if main else None
        except BaseException as error:
            if isinstance(error, OSError) or any(map(directory.has_begun, range(len(groups)))):
                display.say(_how_to_go_on(settings, directory))
            elif settings.run.resume is None and main:
                rundir.discard_unused(directory.path)
            raise
    if summary is not None:
        display.results(summary, runs)
    display.say(f"written to {directory.path}")
    if signal:
        display.say(_how_to_go_on(settings, directory))
    processes.agree(0)  # the others wait for the report here, and not where JAX loses patience
    return 128 + signal if signal else int(len(facts["diverged_runs"]) == len(runs))


def _run(
    trainings: list[Training], directory: RunDirectory, caveats: list[str], display: Display
) -> tuple[dict[str, Any], int]:
    """Trains one program after another; returns what the tables do not say, and Interrupt.signal."""
    about = {
        "options": options_of(directory.settings),
        "versions": machine.versions(),
        "device": machine.device_name(),
        "caveats": caveats,
        "blocks": [training.program.plan.block for training in trainings],
    }
    swept = trainings[0].runs[0].setting.swept
    run = directory.settings.run
    trackers = _trackers(trainings, directory, display)
    kept_in = directory.path if processes.is_main() else None
    tables = Tables(kept_in, swept, run.resume is not None, trackers)
    with machine.Interrupt() as interrupt, tables:
        for number, training in enumerate(trainings):
            if interrupt.check():
                break
            if number:
                # The code of the program before. Linux gives a process room for some 70 of them.
                gc.unfreeze()
                gc.collect()
            if len(trainings) > 1 and not training.done:
                display.say(
                    f"program {number + 1} of {len(trainings)}: {training.program.description}"
                )
            with Writer(directory.checkpoints(number), run.keep, about) as writer:
                main = processes.is_main()
                training.run(tables, interrupt, writer if main else None, directory.path / "videos")
    seconds = sum(training.seconds for training in trainings)
    facts = {
        "steps_per_second": sum(training.steps for training in trainings) / max(seconds, 1e-9),
        "compile_seconds": sum(training.compile_seconds for training in trainings),
        "evaluation_seconds": sum(training.evaluation_seconds for training in trainings),
        "diverged_runs": sorted(run for training in trainings for run in training.diverged_runs),
        "interrupted": bool(interrupt.signal),
        "caveats": caveats,
        "versions": about["versions"],
        "device": about["device"],
    }
    return facts, interrupt.signal


def _trackers(
    trainings: list[Training], directory: RunDirectory, display: Display
) -> Trackers | None:
    """Those that --log names, of the runs that go on; None where there is nothing for them."""
    logs, resumed = directory.settings.run.log, directory.settings.run.resume is not None
    going_on = [training for training in trainings if not training.done]
    if not (logs and going_on and processes.is_main()):
        return None
    done = {
        run.number: training.iteration * training.config.batch_size
        for training in going_on
        for run in training.runs
        if resumed
    }
    runs = [run for training in going_on for run in training.runs]
    settings = options_of(directory.settings)
    return Trackers(logs, directory.path, runs, settings, done, display.say)


def _checkpoints(
    settings: Settings, groups: list[list[Run]], held: contextlib.ExitStack
) -> list[Checkpoint | None]:
    """The latest checkpoint of every program; None of one that has not begun.

    Raises:
        ConfigError: one is damaged, of other options or versions, or beyond --total-timesteps; or
            there is none at all of a training that has results; or another process is training.
    """
    if settings.run.resume is None:
        return [None] * len(groups)
    directory = RunDirectory(Path(settings.run.resume), settings)
    config = directory.path / "config.yaml"
    check_options(options_of(read_settings(file=config)), settings, config)
    processes.together(lambda: held.enter_context(rundir.lock(directory.path)))
    found: list[Checkpoint | None] = processes.together(
        lambda: [checkpoint.load(directory.checkpoints(i)) for i in range(len(groups))], in_all=True
    )
    processes.check_same({"resume": [each and each.sha256 for each in found]})
    if not any(found) and rundir.has_results(directory.path):
        raise ConfigError(f"{directory.path}: has results, and no checkpoint to go on from")
    for each, runs in zip(found, groups, strict=True):
        if each is not None:
            check_options(each.facts["options"], settings, each.path)
            _check_can_go_on(each, runs[0].setting.config, settings.run.any_version)
    return found


def _check_can_go_on(found: Checkpoint, config: Config, any_version: bool) -> None:
    """Raises ConfigError where a checkpoint is of other versions, or beyond the steps asked for."""
    if found.iteration > config.iterations:
        raise ConfigError(
            f"--total-timesteps {config.total_timesteps}: {found.path} has already trained "
            f"{found.iteration * config.batch_size}; give more"
        )
    changed = _changed_versions(found.facts)
    if changed and not any_version:
        raise ConfigError(
            f"{found.path}: made with other versions: {', '.join(changed)}; --any-version goes on all "
            "the same, and not bit for bit as it would have"
        )


def _changed_versions(facts: dict[str, Any]) -> list[str]:
    before = facts["versions"] | {"python": platform.python_version()}  # which computes nothing
    return _changes(before, machine.versions())


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what is another now; not what was not said before, as of an extra that was not used."""
    return [f"{k} {before[k]} -> {new}" for k, new in now.items() if before.get(k, new) != new]


def _begin(
    settings: Settings,
    groups: list[list[Run]],
    saved: list[dict[str, Any] | None],
    done: bool,
    held: contextlib.ExitStack,
) -> RunDirectory:
    """The run directory of this process: of one that does not report, it is thrown away.

    Args:
        done: nothing is left to train, and so to change.
    """

    def prepare() -> RunDirectory:
        if settings.run.resume is None:
            return rundir.create(settings, held)
        directory = RunDirectory(Path(settings.run.resume), settings)
        _cut_tables(directory.path, groups, saved)
        if not done:
            write_config(directory.path / "config.yaml", settings)
        return directory

    directory = processes.together(prepare)
    if directory is None:
        path = Path(held.enter_context(tempfile.TemporaryDirectory()))
        write_config(path / "config.yaml", settings)
        directory = RunDirectory(path, settings)
    return directory


def _cut_tables(path: Path, groups: list[list[Run]], saved: list[dict[str, Any] | None]) -> None:
    """Leaves the rows up to the checkpoint of each program; raises ConfigError where any are gone."""
    for name in ("metrics.csv", "evaluation.csv"):
        had = {
            run.number: facts["tables"][name] if facts else {"until": 0, "rows": 0}
            for runs, facts in zip(groups, saved, strict=True)
            for run in runs
        }
        keep_rows(path / name, had)


def _blocks(found: list[Checkpoint | None]) -> list[int | None]:
    """Runs vmapped at a time in each program, as a training that goes on had planned them."""
    planned = [each.facts["blocks"] for each in found if each and "blocks" in each.facts]
    return planned[0] if planned else [None] * len(found)


def _caveats(trainings: list[Training], saved: list[dict[str, Any] | None]) -> list[str]:
    """What makes a resumed training differ from one without interruption, now and before."""
    caveats = []
    for training, facts in zip(trainings, saved, strict=True):
        if facts is None:
            continue
        caveats += facts["caveats"]
        config, program = training.config, training.program
        if training.done:
            continue  # nothing is computed any more
        if program.external:
            caveats.append("not bit for bit: environments outside of the program begin anew")
        anneals = config.anneal_learning_rate or config.anneal_clip_eps or config.anneal_ent_coef
        if facts["iterations"] != config.iterations and anneals:
            caveats.append(
                f"what anneals was to end at iteration {facts['iterations']:,}: stretched, so not as "
                "if trained at once"
            )
        caveats += _changed_evaluations(facts.get("evaluation", {}), training.evaluation_facts)
        devices = program.plan.one_or_several
        before = facts.get("devices", devices)
        if before != devices:
            caveats.append(
                f"on {devices} of its devices instead of {before} XLA may round differently"
            )
        now = training.layout | {"device": machine.device_name()}
        changes = _changes(facts, now) + _changed_versions(facts)
        caveats += [f"not bit for bit: {change}" for change in changes]
    return list(dict.fromkeys(caveats))


def _changed_evaluations(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, where there were and are any."""
    if not (before.get("episodes") and now["episodes"]):
        return []
    return [f"evaluations are not as those before: {change}" for change in _changes(before, now)]


def _how_to_go_on(settings: Settings, directory: RunDirectory) -> str:
    if not settings.run.keep:
        return "it cannot be gone on with: there are no checkpoints with --keep 0"
    named = settings.config.env
    own = f" --env {named}" if ":" in named else ""
    together = ", with the flags of --distributed" if settings.run.distributed else ""
    path = shlex.quote(str(directory.path))
    return f"to go on: python -m purejaxppo.run --resume {path}{own}{together}"


def _header(
    directory: RunDirectory, trainings: list[Training], caveats: list[str]
) -> dict[str, str]:
    run, program = directory.settings.run, trainings[0].program
    config, env = program.config, program.trainer.setup.env
    steps = config.iterations * config.batch_size
    rounded = "" if steps == config.total_timesteps else f", up from {config.total_timesteps:,}"
    resets = "a new start state at every reset"
    if program.external:
        resets = "the environments' own, one step late"
    elif size := env.pool_size:
        resets = (
            f"from a pool of {size} start state{'s'[: size > 1]} for each environment, drawn anew for "
            "every rollout"
        )
    num_runs = sum(len(training.runs) for training in trainings)
    last = f" ... {run.seed + run.num_seeds - 1}" if run.num_seeds > 1 else ""
    seeds = f"seed {run.seed}{last}, in blocks of {program.plan.block}"
    if program.plan.padded > len(program.runs):  # as where a run of a sweep goes on alone
        seeds += f": {program.plan.padded} are computed, for the same bits in every block"
    header = {
        "environment": f"{config.env}: {env.observation_space} -> {env.action_space}",
        "resets": resets,
        "parameters": f"{program.num_params:,}",
        "steps": f"{steps:,} in {config.iterations:,} iterations of {config.num_envs} environments"
        f" x {config.num_steps} steps{rounded}",
        "runs": f"{num_runs}, {seeds}",
        "device": f"{program.plan.num_devices * program.plan.shards} x {machine.device_name()}"
        + ", which share the environments of a run" * (program.plan.shards > 1),
        "memory": f"{machine.gib(program.expected_bytes)} planned beside the program itself",
        "directory": str(directory.path),
    }
    if program.external:
        header["host"] = (
            "environments step in C++ threads, called by the compiled program; their state cannot be "
            "saved, so --resume begins new episodes"
        )
    if jax.default_backend() == "gpu" and not run.deterministic:
        header["resume"] = "not promised bit for bit on a GPU without --deterministic"
    if run.resume:
        done = sum(training.iteration for training in trainings)
        total = sum(training.config.iterations for training in trainings)
        of_all = " of all programs" * (len(trainings) > 1)
        where = f"after iteration {done:,} of {total:,}{of_all}" if done else "from the beginning"
        header["resumed"] = "; ".join([where, *caveats])
    if run.sweep:
        header["sweep"] = f"{' '.join(run.sweep)}: {num_runs // run.num_seeds} settings"
    if len(trainings) > 1:
        header["programs"] = f"{len(trainings)}, one after another; these lines are of the first"
    return header
