"""Episodes of a trained policy as a GIF or an MP4, drawn without a screen or OpenGL."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from PIL import Image, ImageDraw, ImageFont

from purejaxppo import envs
from purejaxppo.agent import Agent
from purejaxppo.devices import split_keys
from purejaxppo.envs.base import Environment, VectorEnvironment, VectorState
from purejaxppo.envs.images import Images, of_environment
from purejaxppo.evaluate import MAX_STEPS, Player, advance, begin, key_of
from purejaxppo.files import replacing
from purejaxppo.policy import Policy
from purejaxppo.sketches import INK, PAPER, Sketch, sketch_of
from purejaxppo.stats import Moments
from purejaxppo.types import Episode, PyTree
from purejaxppo.values import ConfigError

MAX_FRAMES = 500  # of a film, or a GIF would be large
_DELAY = 0.04  # seconds that a frame is shown at least; below, viewers of GIFs go their own way
_HOLD = 1.0  # seconds for the last frame of an episode


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
    """Draws whole episodes of a policy, those that `policy.play` plays with this seed; of an
    environment outside of the program, successive games of one.

    A frame is a state, at the environment's own pace, where that is known, but at most 25 frames a second. So that a GIF
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
    if episodes < 1:
        raise ConfigError(f"--episodes {episodes}: must be at least 1")
    sketch = find_sketch(policy.env, policy.config.env)
    shoot = _shoot_outside if envs.is_external(policy.env) else _shoot
    write = _writer(path)
    try:
        with replacing(path) as part:
            part.touch()  # or only the end would tell that it cannot be written
            film, stride = shoot(policy, sketch, episodes, seed, sampled, max_frames)
            write(part, _reel(sketch, film, stride))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return [float(score) for score in film.episode.score]


def find_sketch(env: Environment, name: str) -> Sketch:
    """How an environment is drawn; raises ConfigError, with its name, where it cannot be."""
    if not envs.is_external(env):
        return sketch_of(env, name)
    outside: Any = env
    if reason := _why_not_drawn(outside.task, json.dumps(outside.arguments)):
        raise ConfigError(f"{name} cannot be drawn here: {reason}")
    return Sketch(draw=Image.fromarray, sees=lambda states: states, rate=outside.rate)


@functools.cache
def _why_not_drawn(task: str, arguments: str) -> str:
    """Of EnvPool. Tried in a process of its own, since without OpenGL a pool may end the one it is in."""
    command = [sys.executable, "-c", _TRY_TO_DRAW, task, arguments]
    tried = subprocess.run(command, capture_output=True, text=True)
    return (tried.stderr.strip() or "?").splitlines()[-1] if tried.returncode else ""


_TRY_TO_DRAW = """
import json, sys, envpool
options = json.loads(sys.argv[2])
env = envpool.make(sys.argv[1], env_type="gymnasium", num_envs=1, render_mode="rgb_array", **options)
env.reset()
env.render()
"""


def _shoot_outside(
    policy: Policy, sketch: Sketch, episodes: int, seed: int, sampled: bool, max_frames: int
) -> tuple[_Film, int]:
    """What `_shoot` gives, of an environment outside of the program, one game after another."""
    outside: Any = policy.env
    camera = outside.arguments | {"render_mode": "rgb_array"}
    outside = dataclasses.replace(outside, arguments=camera)
    env: Any = envs.vectorize(policy.config, outside, 1, [seed])
    agent, params, obs_stats = policy.agent, policy.params, policy.obs_stats

    @jax.jit
    def step(player: Player, key: Array) -> tuple[Player, Episode]:
        player, now = advance(env, agent, params, obs_stats, player, key, sampled)
        return player, jax.tree.map(lambda x: x[0], now)

    start, stride = jax.jit(functools.partial(begin, env, agent)), _pace(sketch)
    rolls = []
    for number in range(episodes):
        env.prepare()
        key = key_of(seed, number)
        size = max(max_frames // episodes, 2)
        roll, stride = _roll(env, step, start(key[None]), key, stride, size)
        rolls.append(roll)
    # In all the same steps between frames, and as many frames.
    rolls = [[roll[n] for n in sorted(roll) if n % stride == 0 or n == max(roll)] for roll in rolls]
    most = max(map(len, rolls))
    shots = [shot for roll in rolls for shot in roll + roll[-1:] * (most - len(roll))]
    seen, so_far = jax.tree.map(
        lambda *x: np.stack(x).reshape(episodes, most, *np.shape(x[0])), *shots
    )
    return _Film(seen, so_far, jax.tree.map(lambda x: x[:, -1], so_far)), stride


def _roll(
    env: Any, step: Callable[..., Any], player: Player, key: Array, stride: int, size: int
) -> tuple[dict[int, tuple[np.ndarray, Episode]], int]:
    """Frames of an episode by its length, every `stride` steps and at the end, and that stride.

    It is doubled where there would be more than `size` frames.
    """
    camera: Any = env.env if isinstance(env, Images) else env
    now = Episode(jnp.zeros((), bool), jnp.zeros(()), jnp.zeros((), jnp.int32))
    jax.block_until_ready(player)  # the frames are asked for behind its back
    roll = {0: (camera.frames()[0], now)}
    for t in range(env.max_episode_steps or MAX_STEPS):
        player, now = jax.device_get(step(player, jax.random.fold_in(key, t)))
        if now.ended or now.length % stride == 0:
            roll[int(now.length)] = camera.frames()[0], now
        if now.ended:
            break
        if len(roll) > size:
            stride *= 2
            roll = {n: shot for n, shot in roll.items() if n % stride == 0}
    roll[int(now.length)] = camera.frames()[0], now  # also of one that is given up
    return roll, stride


def _shoot(
    policy: Policy, sketch: Sketch, episodes: int, seed: int, sampled: bool, max_frames: int
) -> tuple[_Film, int]:
    """The episodes on the host, and how many steps there are from one slot to the next."""
    env = envs.vectorize(policy.config, policy.env, episodes)
    stride = _pace(sketch)
    limit = env.max_episode_steps or MAX_STEPS
    size = min(max(max_frames // episodes, 2), -(-limit // stride) + 1)
    key = key_of(seed)
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
    env: VectorEnvironment,
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
    (key_steps,), key_reset = split_keys(key, env.num_envs)

    def step(carry: tuple[Array, Player, _Film]) -> tuple[Array, Player, _Film]:
        t, player, film = carry
        key = jax.random.fold_in(key_steps, t)
        player, now = advance(env, agent, params, obs_stats, player, key, sampled)
        over, t = film.episode.ended, t + 1
        episode = jax.tree.map(lambda a, b: jnp.where(over, a, b), film.episode, now)
        shown = ~over & (now.ended | (t % stride == 0) | (t == limit))
        slot = jnp.where(shown, -(-t // stride), size)  # what is out of bounds is dropped
        kept = jax.tree.map(
            lambda slots, x: slots.at[each, slot].set(x, mode="drop"),
            (film.seen, film.so_far),
            (sees(of_environment(player.env_state)), episode),
        )
        return t, player, _Film(*kept, episode=episode)

    def unfinished(carry: tuple[Array, Player, _Film]) -> Array:
        return (carry[0] < limit) & ~jnp.all(carry[2].episode.ended)

    player = begin(env, agent, key_reset)
    zeros = jnp.zeros(each.shape)
    episode = Episode(zeros.astype(bool), zeros, zeros.astype(jnp.int32))
    slots = jax.tree.map(
        lambda x: jnp.repeat(x[:, None], size, 1), (sees(of_environment(player.env_state)), episode)
    )
    film = _Film(*slots, episode=episode)
    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), player, film))[2]


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
    whole = Image.new("RGB", (width, drawn.height + bar), PAPER)
    whole.paste(drawn, ((width - drawn.width) // 2, bar))
    pen = ImageDraw.Draw(whole)
    pen.rectangle((0, 0, width, bar - 1), fill=INK)
    font = ImageFont.load_default(13)
    for x, word, anchor in zip((8, width / 2, width - 8), words, ("lm", "mm", "rm"), strict=True):
        pen.text((x, bar / 2), word, fill=PAPER, font=font, anchor=anchor)
    return whole


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
