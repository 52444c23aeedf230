"""How each environment looks: a picture of one state, drawn by Pillow.

`sketch_of` finds the sketch of an environment; `SKETCHES` holds those of Gymnax by name, and `Bodies`
draws whatever MuJoCo's models describe.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from PIL import Image, ImageColor, ImageDraw

from purejaxppo.envs.base import Environment, VectorState
from purejaxppo.envs.brax import BraxEnvironment
from purejaxppo.types import PyTree
from purejaxppo.values import ConfigError

AREA = 400 * 300  # pixels of a picture
PAPER, SAND, GREY, INK = "#f6f3ec", "#d9d3c3", "#a9b1bc", "#22304a"
BLUE, SKY, GOLD, RED, GREEN = "#2f6f9f", "#8cc0de", "#edae49", "#d1495b", "#3c9d70"
NIGHT, TRAIL, MINT = "#131c2e", "#46587a", "#b9d9c6"


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


def sketch_of(env: Environment, name: str) -> Sketch:
    """How an environment draws itself, or we do; raises ConfigError where neither can."""
    inner: Any = getattr(env, "_env", None)
    physics = isinstance(env, BraxEnvironment)
    for owner in (env,) if physics else (env, inner):
        own = getattr(owner, "render", None)
        if callable(own) and _takes_a_state(own):
            # Octax draws itself too: some of 60 frames a second are a step.
            rate = 60 / getattr(inner, "frame_skip", 4)
            return Sketch(functools.partial(_draw_own, name, own), _state, rate)
    known = SKETCHES.get(getattr(inner, "name", ""))
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
    kinds = [p.kind for p in wanted if p.default is p.empty]
    open_ended = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return sum(kind not in open_ended for kind in kinds) == 1


def _poses(states: VectorState) -> Array:
    """[E, B, 7] position and quaternion of MuJoCo's bodies, the world among them."""
    state = states.env
    if hasattr(state, "data"):  # Playground's
        return jnp.concatenate([state.data.xpos, state.data.xquat], -1)
    links = jnp.concatenate([state.pipeline_state.x.pos, state.pipeline_state.x.rot], -1)
    world = jnp.zeros_like(links[:, :1]).at[..., 3].set(1.0)
    return jnp.concatenate([world, links], 1)


def _paint(strokes: Iterable[Stroke], window: tuple[float, float, float, float]) -> Image.Image:
    """A picture of a window: left, right, bottom and top."""
    left, right, bottom, top = window
    scale = 2 * math.sqrt(AREA / ((right - left) * (top - bottom)))  # halved in the end
    size = (2 * round(scale * (right - left) / 2), 2 * round(scale * (top - bottom) / 2))
    image = Image.new("RGB", size, PAPER)
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


def _board(colours: np.ndarray, gap: str = INK) -> Image.Image:
    """A picture of cells [H, W], each a colour."""
    size = max(round(math.sqrt(AREA / colours.size)), 2)  # a cell, and the gap beside it
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
    zoom = max(round(math.sqrt(AREA / (height * width))), 1)
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
    rail = [Stroke([(-limit, -0.2), (limit, -0.2)], 0.03, GREY)]
    ends = [Stroke([(x, -0.28), (x, -0.12)], 0.03, GREY) for x in (-limit, limit)]
    body = [Stroke(cart, 0, INK), Stroke([(s.x, 0.06), tip], 0.09, GOLD)]
    wheels = [Stroke((s.x + x, -0.14), 0.12, BLUE) for x in (-0.14, 0.14)]
    hub = Stroke((s.x, 0.06), 0.06, RED)
    return _paint([*rail, *ends, *body, *wheels, hub], (-limit - 0.3, limit + 0.3, -0.6, 1.4))


def _pendulum(env: Any, s: Any) -> Image.Image:
    tip = env._params.l * np.array([-math.sin(s.theta), math.cos(s.theta)])
    push = np.linspace(0, -0.6 * float(s.last_u), 12) + math.pi / 2
    arc = 0.3 * np.stack([np.cos(push), np.sin(push)], 1)
    rod = [Stroke([(0, 0), tip], 0.2, RED), Stroke((0, 0), 0.09, INK)]
    target = Stroke((0, env._params.l), 0.35, "#e3ded1")
    return _paint([target, *rod, Stroke(arc, 0.03, INK)], (-1.8, 1.8, -1.35, 1.35))


def _acrobot(env: Any, s: Any) -> Image.Image:
    angles = np.array([s.joint_angle1, s.joint_angle1 + s.joint_angle2])
    lengths = np.array([env._params.link_length_1, env._params.link_length_2])
    steps = lengths[:, None] * np.stack([np.sin(angles), -np.cos(angles)], 1)
    _, elbow, tip = joints = np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])
    goal = Stroke([(-9, 1), (9, 1)], 0.03, GREEN)
    links = [Stroke([joints[0], elbow], 0.2, BLUE), Stroke([elbow, tip], 0.2, SKY)]
    return _paint([goal, *links, *(Stroke(p, 0.1, INK) for p in joints)], (-2.8, 2.8, -2.2, 2.2))


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
            Stroke([(xs[0], -1), *hill, (xs[-1], -1)], 0, SAND),
            Stroke(hill, 0.012, INK),
            Stroke([goal, flag[-1]], 0.012, INK),
            Stroke(flag, 0, GREEN),
            Stroke(_turned(car, slope, place), 0, RED),
            *(Stroke(_turned([(x, 0.03)], slope, place), 0.06, INK) for x in (-0.05, 0.05)),
        ],
        (xs[0], xs[-1], -0.6, 0.75),
    )


def _point_robot(env: Any, s: Any) -> Image.Image:
    angles = np.linspace(0, math.pi, 50)
    arc = env._params.circle_radius * np.stack([np.cos(angles), np.sin(angles)], 1)
    goal = Stroke(s.goal, 2 * env._params.goal_radius, MINT)
    marks = [Stroke(s.goal, 0.05, GREEN), Stroke(s.pos, 0.1, RED)]
    return _paint([Stroke(arc, 0.015, GREY), goal, *marks], (-1.4, 1.4, -0.5, 1.6))


def _reacher(env: Any, s: Any) -> Image.Image:
    steps = np.stack([np.cos(s.angles), np.sin(s.angles)], 1)
    joints = np.concatenate([np.zeros((1, 2)), steps.cumsum(0)])
    reach = len(steps) + 0.3
    colours = itertools.cycle((BLUE, SKY))
    arm = [Stroke(pair, 0.16, next(colours)) for pair in itertools.pairwise(joints)]
    goal = [Stroke(s.goal_xy, 0.5, MINT), Stroke(s.goal_xy, 0.16, GREEN)]
    hubs = [Stroke(joint, 0.09, INK) for joint in joints]
    return _paint([*goal, *arm, *hubs], (-reach, reach, -reach, reach))


def _swimmer(env: Any, s: Any) -> Image.Image:
    urchins = [Stroke(xy, 0.3, "#e9c3c5") for xy in s.urchin_xys]
    spines = [Stroke(xy, 0.1, RED) for xy in s.urchin_xys]
    goal = [Stroke(s.goal_xy, 0.4, MINT), Stroke(s.goal_xy, 0.1, GREEN)]
    swimmer = [Stroke([s.xy, s.xy - 0.2 * s.xy_vel], 0.05, SKY), Stroke(s.xy, 0.12, BLUE)]
    return _paint([*goal, *urchins, *spines, *swimmer], (-1.9, 1.9, -1.5, 1.5))


def _channels(colours: dict[int, str], env: Any, obs: np.ndarray) -> Image.Image:
    """An observation [H, W, C] of zeros and ones; what comes later in the dictionary lies on top."""
    board = np.full(obs.shape[:2], NIGHT)
    for channel, colour in colours.items():
        board[obs[..., channel] > 0] = colour
    return _board(board)


def _maze(env: Any, s: Any) -> Image.Image:
    board = np.where(np.asarray(env._env.occupied_map) > 0, INK, PAPER)
    board[tuple(s.goal)], board[tuple(s.pos)] = GREEN, RED
    return _board(board, gap="#ddd8cb")


def _frozen_lake(env: Any, s: Any) -> Image.Image:
    board = np.array(["#e4eef4", "#e4eef4", INK, GREEN])[np.asarray(env._env.desc)]
    board[divmod(s.position, board.shape[1])] = RED
    return _board(board, gap="#bcd3e0")


def _catch(env: Any, s: Any) -> Image.Image:
    board = np.full((env._env.rows, env._env.columns), NIGHT)
    board[s.paddle_y, s.paddle_x], board[s.ball_y, s.ball_x] = SKY, GOLD
    return _board(board)


def _deep_sea(env: Any, s: Any) -> Image.Image:
    size = env._env.size
    board = np.where(np.tri(size + 1, size, dtype=bool), BLUE, "#16324a")
    board[size] = "#d8c59a"  # the ground
    board[size, size - 1], board[s.row, s.column] = GOLD, RED
    return _board(board)


# For each channel that is drawn, its colour.
_CHANNELS = {
    "Asterix-MinAtar": {2: TRAIL, 1: RED, 3: GOLD, 0: GREEN},
    "Breakout-MinAtar": {2: TRAIL, 3: RED, 0: SKY, 1: GOLD},
    "Freeway-MinAtar": {**dict.fromkeys(range(2, 7), TRAIL), 1: RED, 0: GOLD},
    "Seaquest-MinAtar": {3: TRAIL, 7: SKY, 8: GOLD, 9: GOLD, 5: RED, 6: "#a33a8c"}
    | {4: "#f3a5ad", 2: PAPER, 1: "#2a7350", 0: GREEN},
    "SpaceInvaders-MinAtar": {1: RED, 5: GOLD, 4: PAPER, 0: GREEN},
    "Pong-misc": {2: TRAIL, 1: GOLD, 0: PAPER},
}

SKETCHES = {
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
                colour = _mix(SAND, PAPER, fade)
                strokes.append(Stroke(self._project(corners, target)[0], 0, colour))
        return strokes


def _solids(model: Any) -> list[_Solid]:
    """The geoms to be seen, each thing that stands by itself and each limb of it in its colour.

    Spheres and capsules are exact. A box, say, is drawn as the capsule that fits its longest side.
    """
    colours, levels, trunks, solids = (BLUE, SKY, GOLD, RED, GREEN), [0], 0, []
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
        colour = colours[levels[body] % len(colours)] if body else GREY
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
