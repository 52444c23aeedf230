"""The commands: to train, and to make use of what was trained."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import tyro

from purejaxppo import __version__, envs, machine, processes, report, rundir, values
from purejaxppo.config import Settings, our_name, shipped_config, suite_defaults
from purejaxppo.convolutions import CnnLayers
from purejaxppo.display import Display
from purejaxppo.host import train
from purejaxppo.policy import load_all_policies, load_policy, play
from purejaxppo.rundir import RunDirectory
from purejaxppo.validation import require, validate_run
from purejaxppo.values import ConfigError, EnvArgs

_DESCRIPTION = """Train PPO agents. Options are laid over the tuned configuration of the environment
where it has one, or over --config FILE. Whole numbers may be written 1e6 or 1_000_000."""


# A flag that may also be left open takes true or false; its opposite is written as others are.
_WORDS = {"--no-shared-torso": ["--shared-torso", "false"]}

Command = Callable[[list[str]], int]

# A process that ends need not look for garbage in all that it has imported: 0.3 s.
atexit.register(gc.freeze)


def guarded(command: Command) -> Command:
    """The command with one line on stderr where it fails, and its exit status.

    2 for wrong input, 1 where the system refuses, 130 after Ctrl-C.
    """

    @functools.wraps(command)
    def run(arguments: list[str]) -> int:
        if isinstance(sys.stdout, io.TextIOWrapper):  # which may lack a letter of a path
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = command(arguments)
            sys.stdout.flush()
            return status
        except ConfigError as error:
            print(f"purejaxppo: error: {error}", file=sys.stderr)
            status = 2
        except BrokenPipeError:  # as of `| head`: nobody reads on, also not what is still buffered
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        except OSError as error:
            print(f"purejaxppo: error: {error}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 130
        except Exception as error:
            if lacking := machine.lacks_memory(error):
                print(f"purejaxppo: error: {lacking}", file=sys.stderr)
            elif not processes.are_several():
                raise
            else:
                traceback.print_exc()  # as of an operation that another process has left
            status = 1
        processes.leave(status)
        return status

    return run


def main(arguments: list[str]) -> int:
    """One of the commands; returns the exit status."""
    commands: dict[str, Command] = {
        "train": train_command,
        "evaluate": evaluate_command,
        "export": export_command,
        "extract": extract_command,
        "render": render_command,
        "report": report_command,
        "envs": envs_command,
    }
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    usage = (
        f"usage: purejaxppo {{{','.join(commands)}}} [options]; --help after a command explains it"
    )
    answers = {"-h": usage, "--help": usage, "--version": f"purejaxppo {__version__}"}
    if arguments and arguments[0] in answers:
        print(answers[arguments[0]])
        return 0
    if arguments:
        name = arguments[0]
        hint = values.suggest(name, commands)
        print(f"purejaxppo: error: unknown command {name!r}{hint}", file=sys.stderr)
    print(usage, file=sys.stderr)
    return 2


@guarded
def envs_command(arguments: list[str]) -> int:
    """Lists what can be trained."""
    parser = argparse.ArgumentParser(prog="purejaxppo envs", description=envs_command.__doc__)
    parser.parse_args(arguments)
    for name in envs.list_environments():
        print(f"{name}  {_origin(name)}".rstrip())
    print("envpool/NAME  whatever EnvPool calls NAME (an extra), such as envpool/Pong-v5")
    return 0


def _origin(env: str) -> str:
    """Where the settings of an environment are from, its own or those of its suite."""
    own, common = shipped_config(env), suite_defaults(env)
    path = own or common
    said = path.read_text() if path is not None else ""
    if said.startswith("# Published"):
        return "published settings"
    if own is not None:
        return "tuned"
    return "tuned for its suite" if said.startswith("# Tuned") else ""


@guarded
def evaluate_command(arguments: list[str]) -> int:
    """Plays whole episodes with trained policies: always the same ones for a seed."""
    best = "parameters with the best evaluation, not the latest"
    parser = _parser("evaluate", evaluate_command, 1000, best)
    given = _checked(parser.parse_args(arguments))
    if given.run is not None:
        policies, left_out = [load_policy(given.run_dir, given.run, given.best, given.env)], 0
    else:
        directory = RunDirectory.open(given.run_dir, given.env)
        policies = load_all_policies(directory, given.best)
        left_out = directory.num_runs - len(policies)
    played = []
    with machine.Interrupt() as interrupt:
        for policy in policies:
            played.append((policy, play(policy, given.episodes, given.seed, given.sampled)))
            if interrupt.check():
                break
    display = Display()
    display.played(played, left_out)
    if len(played) < len(policies):
        display.say(f"stopped: {len(policies) - len(played)} runs were not played")
    return 128 + interrupt.signal if interrupt.signal else 0


@guarded
def export_command(arguments: list[str]) -> int:
    """Writes a trained policy in formats that need nothing of this package to run."""
    parser = _parser("export", export_command)
    parser.add_argument("--output", default="policy", help="directory to make (%(default)s)")
    given = parser.parse_args(arguments)
    # jax.export takes its time to import.
    from purejaxppo.export import export

    policy = load_policy(given.run_dir, given.run, given.best, given.env)
    for path in export(policy, Path(given.output)):
        Display().say(f"written: {path}")
    return 0


@guarded
def extract_command(arguments: list[str]) -> int:
    """Makes a run directory of its own of one run of a sweep."""
    parser = _parser("extract", extract_command, best="the run with the best evaluation")
    parser.add_argument("--output", required=True, help="directory to make")
    given = parser.parse_args(arguments)
    if given.best and given.run is not None:
        raise ConfigError(f"--run {given.run} and --best both say which run")
    directory = RunDirectory.open(given.run_dir, given.env)
    extracted = rundir.extract(directory, directory.choose(given.run, given.best), given.output)
    Display().say(f"written to {extracted.path}")
    return 0


@guarded
def render_command(arguments: list[str]) -> int:
    """Draws episodes of a trained policy as a GIF, or an MP4 where there is ffmpeg."""
    parser = _parser("render", render_command, episodes=5)
    parser.add_argument("--output", help="file to write, .gif or .mp4 (RUN_DIR/videos/run0.gif)")
    given = _checked(parser.parse_args(arguments))
    from purejaxppo.render import render

    policy = load_policy(given.run_dir, given.run, given.best, given.env)
    path = Path(given.run_dir) / "videos" / f"run{policy.run.number}.gif"
    if given.output is not None:
        path = Path(given.output)
    else:
        path.parent.mkdir(exist_ok=True)
    returns = render(policy, path, given.episodes, given.seed, given.sampled)
    Display().say(f"returns {', '.join(f'{x:g}' for x in returns)}; written: {path}")
    return 0


def _parser(
    name: str,
    command: Command,
    episodes: int | None = None,
    best: str = "parameters with the best evaluation, not the latest; of the best run without --run",
) -> argparse.ArgumentParser:
    """Of a command on what a run directory has learned, with a number of episodes if it plays."""
    parser = argparse.ArgumentParser(prog=f"purejaxppo {name}", description=command.__doc__)
    parser.add_argument("run_dir")
    parser.add_argument("--run", type=int, help="number of one run of a sweep")
    parser.add_argument("--best", action="store_true", help=best)
    parser.add_argument("--env", help="repeats my_module:MyEnv, to allow that it is imported")
    if episodes is not None:
        default = {"type": _whole_number, "help": "(%(default)s)"}
        parser.add_argument("--episodes", default=episodes, **default)
        parser.add_argument("--seed", default=0, **default)
        sampled = "sample the actions, or not; by default as the training evaluated"
        parser.add_argument("--sampled", action=argparse.BooleanOptionalAction, help=sampled)
    return parser


def _whole_number(text: str) -> int:
    try:
        return values.parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(given: argparse.Namespace) -> argparse.Namespace:
    """The arguments, with `sampled` as the training evaluated where it is not given.

    Raises:
        ConfigError: episodes or seed are out of range, or it is no run directory.
    """
    require(given.episodes >= 1, "episodes", given.episodes, "at least 1")
    require(0 <= given.seed < 2**32, "seed", given.seed, "in 0 ... 2**32 - 1")
    if given.sampled is None:
        given.sampled = RunDirectory.open(given.run_dir, given.env).settings.run.eval_sampled
    return given


@guarded
def report_command(arguments: list[str]) -> int:
    """Draws the plots of run directories again, from their tables, and compares several."""
    parser = argparse.ArgumentParser(prog="purejaxppo report", description=report_command.__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="may be one that is still training")
    help_ = "plot of all of them, a panel for each environment (comparison.png, where there are several)"
    parser.add_argument("--output", type=Path, help=help_)
    given = parser.parse_args(arguments)
    compared = given.output or (Path("comparison.png") if len(given.run_dir) > 1 else None)
    reports, problems = [], []
    for run_dir in given.run_dir:
        try:
            reports.append(report.read_report(run_dir))
        except ValueError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    if not reports:
        raise ConfigError("; ".join(problems))
    try:
        if compared:
            ranked = report.compare(reports, compared)
        else:
            ranked = {reports[0].settings.config.env: reports[0].ranked}
    except (ValueError, OSError, ImportError) as error:  # of a plot's format, too
        raise ConfigError(str(error)) from None
    display, drawn = Display(), []
    for each in reports:
        try:
            report.draw(each)
            drawn.append(str(each.path))
        except (OSError, ImportError) as error:  # somebody else's directory, a damaged Matplotlib
            display.say(f"not drawn again: {error}")
    for env, results in ranked.items():
        statistics = [(r.name or str(reports[0].path), r.outcome.statistics()) for r in results]
        display.ranking(statistics, env, most=len(statistics))
    drawn += [str(compared)] * (compared is not None)
    display.say(f"drawn in {', '.join(drawn)}" if drawn else "nothing was drawn")
    for problem in problems:
        print(f"purejaxppo: error: left out: {problem}", file=sys.stderr)
    return 2 if problems else 0


@guarded
def train_command(arguments: list[str]) -> int:
    """Trains; returns the exit status: 0, or 1 if every run diverged, or 128 and a signal."""
    settings = parse(arguments)
    validate_run(settings.run)  # all else once it is known what is swept
    return train(settings)


def parse(arguments: list[str]) -> Settings:
    """Settings from the command line.

    Raises:
        ConfigError: --config cannot be used.
        SystemExit: status 0 after --help, 2 for an unknown option or a value of the wrong type.
    """
    known, rest = _given_first(arguments)
    if known.resume is not None:
        base = _to_go_on(known)
    else:
        base = envs.load_settings(known.env, known.config, known.backend)
    given = {n: tuple(getattr(known, n)) for n in ("sweep", "log") if getattr(known, n)}
    base = dataclasses.replace(base, run=dataclasses.replace(base.run, **given))
    rest = [x for a in rest for x in _WORDS.get(a.replace("_", "-"), [a])]
    if known.env_args:
        rest += ["--env-args", *known.env_args]
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            settings = tyro.cli(
                Settings,
                prog="python -m purejaxppo.run",
                description=_DESCRIPTION,
                default=base,
                args=rest,
                registry=_registry(),
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code == 0:
            raise
        raise ConfigError(_one_line(message.getvalue(), rest)) from None
    # Arguments of the environment, too, lie over those of its configuration.
    env_args = tuple((dict(base.config.env_args) | dict(settings.config.env_args)).items())
    return dataclasses.replace(
        settings, config=dataclasses.replace(settings.config, env_args=env_args)
    )


def _given_first(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """What decides on which settings all else is laid, and the arguments that are left.

    Raises:
        ConfigError: one of them lacks its value, or there are two --config.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--env")
    first.add_argument("--config", action="append")
    first.add_argument("--backend")
    first.add_argument("--resume")
    for name in ("--sweep", "--log", "--env-args"):  # of which Tyro would let the last win
        first.add_argument(name, action="extend", nargs="+")
    try:
        known, rest = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if known.config is not None:
        if len(known.config) > 1:
            raise ConfigError(f"--config {' and '.join(known.config)}: only one can be given")
        (known.config,) = known.config
    return known, rest


def _to_go_on(given: argparse.Namespace) -> Settings:
    """The settings that a training to be resumed was begun with."""
    if given.config is not None:
        raise ConfigError(f"--config {given.config}: --resume {given.resume} has its own")
    settings = RunDirectory.open(given.resume, given.env).settings
    if given.backend not in (None, settings.config.backend):
        raise ConfigError(
            f"--backend {given.backend}: {given.resume} has {settings.config.backend}"
        )
    run = dataclasses.replace(settings.run, resume=given.resume, run_dir=None)
    return dataclasses.replace(settings, run=run)


def _one_line(message: str, arguments: list[str]) -> str:
    """Tyro's boxed message as one line, with the nearest option for one it does not know."""
    known = ["--" + name.replace("_", "-") for name in ("help", "config", *Settings().to_dict())]
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name.replace("--no-", "--") not in known:
            meant = our_name(name[2:].replace("-", "_")).replace("_", "-")
            return f"unknown option {name}{values.suggest('--' + meant, known)}"
    # A box of lines, or of hyphens on an ASCII terminal: a title, what is wrong, what --help says.
    lines = [line.strip("│ ") for line in message.splitlines()][1:]
    body = itertools.dropwhile(_is_rule, lines)
    text = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body))
    # Of an option that may also be none, only what is wrong with the other way to write it.
    found = re.fullmatch(r"Error parsing (--\S+: )(?:no type matching .* - [^:]+: )?(.*)", text)
    return found[1] + found[2] if found else text


def _is_rule(line: str) -> bool:
    return line != "" and set(line) <= set("─-")


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How options of our own types are written: 1e6, none, 64,64 and size=8."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type is int:
            return _spec("INT", values.parse_int, str, int)
        if info.type is NoneType:  # what is not given, as in a sweep
            return _spec("none", values.parse_none, lambda _: "none", NoneType)
        if info.type == CnnLayers:
            shown = values.show_cnn_layers
            return _spec("NAME|INTxINTxINT,...", values.parse_cnn_layers, shown, tuple)
        if get_args(info.type) == (int, ...):
            return _spec("INT,...", values.parse_layers, _joined, tuple)
        if get_args(info.type) == (int, int):
            return _spec("HEIGHT,WIDTH", values.parse_size, _joined, tuple)
        if info.type == bool | None:  # which is given as other flags are, or with true or false
            return _spec(
                "[true|false]", values.parse_flag, lambda x: str(x).lower(), info.type, "*"
            )
        if info.type == EnvArgs:
            return _spec("NAME=VALUE", values.parse_env_args, _named, tuple, "*")
        return None

    return registry


def _joined(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _named(arguments: EnvArgs) -> str:
    return " ".join(f"{name}={value}" for name, value in arguments)


def _spec(
    metavar: str, parse: Callable[..., Any], show: Callable[[Any], str], kind: Any, nargs: Any = 1
) -> tyro.constructors.PrimitiveConstructorSpec:
    """Of an option with one value, or with a list of `nargs`."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=lambda texts: parse(texts[0] if nargs == 1 else texts),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [show(value)],
    )
