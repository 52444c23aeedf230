"""Episodes of a trained policy as a GIF or an MP4, drawn without a screen or OpenGL."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from PIL import Image, ImageColor, ImageDraw, ImageFont

from purejaxppo.agent import Agent
from purejaxppo.config import ConfigError
from purejaxppo.devices import split_keys
from purejaxppo.envs.base import Environment, Vectorized, VectorState
from purejaxppo.envs.brax import BraxEnvironment
from purejaxppo.evaluate import MAX_STEPS
from purejaxppo.policy import Policy, act
from purejaxppo.stats import Moments
from purejaxppo.types import Episode, PyTree

MAX_FRAMES = 500  # of a film: at most 6 MB as a GIF
_DELAY = 0.04  # seconds that a frame is shown at least; below, viewers of GIFs go their own way
_HOLD = 1.0  # seconds for the last frame of an episode
_AREA = 400 * 300  # pixels of a picture
_PAPER, _SAND, _GREY, _INK = "#f6f3ec", "#d9d3c3", "#a9b1bc", "#22304a"
_BLUE, _SKY, _GOLD, _RED, _GREEN = "#2f6f9f", "#8cc0de", "#edae49", "#d1495b", "#3c9d70"
_NIGHT, _TRAIL, _MINT = "#131c2e", "#46587a", "#b9d9c6"


class Sketch(NamedTuple):
    """How an environment is drawn."""

    draw: Callable[..., Image.Image]  # from what it sees of one state, in numpy
    sees: Callable[[VectorState], PyTree]  # what of the states [E, ...] is kept for it; traced
    rate: float  # steps a second in real time


class Stroke(NamedTuple):
    """A round pen along points: a disc where there is one, and at width 0 the area they enclose."""

    points: Any  # [K, 2] x to the right, y up
    width: float
    colour: str


_state, _obs = operator.attrgetter("env"), operator.attrgetter("obs")  # of a VectorState


class _Film(struct.PyTreeNode):
    """E episodes; slot f is the state after f * stride steps, or the final one."""

    seen: PyTree  # [E, F, ...]
    so_far: Episode  # [E, F] up to that state
    episode: Episode  # [E]


class _Reel(NamedTuple):
    """The pictures of a film, in order."""

    draw: Callable[[int], Image.Image]
    seconds: list[float]  # that each is shown


def render(
    policy: Policy,
    path: str | Path,
    episodes: int = 5,
    seed: int = 0,
    sampled: bool = False,
    max_frames: int = MAX_FRAMES,
) -> list[float]:
    """Draws whole episodes of a policy, those that `policy.play` plays with this seed.

    A frame is a state, at the environment's own pace but at most 25 frames a second. So that a GIF
    stays at a few MB, an episode has at most max_frames / episodes of them: where one would need
    more, all show only every k-th state and play so much faster, which is written above them. An
    episode without a time limit is given up after `MAX_STEPS`.

    Args:
        path: ends in .gif or .mp4; written as a whole or not at all.
        sampled: act as in training instead of most likely.

    Returns:
        The return of each episode.

    Raises:
        ConfigError: nothing to draw, another kind of file, or one that cannot be written.
    """
    path = Path(path)
    sketch = _sketch(policy.env, policy.config.env)
    write = _writer(path)
    with _whole(path) as partial:
        film, stride = _shoot(policy, sketch, episodes, seed, sampled, max_frames)
        write(partial, _reel(sketch, film, stride))
    return [float(score) for score in film.episode.score]


def check_drawable(env: Environment, name: str) -> None:
    """Raises ConfigError, with the environment's name, where `render` would for what it is."""
    _sketch(env, name)


def _sketch(env: Environment, name: str) -> Sketch:
    """How an environment draws itself, or we do; raises ConfigError where neither can."""
    inner: Any = getattr(env, "_env", None)
    physics = isinstance(env, BraxEnvironment)
    for owner in (env,) if physics else (env, inner):
        own = getattr(owner, "render", None)
        if callable(own) and _takes_a_state(own):
            return Sketch(functools.partial(_draw_own, name, own), _state, 15)
    known = _SKETCHES.get(getattr(inner, "name", ""))
    if known is not None:
        return known._replace(draw=functools.partial(known.draw, env))
    model = getattr(getattr(inner, "sys", inner), "mj_model", None)
    if physics and model is not None:
        return Sketch(Bodies(model).draw, _poses, 1 / (inner.dt * env._action_repeat))
    raise ConfigError(
        f"{name} cannot be drawn; an environment of your own can, "
        "if it has render(state) -> uint8 [H, W, 3]"
    )


def _takes_a_state(function: Callable[..., Any]) -> bool:
    """And nothing else; Gymnax's own functions for drawing want parameters too."""
    wanted = inspect.signature(function).parameters.values()
    return sum(parameter.default is parameter.empty for parameter in wanted) == 1


def _shoot(
    policy: Policy, sketch: Sketch, episodes: int, seed: int, sampled: bool, max_frames: int
) -> tuple[_Film, int]:
    """The episodes on the host, and how many steps there are from one slot to the next."""
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: must be at least 1")
    env = Vectorized(policy.env, episodes)
    stride = _pace(sketch)
    limit = env.max_episode_steps or MAX_STEPS
    size = min(max(max_frames // episodes, 2), -(-limit // stride) + 1)
    key = jax.random.key(seed)
    static = (env, policy.agent, sketch.sees, size, sampled)
    film = _play(*static, policy.params, policy.obs_stats, key, stride)
    needed = -(-int(film.episode.length.max()) // (size - 1))
    if needed > stride:  # the same episodes again, now that their length is known
        stride = needed
        film = _play(*static, policy.params, policy.obs_stats, key, stride)
    return jax.device_get(film), stride


def _pace(sketch: Sketch) -> int:
    """Steps from one frame to the next in real time."""
    return math.ceil(_DELAY * sketch.rate - 1e-6)


@functools.partial(jax.jit, static_argnums=range(5))
def _play(
    env: Vectorized,
    agent: Agent,
    sees: Callable[[VectorState], PyTree],
    size: int,
    sampled: bool,
    params: PyTree,
    obs_stats: Moments | None,
    key: Array,
    stride: Array,
) -> _Film:
    """The first episode of each of E environments; consumes key as `evaluate` does.

    Args:
        size: F. What does not fit is left out.
        stride: [] steps from one slot to the next.
    """
    each, limit = jnp.arange(env.num_envs), env.max_episode_steps or MAX_STEPS
    key_reset, key_steps = jax.random.split(key)

    def step(carry: tuple[Array, VectorState, _Film]) -> tuple[Array, VectorState, _Film]:
        t, states, film = carry
        key_noise, key_env = jax.random.split(jax.random.fold_in(key_steps, t))
        action = act(agent, params, obs_stats, states.obs, key_noise if sampled else None)
        states, _, now = env.step(split_keys(key_env, each.shape), states, action)
        over, t = film.episode.ended, t + 1
        episode = jax.tree.map(lambda a, b: jnp.where(over, a, b), film.episode, now)
        shown = ~over & (now.ended | (t % stride == 0) | (t == limit))
        slot = jnp.where(shown, -(-t // stride), size)  # what is out of bounds is dropped
        kept = jax.tree.map(
            lambda slots, x: slots.at[each, slot].set(x, mode="drop"),
            (film.seen, film.so_far),
            (sees(states), episode),
        )
        return t, states, _Film(*kept, episode=episode)

    def unfinished(carry: tuple[Array, VectorState, _Film]) -> Array:
        return (carry[0] < limit) & ~jnp.all(carry[2].episode.ended)

    states = env.reset(key_reset)
    zeros = jnp.zeros(each.shape)
    episode = Episode(zeros.astype(bool), zeros, zeros.astype(jnp.int32))
    slots = jax.tree.map(lambda x: jnp.repeat(x[:, None], size, 1), (sees(states), episode))
    film = _Film(*slots, episode=episode)
    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), states, film))[2]


def _poses(states: VectorState) -> Array:
    """[E, B, 7] position and quaternion of MuJoCo's bodies, the world among them."""
    state = states.env
    if hasattr(state, "data"):  # Playground's
        return jnp.concatenate([state.data.xpos, state.data.xquat], -1)
    links = jnp.concatenate([state.pipeline_state.x.pos, state.pipeline_state.x.rot], -1)
    world = jnp.zeros_like(links[:, :1]).at[..., 3].set(1.0)
    return jnp.concatenate([world, links], 1)


def _reel(sketch: Sketch, film: _Film, stride: int) -> _Reel:
    lengths, pace = film.episode.length, _pace(sketch)
    places = [(e, f) for e, n in enumerate(lengths) for f in range(-(-n // stride) + 1)]
    last = [film.so_far.length[place] == lengths[place[0]] for place in places]
    draw = functools.partial(_picture, sketch, film, places, stride / pace)
    return _Reel(draw, [_HOLD if end else pace / sketch.rate for end in last])


def _picture(
    sketch: Sketch, film: _Film, places: list[tuple[int, int]], speed: float, number: int
) -> Image.Image:
    """The state in a slot, and above it which it is."""
    place = places[number]
    drawn = sketch.draw(jax.tree.map(lambda x: x[place], film.seen))
    words = (
        f"episode {place[0] + 1} of {len(film.episode.length)}",
        f"step {film.so_far.length[place]:,}" + f" ({speed:.3g}x)" * (speed > 1),
        f"return {round(float(film.so_far.score[place]), 3):,g}",
    )
    width, bar = max(drawn.width, 320), 24
    whole = Image.new("RGB", (width, drawn.height + bar), _PAPER)
    whole.paste(drawn, ((width - drawn.width) // 2, bar))
    pen = ImageDraw.Draw(whole)
    pen.rectangle((0, 0, width, bar - 1), fill=_INK)
    font = ImageFont.load_default(13)
    for x, word, anchor in zip((8, width / 2, width - 8), words, ("lm", "mm", "rm"), strict=True):
        pen.text((x, bar / 2), word, fill=_PAPER, font=font, anchor=anchor)
    return whole


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A file to write beside the one that it becomes in the end; an error leaves none."""
    partial = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        partial.touch()
        try:
            yield partial
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


def _writer(path: Path) -> Callable[[Path, _Reel], None]:
    if path.suffix.lower() == ".gif":
        return _write_gif
    if path.suffix.lower() != ".mp4":
        raise ConfigError(f"{path}: a film is a .gif or an .mp4")
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        try:
            from imageio_ffmpeg import get_ffmpeg_exe  # pyright: ignore[reportMissingImports]

            ffmpeg = get_ffmpeg_exe()
        except (ImportError, RuntimeError):
            raise ConfigError(
                f"{path}: an .mp4 needs ffmpeg (pip install 'purejaxppo[video]'); a .gif does not"
            ) from None
    return functools.partial(_write_mp4, ffmpeg)


def _write_gif(path: Path, reel: _Reel) -> None:
    """With one palette, so that a frame can leave out what has not changed."""
    count = len(reel.seconds)
    sample = [
        np.asarray(reel.draw(i)) for i in np.linspace(0, count - 1, min(count, 16), dtype=int)
    ]
    palette = Image.fromarray(np.concatenate(sample)).quantize(128, Image.Quantize.MAXCOVERAGE)
    frames = (
        reel.draw(i).quantize(palette=palette, dither=Image.Dither.NONE) for i in range(count)
    )
    duration = [10 * round(100 * seconds) for seconds in reel.seconds]  # milliseconds
    next(frames).save(path, "GIF", save_all=True, append_images=frames, duration=duration, loop=0)


def _write_mp4(ffmpeg: str, path: Path, reel: _Reel) -> None:
    width, height = reel.draw(0).size
    fps = 1 / min(reel.seconds)
    command = [
        ffmpeg, "-loglevel", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24",
        "-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-",
        "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", str(path),
    ]  # fmt: skip
    pipe = subprocess.PIPE
    # With close_fds it would fork, which JAX warns of.
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, close_fds=False) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ffmpeg says why
            for number, seconds in enumerate(reel.seconds):
                process.stdin.write(reel.draw(number).tobytes() * round(seconds * fps))
        message = process.communicate()[1].decode(errors="replace").strip()
    if process.returncode:
        raise ConfigError(f"ffmpeg could not write the film: {(message or '?').splitlines()[-1]}")


def _paint(strokes: Iterable[Stroke], window: tuple[float, float, float, float]) -> Image.Image:
    """A picture of a window: left, right, bottom and top."""
    left, right, bottom, top = window
    scale = 2 * math.sqrt(_AREA / ((right - left) * (top - bottom)))  # halved in the end
    size = (2 * round(scale * (right - left) / 2), 2 * round(scale * (top - bottom) / 2))
    image = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(image)
    for points, width, colour in strokes:
        pixels = (np.nan_to_num(points).reshape(-1, 2) - (left, top)) * (scale, -scale)
        pixels = np.clip(pixels, -1e4, 1e4)
        if not width:
            pen.polygon([tuple(pixel) for pixel in pixels], fill=colour)
            continue
        radius = scale * width / 2
        for x, y in pixels:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        for a, b in itertools.pairwise(pixels):
            aside = (b - a)[::-1] * (1, -1) * radius / max(np.linalg.norm(b - a), 1e-9)
            pen.polygon([tuple(p) for p in (a + aside, b + aside, b - aside, a - aside)], colour)
    return image.reduce(2)


def _board(colours: np.ndarray, gap: str = _INK) -> Image.Image:
    """A picture of cells [H, W], each a colour."""
    size = round(math.sqrt(_AREA / colours.size))
    rgb = np.array([[ImageColor.getrgb(c) for c in row] for row in colours], np.uint8)
    image = rgb.repeat(size, 0).repeat(size, 1)
    image[::size] = image[:, ::size] = ImageColor.getrgb(gap)
    return Image.fromarray(image)


def _draw_own(name: str, own: Callable[[PyTree], Any], state: PyTree) -> Image.Image:
    image = np.asarray(own(state))
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ConfigError(
            f"{name}: render(state) gave {image.dtype} {list(image.shape)}, not uint8 [H, W, 3]"
        )
    height, width, _ = image.shape
    zoom = max(round(math.sqrt(_AREA / (height * width))), 1)
    return Image.fromarray(image.repeat(zoom, 0).repeat(zoom, 1))


def _turned(shape: Any, angle: float, place: Any) -> np.ndarray:
    """Points [K, 2] turned anticlockwise, then moved to a place [2]."""
    c, s = math.cos(angle), math.sin(angle)
    return np.asarray(shape) @ np.array([[c, s], [-s, c]]) + place


# What follows draws a state s (or an observation) of env, one of our adapters.


def _cartpole(env: Any, s: Any) -> Image.Image:
    limit, pole = env._params.x_threshold, 2 * env._params.length
    cart = _turned([(-0.25, -0.12), (0.25, -0.12), (0.25, 0.12), (-0.25, 0.12)], 0, (s.x, 0))
    tip = (s.x + pole * math.sin(s.theta), 0.06 + pole * math.cos(s.theta))
    rail = [Stroke([(-limit, -0.2), (limit, -0.2)], 0.03, _GREY)]
    ends = [Stroke([(x, -0.28), (x, -0.12)], 0.03, _GREY) for x in (-limit, limit)]
    body = [Stroke(cart, 0, _INK), Stroke([(s.x, 0.06), tip], 0.09, _GOLD)]
    wheels = [Stroke((s.x + x, -0.14), 0.12, _BLUE) for x in (-0.14, 0.14)]
    hub = Stroke((s.x, 0.06), 0.06, _RED)
    return _paint([*rail, *ends, *body, *wheels, hub], (-limit - 0.3, limit + 0.3, -0.6, 1.4))


def _pendulum(env: Any, s: Any) -> Image.Image:
    tip = env._params.l * np.array([-math.sin(s.theta), math.cos(s.theta)])
    push = np.linspace(0, -0.6 * float(s.last_u), 12) + math.pi / 2
    arc = 0.3 * np.stack([np.cos(push), np.sin(push)], 1)
    rod = [Stroke([(0, 0), tip], 0.2, _RED), Stroke((0, 0), 0.09, _INK)]
    target = Stroke((0, env._params.l), 0.35, "#e3ded1")
    return _paint([target, *rod, Stroke(arc, 0.03, _INK)], (-1.8, 1.8, -1.35, 1.35))


def _acrobot(env: Any, s: Any) -> Image.Image:
    angles = np.array([s.joint_angle1, s.joint_angle1 + s.joint_angle2])
    lengths = np.array([env._params.link_length_1, env._params.link_length_2])
    steps = lengths[:, None] * np.stack([np.sin(angles), -np.cos(angles)], 1)
    _, elbow, tip = joints = np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])
    goal = Stroke([(-9, 1), (9, 1)], 0.03, _GREEN)
    links = [Stroke([joints[0], elbow], 0.2, _BLUE), Stroke([elbow, tip], 0.2, _SKY)]
    return _paint([goal, *links, *(Stroke(p, 0.1, _INK) for p in joints)], (-2.8, 2.8, -2.2, 2.2))


def _mountain_car(env: Any, s: Any) -> Image.Image:
    xs = np.linspace(env._params.min_position, env._params.max_position, 100)
    hill = np.stack([xs, 0.45 * np.sin(3 * xs)], 1)
    place = (s.position, 0.45 * np.sin(3 * s.position))
    slope = math.atan(1.35 * np.cos(3 * s.position))
    goal = np.array([env._params.goal_position, 0.45 * np.sin(3 * env._params.goal_position)])
    flag = _turned([(0, 0.16), (0.09, 0.2), (0, 0.24)], 0, goal)
    car = [(-0.08, 0.04), (0.08, 0.04), (0.06, 0.09), (-0.06, 0.09)]
    return _paint(
        [
            Stroke([(xs[0], -1), *hill, (xs[-1], -1)], 0, _SAND),
            Stroke(hill, 0.012, _INK),
            Stroke([goal, flag[-1]], 0.012, _INK),
            Stroke(flag, 0, _GREEN),
            Stroke(_turned(car, slope, place), 0, _RED),
            *(Stroke(_turned([(x, 0.03)], slope, place), 0.06, _INK) for x in (-0.05, 0.05)),
        ],
        (xs[0], xs[-1], -0.6, 0.75),
    )


def _point_robot(env: Any, s: Any) -> Image.Image:
    angles = np.linspace(0, math.pi, 50)
    arc = env._params.circle_radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    goal = Stroke(s.goal, 2 * env._params.goal_radius, _MINT)
    marks = [Stroke(s.goal, 0.05, _GREEN), Stroke(s.pos, 0.1, _RED)]
    return _paint([Stroke(arc, 0.015, _GREY), goal, *marks], (-1.4, 1.4, -0.5, 1.6))


def _reacher(env: Any, s: Any) -> Image.Image:
    steps = np.stack([np.cos(s.angles), np.sin(s.angles)], 1)
    joints = np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])
    reach = len(steps) + 0.3
    colours = itertools.cycle((_BLUE, _SKY))
    arm = [Stroke(pair, 0.16, next(colours)) for pair in itertools.pairwise(joints)]
    goal = [Stroke(s.goal_xy, 0.5, _MINT), Stroke(s.goal_xy, 0.16, _GREEN)]
    hubs = [Stroke(joint, 0.09, _INK) for joint in joints]
    return _paint([*goal, *arm, *hubs], (-reach, reach, -reach, reach))


def _swimmer(env: Any, s: Any) -> Image.Image:
    urchins = [Stroke(xy, 0.3, "#e9c3c5") for xy in s.urchin_xys]
    spines = [Stroke(xy, 0.1, _RED) for xy in s.urchin_xys]
    goal = [Stroke(s.goal_xy, 0.4, _MINT), Stroke(s.goal_xy, 0.1, _GREEN)]
    swimmer = [Stroke([s.xy, s.xy - 0.2 * s.xy_vel], 0.05, _SKY), Stroke(s.xy, 0.12, _BLUE)]
    return _paint([*goal, *urchins, *spines, *swimmer], (-1.9, 1.9, -1.5, 1.5))


def _channels(colours: dict[int, str], env: Any, obs: np.ndarray) -> Image.Image:
    """An observation [H, W, C] of zeros and ones; what comes later in the dictionary lies on top."""
    board = np.full(obs.shape[:2], _NIGHT)
    for channel, colour in colours.items():
        board[obs[..., channel] > 0] = colour
    return _board(board)


def _maze(env: Any, s: Any) -> Image.Image:
    board = np.where(np.asarray(env._env.occupied_map) > 0, _INK, _PAPER)
    board[tuple(s.goal)], board[tuple(s.pos)] = _GREEN, _RED
    return _board(board, gap="#ddd8cb")


def _frozen_lake(env: Any, s: Any) -> Image.Image:
    board = np.array(["#e4eef4", "#e4eef4", _INK, _GREEN])[np.asarray(env._env.desc)]
    board[divmod(s.position, board.shape[1])] = _RED
    return _board(board, gap="#bcd3e0")


def _catch(env: Any, s: Any) -> Image.Image:
    board = np.full((env._env.rows, env._env.columns), _NIGHT)
    board[s.paddle_y, s.paddle_x], board[s.ball_y, s.ball_x] = _SKY, _GOLD
    return _board(board)


def _deep_sea(env: Any, s: Any) -> Image.Image:
    size = env._env.size
    board = np.where(np.tri(size + 1, size, dtype=bool), _BLUE, "#16324a")
    board[size] = "#d8c59a"  # the ground
    board[size, size - 1], board[s.row, s.column] = _GOLD, _RED
    return _board(board)


# For each channel that is drawn, its colour.
_CHANNELS = {
    "Asterix-MinAtar": {2: _TRAIL, 1: _RED, 3: _GOLD, 0: _GREEN},
    "Breakout-MinAtar": {2: _TRAIL, 3: _RED, 0: _SKY, 1: _GOLD},
    "Freeway-MinAtar": {**dict.fromkeys(range(2, 7), _TRAIL), 1: _RED, 0: _GOLD},
    "Seaquest-MinAtar": {3: _TRAIL, 7: _SKY, 8: _GOLD, 9: _GOLD, 5: _RED, 6: "#a33a8c"}
    | {4: "#f3a5ad", 2: _PAPER, 1: "#2a7350", 0: _GREEN},
    "SpaceInvaders-MinAtar": {1: _RED, 5: _GOLD, 4: _PAPER, 0: _GREEN},
    "Pong-misc": {2: _TRAIL, 1: _GOLD, 0: _PAPER},
}

_SKETCHES = {
    "CartPole-v1": Sketch(_cartpole, _state, 50),
    "Pendulum-v1": Sketch(_pendulum, _state, 20),
    "Acrobot-v1": Sketch(_acrobot, _state, 15),
    "MountainCar-v0": Sketch(_mountain_car, _state, 25),
    "MountainCarContinuous-v0": Sketch(_mountain_car, _state, 25),
    "Catch-bsuite": Sketch(_catch, _state, 5),
    "DeepSea-bsuite": Sketch(_deep_sea, _state, 5),
    "FourRooms-misc": Sketch(_maze, _state, 10),
    "MetaMaze-misc": Sketch(_maze, _state, 10),
    "FrozenLake-misc": Sketch(_frozen_lake, _state, 5),
    "PointRobot-misc": Sketch(_point_robot, _state, 15),
    "Reacher-misc": Sketch(_reacher, _state, 20),
    "Swimmer-misc": Sketch(_swimmer, _state, 20),
} | {
    name: Sketch(functools.partial(_channels, colours), _obs, 15)
    for name, colours in _CHANNELS.items()
}


class _Solid(NamedTuple):
    """What is within a radius of a line between two points; of a ball they are the same."""

    body: int
    points: np.ndarray  # [2, 3] in the frame of its body
    radius: float
    colour: str


class Bodies:
    """The bodies of a MuJoCo model in perspective, seen from the side, or from above if it is flat.

    The camera goes along with a body that can go anywhere.
    """

    def __init__(self, model: Any) -> None:
        from mujoco import MjData, mj_kinematics  # pyright: ignore[reportAttributeAccessIssue]

        data = MjData(model)
        mj_kinematics(model, data)
        kind, limited, up = model.jnt_type, model.jnt_limited, np.abs(data.xaxis[:, 2])
        self._solids = _solids(model)
        floors = data.geom_xpos[model.geom_type == 0, 2]
        self._floor = float(floors[0]) if len(floors) else None
        free = np.flatnonzero((kind == 0) | ((kind == 2) & (limited == 0)))
        self._root = model.jnt_bodyid[free[0]] if len(free) else 0
        self._start = data.xpos[self._root].copy()
        bounds = []
        for solid, points in self._place(np.concatenate([data.xpos, data.xquat], 1)):
            bounds += [points - solid.radius, points + solid.radius]
            if not len(free):  # then a limb may turn anywhere about where its trunk is
                trunk = data.xpos[model.body_rootid[solid.body]]
                reach = np.linalg.norm(points - trunk, axis=1).max() * (solid.body > 0)
                bounds += [[trunk - reach, trunk + reach]]
        low, high = np.min(bounds, (0, 1)), np.max(bounds, (0, 1))
        self._centre, self._size = (low + high) / 2, (high - low).max()
        flat = np.where(kind == 2, up < 0.01, (kind == 3) & (up > 0.99)).all()
        turn, pitch = np.radians((0, 90) if flat else (20, 20))
        right = np.array([np.cos(turn), np.sin(turn), 0])
        away = np.array([-right[1] * np.cos(pitch), right[0] * np.cos(pitch), -np.sin(pitch)])
        self._axes = np.stack([right, np.cross(right, away), away])

    def draw(self, poses: np.ndarray) -> Image.Image:
        """A picture of bodies at [B, 7] positions and quaternions, the world first."""
        poses = np.nan_to_num(poses)  # physics that blew up ends an episode
        target = self._centre + (poses[self._root, :3] - self._start) * (1, 1, 0)
        placed = self._place(poses)
        placed.sort(key=lambda pair: -(pair[1].sum(0) @ self._axes[2]))  # the farthest first
        strokes = []
        if self._floor is not None:
            strokes += self._draw_floor(target)
            for solid, points in placed:
                shade, scale = self._project(points * (1, 1, 0) + (0, 0, self._floor), target)
                strokes.append(Stroke(shade, solid.radius * scale, "#c4bdab"))
        for solid, points in placed:
            flat, scale = self._project(points, target)
            width = 2 * solid.radius * scale
            dark, light = _mix(solid.colour, "#000000", 0.45), _mix(solid.colour, "#ffffff", 0.35)
            strokes.append(Stroke(flat, width + 0.012 * self._size, dark))
            strokes.append(Stroke(flat, width, solid.colour))
            strokes.append(Stroke(flat + np.array([-0.12, 0.2]) * width, 0.25 * width, light))
        half = self._size * (0.8 if self._root else 0.7)
        return _paint(strokes, (-half, half, -0.75 * half, 0.75 * half))

    def _place(self, poses: np.ndarray) -> list[tuple[_Solid, np.ndarray]]:
        """Each solid, and where it is in the world, [2, 3]."""
        pairs = [(solid, poses[solid.body]) for solid in self._solids]
        return [(solid, _rotated(solid.points, at[3:]) + at[:3]) for solid, at in pairs]

    def _project(self, points: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, float]:
        """Where points [K, 3] are in the picture, [K, 2], and how much larger they look."""
        seen = (points - target) @ self._axes.T
        scale = 4 * self._size / np.maximum(4 * self._size + seen[:, 2:], 0.1)
        return seen[:, :2] * scale, float(scale.mean())

    def _draw_floor(self, target: np.ndarray) -> list[Stroke]:
        """Squares that fade with the distance."""
        side, reach, strokes = self._size / 2, 9, []
        first = np.round(target[:2] / side).astype(int)
        for i, j in itertools.product(range(-reach, reach), repeat=2):
            fade = math.hypot(i, j) / reach
            if (first.sum() + i + j) % 2 == 0 and fade < 1:
                corners = first + np.array([(i, j), (i + 1, j), (i + 1, j + 1), (i, j + 1)])
                corners = np.column_stack([corners * side, np.full(4, self._floor)])
                colour = _mix(_SAND, _PAPER, fade)
                strokes.append(Stroke(self._project(corners, target)[0], 0, colour))
        return strokes


def _solids(model: Any) -> list[_Solid]:
    """The geoms to be seen, each thing that stands by itself and each limb of it in its colour.

    Spheres and capsules are exact. A box, say, is drawn as the capsule that fits its longest side.
    """
    colours, levels, trunks, solids = (_BLUE, _SKY, _GOLD, _RED, _GREEN), [0], 0, []
    for parent in model.body_parentid[1:]:
        levels.append(levels[parent] + 1 if parent else 3 * trunks)
        trunks += parent == 0
    for geom in range(model.ngeom):
        size, kind = model.geom_size[geom], model.geom_type[geom]
        if kind == 0 or model.geom_group[geom] > 2 or model.geom_rgba[geom, 3] == 0:
            continue
        size = {2: size[[0, 0, 0]], 3: size[[0, 0, 1]] + (0, 0, size[0])}.get(kind, size)
        longest, radius = np.argmax(size), np.median(size)
        end = np.eye(3)[longest] * (size[longest] - radius)
        points = _rotated(np.stack([-end, end]), model.geom_quat[geom]) + model.geom_pos[geom]
        body = model.geom_bodyid[geom]
        colour = colours[levels[body] % len(colours)] if body else _GREY
        solids.append(_Solid(int(body), points, float(radius), colour))
    return solids


def _rotated(points: np.ndarray, quaternion: np.ndarray) -> np.ndarray:
    """Points [K, 3] turned by a quaternion [4], w first."""
    w, axis = quaternion[0], quaternion[1:]
    return points + 2 * np.cross(axis, np.cross(axis, points) + w * points)


def _mix(a: str, b: str, share: float) -> str:
    """Between colour a, at share 0, and b."""
    first, second = (np.array(ImageColor.getrgb(colour)) for colour in (a, b))
    return "#{:02x}{:02x}{:02x}".format(*np.round(first + share * (second - first)).astype(int))
