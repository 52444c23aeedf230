"""Other trainers, each in a virtual environment of its own.

    python -m benchmarks.peers DIRECTORY
    python -m benchmarks.peers DIRECTORY --only rejax

Makes what is not there yet, with JAX for an NVIDIA GPU where there is an accelerator. With PyTorch,
Stable-Baselines3 takes 5.4 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

from benchmarks import shared

# Each with the newest versions that it works with.
PEERS = {
    "rejax": ["rejax==0.1.3", "gymnax==0.0.9", "jax==0.10.2"],
    "sbx": ["sbx-rl==0.28.0", "gymnasium[classic-control]", "jax==0.10.2"],
    "sb3": [
        "stable-baselines3==2.9.0",
        "gymnasium[classic-control,mujoco]",
        "ale-py",
        "opencv-python-headless",
    ],
    "purejaxrl": ["gymnax==0.0.9", "brax==0.14.2", "flax", "optax", "distrax", "jax==0.10.2"],
}
# Those that are no package: where they are, and what of it is measured.
_SOURCES = {
    "purejaxrl": (
        "https://github.com/luchris429/purejaxrl",
        "31756b197773a52db763fdbe6d635e4b46522a73",
    )
}
_SHOW = "import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {}}}))"


def python(directory: Path, peer: str) -> Path:
    """The interpreter that has it installed."""
    return directory / peer / "bin" / "python"


def _source(directory: Path, peer: str) -> Path:
    return directory / peer / "source"


def install(directory: Path, peer: str) -> None:
    """Makes its virtual environment, unless it is there."""
    if peer in _SOURCES and not _source(directory, peer).exists():
        address, commit = _SOURCES[peer]
        source = str(_source(directory, peer))
        subprocess.run(["git", "clone", "-q", address, source], check=True)
        subprocess.run(["git", "-C", source, "checkout", "-q", commit], check=True)
    if python(directory, peer).exists():
        return
    wanted = PEERS[peer]
    if shared.has_accelerator():
        wanted = [name.replace("jax==", "jax[cuda12]==") for name in wanted]
    venv.create(directory / peer, with_pip=True)
    command = [python(directory, peer), "-m", "pip", "install", "-q", *wanted]
    subprocess.run(command, check=True)


def versions(directory: Path, peer: str) -> dict[str, str]:
    """Of what was asked for."""
    names = [requirement.split("==")[0].split("[")[0] for requirement in PEERS[peer]]
    command = [python(directory, peer), "-c", _SHOW.format(names)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return {peer: _SOURCES[peer][1][:7]} | found if peer in _SOURCES else found


def command(directory: Path, peer: str, task: dict[str, Any]) -> list[str]:
    """What trains; it prints the steps per second."""
    script = Path(__file__).with_name(f"peer_{peer.replace('sbx', 'sb3')}.py")
    about = {"peer": peer, "source": str(_source(directory, peer))}
    return [str(python(directory, peer)), str(script), json.dumps(about | task)]


def main() -> None:
    """Installs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", choices=PEERS, action="append")
    arguments = parser.parse_args()
    for peer in arguments.only or PEERS:
        install(arguments.directory, peer)
        print(peer, versions(arguments.directory, peer), flush=True)


if __name__ == "__main__":
    main()
