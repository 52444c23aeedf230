"""How the values of options are written, on the command line and in YAML, and read as their types."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
import types
from collections.abc import Iterable
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from purejaxppo.convolutions import CNN_LAYERS, CnnLayers

EnvArgs = tuple[tuple[str, Any], ...]

# Numbers that YAML 1.1 reads as texts.
_EXPONENT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


class ConfigError(ValueError):
    """An option that cannot be used. Its message is one line that a user can act on."""


def coerce(name: str, value: Any, hint: Any) -> Any:
    """The value as the option's type, or ConfigError."""
    try:
        return _convert(value, hint)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}: {value!r} is not {_describe(hint)}") from None


def _convert(value: Any, hint: Any) -> Any:
    if hint == EnvArgs:
        return tuple((str(k), parse_argument(v)) for k, v in dict(value).items())
    if get_origin(hint) in (Union, types.UnionType):
        first, second = get_args(hint)
        if get_origin(first) is Literal:
            return value if value in get_args(first) else _convert(value, second)
        return None if value is None else _convert(value, first)
    if hint == CnnLayers and isinstance(value, str):
        return parse_cnn_layers(value)
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            raise TypeError
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = (kinds[0],) * len(value)
        return tuple(_convert(item, kind) for item, kind in zip(value, kinds, strict=True))
    if get_origin(hint) is Literal:
        # YAML 1.1 reads off and no as false.
        value = "off" if value is False else value
        if value not in get_args(hint):
            raise ValueError
        return value
    if isinstance(value, bool) != (hint is bool) or (hint is str and not isinstance(value, str)):
        raise TypeError
    return parse_int(str(value)) if hint is int else hint(value)


def _describe(hint: Any) -> str:
    arguments = get_args(hint)
    if hint == EnvArgs:
        return f"name: value, each {_ARGUMENT}"
    if hint == CnnLayers:
        return f"one of {', '.join(CNN_LAYERS)}, or features x kernel x stride as 32x8x4,64x4x2"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in arguments if part is not types.NoneType)
    if get_origin(hint) is Literal:
        return f"{'one of ' * (len(arguments) > 1)}{', '.join(arguments)}"
    if get_origin(hint) is tuple:
        return "a list of " + {int: "whole numbers"}.get(arguments[0], "texts")
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, str(hint))


_ARGUMENT = "a number, a text, true, false, null or a list of them"


def parse_argument(value: Any) -> Any:
    """An environment's argument as YAML reads it, but 1e6 as a number and lists as tuples.

    Raises:
        TypeError: what can not be hashed, or written in a checkpoint.
    """
    if isinstance(value, list | tuple):
        return tuple(parse_argument(item) for item in value)
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return int(float(value)) if float(value).is_integer() else float(value)
    if not isinstance(value, int | float | str | None):
        raise TypeError
    return value


def thaw(value: Any) -> Any:
    """Tuples as lists, as YAML has them."""
    return [thaw(item) for item in value] if isinstance(value, tuple) else value


def to_json(value: Any) -> str:
    """Indented JSON, in which numbers that are not finite are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=2) + "\n"


def parse_env_args(items: Iterable[str]) -> EnvArgs:
    """name=value ... with values as YAML reads them.

    Raises:
        ValueError: an item without a name or without an equals sign, or no such value.
    """
    pairs = []
    for item in items:
        name, equals, text = item.partition("=")
        if not (name and equals):
            raise ValueError(f"{item!r} is not name=value")
        try:
            pairs.append((name, parse_argument(yaml.safe_load(text))))
        except (yaml.YAMLError, TypeError, ValueError):
            raise ValueError(f"{item}: must be {_ARGUMENT}") from None
    return tuple(pairs)


def parse_int(text: str) -> int:
    """A whole number, also written 1e6 or 1_000_000.

    Raises:
        ValueError: it is not whole.
    """
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"{text!r} is not a whole number")


def parse_none(text: str) -> None:
    """Raises ValueError for anything but none."""
    if text != "none":
        raise ValueError(f"{text!r} is not none")


def parse_bytes(text: str) -> int:
    """A size in bytes, written with a unit: 512MiB, 8GB.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


def parse_layers(text: str) -> tuple[int, ...]:
    """Widths separated by commas; nothing at all for no layers."""
    return tuple(parse_int(part) for part in text.split(",") if part.strip())


def parse_size(text: str) -> tuple[int, ...]:
    """Height and width, separated by a comma.

    Raises:
        ValueError: with fewer or more.
    """
    size = parse_layers(text)
    if len(size) != 2:
        raise ValueError(f"{text!r} is not HEIGHT,WIDTH")
    return size


def parse_flag(texts: list[str]) -> bool:
    """Of a flag that may be given alone, or with true or false.

    Raises:
        ValueError: with anything else.
    """
    if texts not in ([], ["true"], ["false"]):
        raise ValueError(f"{' '.join(texts)!r} is not true or false")
    return texts != ["false"]


def parse_cnn_layers(text: str) -> CnnLayers:
    """Convolutions by a name of theirs, or as 32x8x4,64x4x2: features x kernel x stride of each.

    Raises:
        ValueError: it is neither.
    """
    if text in CNN_LAYERS:
        return CNN_LAYERS[text]
    try:
        return _convert([part.split("x") for part in text.split(",")], CnnLayers)
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is not {_describe(CnnLayers)}") from None


def show_cnn_layers(layers: CnnLayers) -> str:
    """Convolutions as `parse_cnn_layers` reads them."""
    names = {known: name for name, known in CNN_LAYERS.items()}
    return names.get(layers, ",".join("x".join(map(str, layer)) for layer in layers))


def suggest(name: str, known: Iterable[str], most: int = 1) -> str:
    """A clause that names what is nearest to a misspelt name, or nothing."""
    lowered = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(lowered[n] for n in near)}?" if near else ""


def check_arguments(env: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for the first of an environment's arguments that is not known."""
    known = sorted(known)
    for argument in arguments:
        if argument not in known:
            option = "--backend or --env-args" if argument == "backend" else "--env-args"
            raise ConfigError(
                f"{option}: {env} has no argument {argument!r}{suggest(argument, known)} "
                f"(it has {', '.join(known)})"
            )
