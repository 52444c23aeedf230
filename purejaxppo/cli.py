"""The commands: `purejaxppo train`, `purejaxppo report` and `purejaxppo envs`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import tyro

from purejaxppo import config as options
from purejaxppo import envs, report
from purejaxppo.config import ConfigError, Settings
from purejaxppo.display import Display
from purejaxppo.host import train

_DESCRIPTION = """Train PPO agents. Options are laid over the tuned configuration of the environment
where it has one, or over --config FILE. Whole numbers may be written 1e6 or 1_000_000."""


def main() -> int:
    """The console script; returns the exit status."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train_command,
        "report": report_command,
        "envs": envs_command,
    }
    arguments = sys.argv[1:]
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    usage = (
        f"usage: purejaxppo {{{','.join(commands)}}} [options]; --help after a command explains it"
    )
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    if arguments:
        name = arguments[0]
        hint = options.suggest(name, commands)
        print(f"purejaxppo: error: unknown command {name!r}{hint}", file=sys.stderr)
    print(usage, file=sys.stderr)
    return 2


def envs_command(arguments: list[str]) -> int:
    """Lists what can be trained."""
    parser = argparse.ArgumentParser(prog="purejaxppo envs", description=envs_command.__doc__)
    parser.parse_args(arguments)
    for name in envs.list_environments():
        path = options.shipped_config(name)
        published = path is not None and path.read_text().startswith("# Published")
        print(name + ("  published settings" if published else "  tuned" if path else ""))
    return 0


def report_command(arguments: list[str]) -> int:
    """Draws the plots of run directories again, from their tables, and compares several."""
    parser = argparse.ArgumentParser(prog="purejaxppo report", description=report_command.__doc__)
    parser.add_argument("run_dir", nargs="+", type=Path, help="may be one that is still training")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("comparison.png"),
        help="plot of a comparison (%(default)s)",
    )
    given = parser.parse_args(arguments)
    try:
        reports = [report.read_report(run_dir) for run_dir in given.run_dir]
        for each in reports:
            report.draw(each)
        ranked = reports[0].ranked
        if len(reports) > 1:
            ranked = report.compare(reports, given.output)
    except (ValueError, OSError) as error:  # of a plot's format, too
        print(f"purejaxppo: error: {error}", file=sys.stderr)
        return 2
    display = Display()
    display.ranking([(result.name, result.outcome.statistics()) for result in ranked])
    drawn = [str(each.path) for each in reports] + [str(given.output)] * (len(reports) > 1)
    display.say(f"drawn in {', '.join(drawn)}")
    return 0


def train_command(arguments: list[str]) -> int:
    """Trains; returns the exit status: 0, 1 if every run diverged, 2 for wrong input, 130 Ctrl-C."""
    try:
        settings = parse(arguments)
        options.validate_run(settings.run)  # all else once it is known what is swept
        return train(settings)
    except ConfigError as error:
        print(f"purejaxppo: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"purejaxppo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(arguments: list[str]) -> Settings:
    """Settings from the command line.

    Raises:
        ConfigError: --config cannot be used.
        SystemExit: status 0 after --help, 2 for an unknown option or a value of the wrong type.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--env")
    first.add_argument("--config")
    first.add_argument("--backend")
    # Tyro would let the last --sweep win.
    first.add_argument("--sweep", action="extend", nargs="+")
    try:
        known, rest = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    env = None if known.env is None else envs.full_name(known.env)
    base = options.load_settings(env, known.config, known.backend)
    if known.sweep is not None:
        run = dataclasses.replace(base.run, sweep=tuple(known.sweep))
        base = dataclasses.replace(base, run=run)
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
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


def _one_line(message: str, arguments: list[str]) -> str:
    """Tyro's boxed message as one line, with the nearest option for one it does not know."""
    known = ["--" + name.replace("_", "-") for name in ("help", "config", *Settings().to_dict())]
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name.replace("--no-", "--") not in known:
            return f"unknown option {name}{options.suggest(name, known)}"
    # The box holds a title, what is wrong, and after a rule what --help says.
    lines = [line.strip("│ ") for line in message.splitlines()]
    rule = next((i for i, line in enumerate(lines) if i and line.startswith("──")), len(lines))
    return " ".join(lines[1:rule])


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How options of our own types are written: 1e6, 64,64 and size=8."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type is int:
            return _spec("INT", options.parse_int, str, int)
        if get_args(info.type) == (int, ...):
            return _spec("INT,...", options.parse_layers, lambda x: ",".join(map(str, x)), tuple)
        if info.type == options.EnvArgs:
            return tyro.constructors.PrimitiveConstructorSpec(
                nargs="*",
                metavar="NAME=VALUE",
                instance_from_str=options.parse_env_args,
                is_instance=lambda value: isinstance(value, tuple),
                str_from_instance=lambda value: [f"{name}={item}" for name, item in value],
            )
        return None

    return registry


def _spec(
    metavar: str, from_text: Callable[[str], Any], to_text: Callable[[Any], str], kind: type
) -> tyro.constructors.PrimitiveConstructorSpec:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: from_text(texts[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [to_text(value)],
    )
