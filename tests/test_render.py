"""Films of a policy: what is played, what the pictures show, and what is left after an error."""

import math
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from PIL import Image, ImageColor

from purejaxppo import envs, render, sketches
from purejaxppo.config import Config, Hyper
from purejaxppo.evaluate import key_of
from purejaxppo.policy import Policy, play
from purejaxppo.spaces import Box, Discrete
from purejaxppo.sweep import Run, Setting
from purejaxppo.train import make_setup
from purejaxppo.types import TimeStep
from purejaxppo.values import ConfigError

BAR = 24  # pixels of the caption
DRAWN = [name for name in envs.list_environments() if name in sketches.SKETCHES]
REFUSED = [
    name for name in envs.list_environments() if "/" not in name and name not in sketches.SKETCHES
]

# One of each kind is drawn every time, the others with `-m slow`.
KINDS = {
    "CartPole-v1", "Acrobot-v1", "Breakout-MinAtar", "FourRooms-misc", "Catch-bsuite",
    "Reacher-misc", "Pong-misc",
}  # fmt: skip
FILMS = [pytest.param(n, marks=() if n in KINDS else pytest.mark.slow) for n in DRAWN]


def make_policy(name, gru_units=None, **env_args):
    config = Config(env=name, env_args=tuple(env_args.items()), gru_units=gru_units)
    setup = make_setup(config)
    shapes = jax.eval_shape(setup.agent.init, jax.random.key(0), Hyper())
    draw = np.random.default_rng(1).normal  # compiles nothing
    params = jax.tree.map(lambda x: draw(0, 0.3, x.shape).astype(np.float32), shapes)
    run = Run(0, 0, Setting({}, config, Hyper()))
    return Policy(run, setup.env.env, setup.agent, params, None, 0)


def read(path):
    """Pictures [F, H, W, 3] of a GIF without their captions, and milliseconds [F] of each."""
    pictures, shown = [], []
    with Image.open(path) as image:
        for frame in range(image.n_frames):
            image.seek(frame)
            pictures.append(np.asarray(image.convert("RGB"))[BAR:])
            shown.append(image.info["duration"])
    return np.array(pictures), shown


def middle_of(image, colour):
    """The mean (row, column) of pixels of a colour."""
    wanted = np.array(ImageColor.getrgb(colour))
    places = np.argwhere(np.abs(np.asarray(image, int) - wanted).sum(2) < 30)
    return places.mean(0) if len(places) else None


@pytest.mark.parametrize("name", FILMS)
def test_frames_show_something_that_changes(name, tmp_path):
    policy = make_policy(name, max_steps_in_episode=14)
    render.find_sketch(policy.env, name)
    render.render(policy, tmp_path / "film.gif", episodes=2, sampled=True)
    pictures, _ = read(tmp_path / "film.gif")
    assert all(len(Image.fromarray(picture).getcolors()) > 2 for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) > 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drawn_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=name):
        render.find_sketch(envs.make(name), name)


def test_every_gymnax_environment_is_drawn_or_refused():
    assert len(DRAWN) == len(sketches.SKETCHES) == 19
    assert len(REFUSED) == 7


def draw(name, seen, **env_args):
    return sketches.sketch_of(envs.make(name, env_args), name).draw(seen)


def test_cart_moves_to_the_right_and_its_pole_leans_with_it():
    xs, angles = (-2.0, 0.0, 2.0), (-0.2, 0.0, 0.2)
    images = [
        draw("CartPole-v1", SimpleNamespace(x=x, theta=a)) for x, a in zip(xs, angles, strict=True)
    ]
    carts = [middle_of(image, sketches.INK)[1] for image in images]
    poles = [middle_of(image, sketches.GOLD)[1] for image in images]
    scale = images[0].width / (2 * 2.4 + 0.6)  # pixels a metre
    np.testing.assert_allclose(carts, [images[0].width / 2 + scale * x for x in xs], atol=2)
    offset = np.subtract(poles, carts)
    np.testing.assert_allclose(offset, scale * np.sin(angles) / 2, atol=4)


def test_pendulum_and_acrobot_hang_where_their_angles_say():
    height = draw("Pendulum-v1", SimpleNamespace(theta=0.0, last_u=0.0)).height
    for theta, side in ((0.0, -1), (math.pi, 1)):  # 0 is upright
        image = draw("Pendulum-v1", SimpleNamespace(theta=theta, last_u=0.0))
        assert side * (middle_of(image, sketches.RED)[0] - height / 2) > 0.15 * height
    for angle, side in ((0.0, 1), (math.pi, -1)):  # 0 hangs down
        image = draw("Acrobot-v1", SimpleNamespace(joint_angle1=angle, joint_angle2=0.0))
        assert side * (middle_of(image, sketches.SKY)[0] - image.height / 2) > 0.15 * image.height


@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 7), (9, 9)])
def test_a_channel_of_minatar_is_a_cell_of_its_colour(row, column):
    obs = np.zeros((10, 10, 4), np.float32)
    obs[row, column, 3] = 1  # a brick
    image = draw("Breakout-MinAtar", obs)
    cell = image.width / 10
    middle = middle_of(image, sketches.RED)
    np.testing.assert_allclose(middle, (cell * (row + 0.5), cell * (column + 0.5)), atol=1)
    obs[row, column, 1] = 1  # and the ball on it
    image = draw("Breakout-MinAtar", obs)
    np.testing.assert_allclose(middle_of(image, sketches.GOLD), middle, atol=1)
    assert middle_of(image, sketches.RED) is None


def test_grids_have_rows_downwards():
    state = SimpleNamespace(pos=np.array([1, 3]), goal=np.array([11, 2]))
    image = draw("FourRooms-misc", state)
    cell = image.width / 13
    for colour, (row, column) in ((sketches.RED, (1, 3)), (sketches.GREEN, (11, 2))):
        place = (cell * (row + 0.5), cell * (column + 0.5))
        np.testing.assert_allclose(middle_of(image, colour), place, atol=1)
    image = draw("FrozenLake-misc", SimpleNamespace(position=np.array(9)), map_name="8x8")
    cell = image.width / 8
    np.testing.assert_allclose(middle_of(image, sketches.RED), (1.5 * cell, 1.5 * cell), atol=1)


def test_a_large_grid_is_more_than_gaps():
    colours = np.full((700, 700), sketches.PAPER)
    colours[350, 350] = sketches.RED
    assert middle_of(sketches._board(colours), sketches.RED) is not None


def test_film_has_every_episode_at_the_pace_of_the_environment(tmp_path):
    policy = make_policy("CartPole-v1", max_steps_in_episode=31)
    returns = render.render(policy, tmp_path / "film.gif", episodes=3)
    pictures, shown = read(tmp_path / "film.gif")
    # 50 steps a second: every second one, and the last; a frame is 40 ms, the last one longer.
    assert len(pictures) == sum(math.ceil(score / 2) + 1 for score in returns)
    ends = np.cumsum([math.ceil(score / 2) + 1 for score in returns]) - 1
    assert [frame for frame, time in enumerate(shown) if time == 1000] == ends.tolist()
    assert {time for time in shown if time != 1000} == {40}


def test_long_episodes_are_thinned(tmp_path):
    policy = make_policy("Pendulum-v1")
    render.render(policy, tmp_path / "film.gif", episodes=2, max_frames=50)
    pictures, shown = read(tmp_path / "film.gif")
    assert len(pictures) == 2 * (math.ceil(200 / 9) + 1)  # every 9th of 200 in 25 frames
    assert shown.count(50) == len(pictures) - 2


@pytest.mark.parametrize(("sampled", "gru_units"), [(False, None), (True, None), (False, 8)])
def test_returns_are_those_of_a_plain_loop(sampled, gru_units, tmp_path):
    policy = make_policy("CartPole-v1", gru_units)
    returns = render.render(policy, tmp_path / "film.gif", episodes=2, seed=3, sampled=sampled)
    np.testing.assert_array_equal(returns, play(policy, 2, seed=3, sampled=sampled).score)
    if sampled:
        return
    key_steps, *key_reset = jax.random.split(key_of(3), 3)
    for number, key in enumerate(key_reset):
        state, obs = policy.env.reset(key)
        score, over, t, memory = 0.0, False, 0, None
        while not over and t < 500:
            key_step = jax.random.split(jax.random.fold_in(key_steps, t), 3)[1 + number]
            action, memory = policy.step(obs, memory)
            state, step = policy.env.step(key_step, state, jnp.asarray(action))
            obs, score, over, t = step.obs, score + float(step.reward), bool(step.terminated), t + 1
        assert returns[number] == score


class Lamp(struct.PyTreeNode):
    position: jax.Array  # []
    key: jax.Array  # [] a typed key, which is no array to numpy


class Own:
    """A lamp that goes to the right for six steps, and a picture of it."""

    observation_space, action_space = Box(0.0, 9.0, (1,)), Discrete(2)
    max_episode_steps, may_truncate = 6, False

    def reset(self, key):
        return Lamp(jnp.zeros((), jnp.int32), key), jnp.zeros(1)

    def step(self, key, state, action):
        state = Lamp(state.position + 1, key)
        no = jnp.zeros((), bool)
        return state, TimeStep(state.position[None].astype(jnp.float32), jnp.ones(()), no, no)

    def render(self, state):
        image = np.zeros((4, 8, 3), np.uint8)
        image[2, state.position] = 255, 0, 0
        return image


def test_an_environment_of_gymnax_style_may_too():
    from gymnax.environments.classic_control import CartPole

    class Plain(CartPole):
        def render(self, state, shade=7, **others):
            return np.full((30, 40, 3), shade, np.uint8)

    image = sketches.sketch_of(envs.custom.make("mine", Plain, {}), "mine").draw(None)
    assert image.getcolors() == [(image.width * image.height, (7, 7, 7))]


class Unseen(Own):
    """Begins with what is no number, which a policy sees as zeros."""

    def reset(self, key):
        return super().reset(key)[0], jnp.full(1, jnp.nan)

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step.replace(reward=action.astype(jnp.float32))


def test_a_film_begins_with_what_a_policy_sees(tmp_path):
    envs.register("Unseen", Unseen)
    policy = make_policy("Unseen")
    policy.params["policy_head"]["bias"] = np.float32(
        [-9.0, 9.0]
    )  # the other one of what is no number
    returns = render.render(policy, tmp_path / "film.gif", episodes=2)
    np.testing.assert_array_equal(returns, play(policy, 2).score)
    assert returns == [6.0, 6.0]


class Blank(Own):
    def render(self, mode="human"):
        raise AssertionError


class Wrong(Own):
    def render(self, state):
        return np.zeros((4, 8))


def test_an_environment_may_draw_itself(tmp_path):
    envs.register("Own", Own)
    assert render.render(make_policy("Own"), tmp_path / "film.gif", episodes=1) == [6.0]
    pictures, _ = read(tmp_path / "film.gif")
    assert len(pictures) == 7
    cell = pictures.shape[2] / 8
    places = [middle_of(picture, "#ff0000") for picture in pictures]
    expected = [(2.5 * cell, cell * (column + 0.5)) for column in range(7)]
    np.testing.assert_allclose(places, expected, atol=1)


class Uneven(Own):
    """Starts somewhere, and ends at the right."""

    max_episode_steps = 20

    def reset(self, key):
        return Lamp(jax.random.randint(key, (), 0, 5), key), jnp.zeros(1)

    def step(self, key, state, action):
        state, step = super().step(key, state, action)
        return state, step.replace(terminated=state.position == 7)


def test_every_episode_ends_with_its_final_state(tmp_path):
    envs.register("Uneven", Uneven)
    returns = render.render(make_policy("Uneven"), tmp_path / "film.gif", 6, max_frames=24)
    stride = math.ceil(max(returns) / 3)  # four frames for each
    assert {score % stride > 0 for score in returns} == {False, True}
    pictures, shown = read(tmp_path / "film.gif")
    assert len(pictures) == sum(math.ceil(score / stride) + 1 for score in returns)
    ends = [picture for picture, time in zip(pictures, shown, strict=True) if time == 1000]
    cell = pictures.shape[2] / 8
    columns = [middle_of(picture, "#ff0000")[1] for picture in ends]
    np.testing.assert_allclose(columns, 6 * [7.5 * cell], atol=1)


@pytest.mark.parametrize(
    ("factory", "file", "message"),
    [
        (Blank, "film.gif", "Mine cannot be drawn"),
        (Wrong, "film.gif", r"Mine: render\(state\) gave float64 \[4, 8\]"),
        (Own, "film.png", "film.png: a film is a .gif or an .mp4"),
        (Own, "nowhere/film.gif", "film.gif cannot be written: No such file or directory"),
        (Own, "file/film.gif", "film.gif cannot be written: Not a directory"),
        (Own, "folder.gif", "folder.gif cannot be written: Is a directory"),
        (Own, "film.mp4", "film.mp4: an .mp4 needs ffmpeg .*; a .gif does not"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_file(factory, file, message, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    envs.register("Mine", factory)
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.gif").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=message) as error:
        render.render(make_policy("Mine"), tmp_path / file, episodes=1)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_episodes(tmp_path):
    with pytest.raises(ConfigError, match="--episodes 0: must be at least 1"):
        render.render(make_policy("CartPole-v1"), tmp_path / "film.gif", episodes=0)


def stand_in(folder, script):
    """Something that is called ffmpeg."""
    (folder / "ffmpeg").write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    (folder / "ffmpeg").chmod(0o755)


def test_mp4_has_frames_of_equal_length(tmp_path, monkeypatch):
    stand_in(tmp_path, "open(sys.argv[-1], 'wb').write(sys.stdin.buffer.read())")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    envs.register("Own", Own)
    policy = make_policy("Own")
    render.render(policy, tmp_path / "film.gif", episodes=1)
    render.render(policy, tmp_path / "film.mp4", episodes=1)
    with Image.open(tmp_path / "film.gif") as image:
        width, height = image.size
    frames = np.fromfile(tmp_path / "film.mp4", np.uint8).reshape(-1, height, width, 3)
    assert len(frames) == 6 + 15  # 15 a second, the last one for a second


def test_what_ffmpeg_says_is_passed_on(tmp_path, monkeypatch):
    stand_in(tmp_path, "sys.exit('banner\\nUnknown encoder')")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    envs.register("Own", Own)
    with pytest.raises(ConfigError, match="ffmpeg could not write the film: Unknown encoder"):
        render.render(make_policy("Own"), tmp_path / "film.mp4", episodes=1)
    assert [path.name for path in tmp_path.iterdir()] == ["ffmpeg"]


BALL = """
<mujoco><worldbody>
  <geom type="plane" size="5 5 1"/>
  <geom type="sphere" size="0.2" pos="2 0 0.2"/>
  <body pos="0 0 1">{joint}<geom type="box" size="0.3 0.1 0.1"/></body>
</worldbody></mujoco>
"""


def place_bodies(*places):
    return np.array([(*place, 1, 0, 0, 0) for place in ((0, 0, 0), *places)], np.float32)


def test_quaternion_turns_anticlockwise():
    quarter = np.array([math.sqrt(0.5), 0, 0, math.sqrt(0.5)])  # about z
    turned = sketches._rotated(np.array([[1.0, 0, 2], [0, 1, 0]]), quarter)
    np.testing.assert_allclose(turned, [[0, 1, 2], [-1, 0, 0]], atol=1e-12)


def test_bodies_are_where_they_are_in_the_world():
    import mujoco

    model = mujoco.MjModel.from_xml_string(BALL.format(joint='<joint axis="0 1 0"/>'))
    bodies = sketches.Bodies(model)
    start, right, up = (
        middle_of(bodies.draw(place_bodies(place)), sketches.BLUE)
        for place in ((0, 0, 1), (0.5, 0, 1), (0, 0, 1.5))
    )
    assert right[1] - start[1] > 20
    assert abs(up[1] - start[1]) < 3
    assert start[0] - up[0] > 20


def test_camera_goes_along_with_a_body_that_is_free():
    import mujoco

    model = mujoco.MjModel.from_xml_string(BALL.format(joint="<freejoint/>"))
    bodies = sketches.Bodies(model)
    images = [bodies.draw(place_bodies((x, 0, 1))) for x in (0, 1)]
    body = [middle_of(image, sketches.BLUE) for image in images]
    ball = [middle_of(image, sketches.GREY) for image in images]
    np.testing.assert_allclose(body[0], body[1], atol=2)
    assert ball[0][1] - ball[1][1] > 20


def test_bodies_of_playground_are_where_mujoco_has_them():
    data = SimpleNamespace(xpos=jnp.ones((2, 5, 3)), xquat=jnp.zeros((2, 5, 4)))
    poses = sketches._poses(SimpleNamespace(env=SimpleNamespace(data=data)))
    np.testing.assert_array_equal(poses, np.broadcast_to([1, 1, 1, 0, 0, 0, 0], (2, 5, 7)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in envs.list_environments() if n.startswith("brax/")])
def test_every_brax_environment_is_in_the_picture(name):
    env = envs.make(name)
    state, _ = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 1))
    image = sketches.sketch_of(env, name).draw(
        np.asarray(sketches._poses(SimpleNamespace(env=state)))[0]
    )
    row, column = middle_of(image, sketches.BLUE)
    assert 0.1 < row / image.height < 0.9
    assert 0.1 < column / image.width < 0.9


def test_physics_is_drawn(tmp_path):
    policy = make_policy("brax/inverted_pendulum", episode_length=8, backend="spring")
    (score,) = render.render(policy, tmp_path / "film.gif", episodes=1, sampled=True)
    pictures, shown = read(tmp_path / "film.gif")
    assert len(pictures) == score / 2 + 1  # 50 steps a second
    poles = [middle_of(picture, sketches.SKY)[1] for picture in pictures]
    assert len(set(poles)) > 2
    assert shown[0] == 40
