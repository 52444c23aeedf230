"""What benchmarks share: results that are kept, and trainings by the command line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"


def load(name: str, nothing: Any) -> Any:
    """What `results/NAME.json` has, or nothing."""
    stored = RESULTS / f"{name}.json"
    return json.loads(stored.read_text()) if stored.exists() else nothing


def save(name: str, results: Any, text: str) -> None:
    """Writes `results/NAME.json` and the same as Markdown."""
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text)


def with_table(text: str, name: str, table: str) -> str:
    """The README with this table in place of the one between the marks of `benchmarks.NAME`."""
    begin, end = f"<!-- benchmarks.{name} -->\n", "<!-- end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end, maxsplit=1)[1]}"


def device() -> str:
    """What `machine.device_name` says, asked in a process that ends: this one leaves the memory to others."""
    ask = "from purejaxppo import machine; print(machine.device_name())"
    return subprocess.run(
        [sys.executable, "-c", ask], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def has_accelerator() -> bool:
    """Whether JAX finds one here."""
    return not device().endswith("(cpu)")


@contextlib.contextmanager
def trained(*options: object) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Run directory and summary of a training with these options of the command line."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [sys.executable, "-m", "purejaxppo.run", *map(str, options)]
        command += ["--run-dir", str(run_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield run_dir, json.loads((run_dir / "summary.json").read_text())
