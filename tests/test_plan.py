"""Which runs lie where, and what memory they take."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from probes import TimeLimit, Unusual

from purejaxppo import envs
from purejaxppo.config import Config, Hyper
from purejaxppo.plan import Footprint, Plan, fit, make_footprint, make_plan, suits_one_thread
from purejaxppo.train import Trainer, make_setup, stack_hypers


def test_a_plan_is_filled_up_to_whole_blocks_on_every_device():
    assert Plan(num_runs=1, num_devices=1, block=1).padded == 1
    assert Plan(num_runs=7, num_devices=1, block=4).padded == 8
    assert Plan(num_runs=7, num_devices=2, block=2).padded == 8
    assert Plan(num_runs=8, num_devices=2, block=2).padded == 8
    assert Plan(num_runs=9, num_devices=2, block=4).padded == 16


@pytest.mark.on_cpus
def test_a_plan_uses_the_devices_there_are_and_no_more():
    devices = len(jax.devices())
    setup = make_setup(Config(num_envs=4, num_steps=8), TimeLimit())
    assert make_plan(setup, 1) == Plan(1, 1, 1)
    assert make_plan(setup, 1000, block=3) == Plan(1000, devices, 3)
    # Devices whose runs would all be copies stay idle, but one: a program for one may round differently.
    assert make_plan(setup, 8, block=8) == Plan(8, min(devices, 2), 8)
    assert make_plan(setup, 8, block=3) == Plan(8, min(devices, 3), 3)
    plan = make_plan(setup, 10)
    assert plan.num_devices == -(-10 // plan.block) <= devices
    assert plan.padded - 10 < plan.num_devices * plan.block


@pytest.mark.parametrize(
    ("num_envs", "backend", "block"),
    [(1, "cpu", 8), (4, "cpu", 8), (8, "cpu", 4), (16, "cpu", 2), (64, "cpu", 1), (64, "gpu", 64)],
)
def test_a_block_is_what_fits_the_cache_of_a_core(monkeypatch, num_envs, backend, block):
    """Minibatches of 32 steps of each environment, of two networks of 2 x 64 units."""
    setup = make_setup(Config(num_envs=num_envs, num_steps=128, num_minibatches=4))
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform=backend)])
    assert make_plan(setup, 64).block == block


@pytest.mark.parametrize(
    ("options", "suits"),
    [
        ({}, True),
        ({"num_envs": 64, "num_minibatches": 16}, True),  # minibatches of 512
        ({"num_envs": 64}, False),  # of 2,048
        ({"torso_layers": (256, 256)}, False),
        ({"torso_layers": (), "value_layers": (256,) * 5}, False),
        ({"gru_units": 16}, True),
        ({"gru_units": 64}, False),
        ({"num_envs": 1024, "num_steps": 2}, False),
        ({"env": "hopper"}, True),
        ({"env": "Breakout-MinAtar"}, False),
        ({"env": "octax/brix"}, False),
        ({"env": "xminigrid/MiniGrid-FourRooms"}, False),
        ({"env": "craftax/Craftax-Symbolic-v1"}, True),
        ({"env": "craftax/Craftax-Pixels-v1"}, False),
        ({"env": "envpool/Pong-v5"}, False),
        ({"env": "my_module:MyEnv"}, False),
    ],
)
def test_small_trainings_without_images_suit_one_thread(options, suits):
    assert suits_one_thread(Config(**options)) is suits


def test_registered_environments_may_have_images():
    envs.register("mine", TimeLimit)
    assert not suits_one_thread(Config(env="mine"))


@pytest.mark.parametrize(
    ("may_truncate", "num_minibatches", "update_epochs", "gru_units"),
    [
        (False, 4, 4, None),
        (True, 64, 4, None),
        (False, 4, 800, None),
        (False, 4, 4, 32),
        (True, 4, 4, 32),
    ],
)
def test_a_footprint_lies_above_what_is_compiled_and_not_far(
    may_truncate, num_minibatches, update_epochs, gru_units
):
    """Also where as many final observations as steps are to be valued, and where shuffles are large."""
    config = Config(
        num_envs=64,
        num_steps=128,
        num_minibatches=num_minibatches,
        update_epochs=update_epochs,
        gru_units=gru_units,
    )
    env = Unusual(may_truncate=may_truncate, shape=(4,))
    plan = Plan(num_runs=4, num_devices=1, block=2)
    trainer = Trainer(make_setup(config, env), plan)
    hypers = trainer.shard(stack_hypers([Hyper()] * 4))
    shapes = jax.eval_shape(trainer.init, trainer.shard(np.zeros(4, np.uint32)), hypers, ())
    estimate = make_footprint(trainer.setup, plan, shapes).total(plan)
    shared = (np.int32(1), np.float32(1))
    quickly = {"xla_backend_optimization_level": 0}  # which takes no other memory
    program = trainer.chunk.lower(shapes, hypers, shared).compile(compiler_options=quickly)
    memory = program.memory_analysis()
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    size += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert size < estimate
    if jax.default_backend() == "cpu":  # the others need far less
        assert 0.6 * estimate < size


def test_blocks_are_as_large_as_memory_allows():
    plan, footprint = Plan(num_runs=10, num_devices=2, block=5), Footprint(held=10, work=100)
    assert footprint.total(plan) == 10 * 10 + 2 * 5 * 100
    assert fit(plan, footprint, 1100) == plan
    assert fit(plan, footprint, 1099).block == 4  # although that computes 16 runs
    assert fit(plan, footprint, 12 * 10 + 2 * 2 * 100).block == 2
    assert fit(plan, footprint, 10 * 10 + 2 * 100).block == 1
    assert fit(plan, footprint, 299) is None
    assert Footprint(10, 100).total(dataclasses.replace(plan, shards=3)) == 3 * 1100
