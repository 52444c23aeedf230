"""The same CartPole training by rejax, run with an interpreter that has rejax installed.

    python peer_rejax.py NUM_ENVS ITERATIONS REPEATS [RUNS]

Prints the steps per second of each repeat after the first, with compilation left out, of all runs
together where it is vmapped over several seeds.
"""

import sys
import time

import jax
import rejax  # pyright: ignore[reportMissingImports]

NUM_STEPS = 128


def main() -> None:
    """Trains without any evaluation, the initial one included."""
    num_envs, iterations, repeats, *rest = map(int, sys.argv[1:])
    num_runs = rest[0] if rest else 1
    steps = num_envs * NUM_STEPS * iterations
    algorithm = rejax.get_algo("ppo").create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_steps=NUM_STEPS,
        num_epochs=4,
        num_minibatches=4,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
        agent_kwargs={"hidden_layer_sizes": (64, 64), "activation": "tanh"},
    )
    algorithm = algorithm.replace(eval_callback=lambda *_: ())
    train = jax.jit(jax.vmap(algorithm.train) if rest else algorithm.train)
    for repeat in range(repeats):
        started = time.perf_counter()
        key = jax.random.key(repeat)
        jax.block_until_ready(train(jax.random.split(key, num_runs) if rest else key))
        if repeat:
            print(num_runs * steps / (time.perf_counter() - started), flush=True)


if __name__ == "__main__":
    main()
