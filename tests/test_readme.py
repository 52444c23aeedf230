"""What the README shows works as shown."""

import re
from pathlib import Path

import numpy as np

from benchmarks import compare
from benchmarks.shared import load
from scripts import custom_environment

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_example(capsys):
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (code,) = [example for example in examples if "make_train" in example]
    small = code.replace("total_timesteps=500_000", "total_timesteps=4096")
    assert small != code
    exec(small, {})
    assert capsys.readouterr().out == "(8, 2)\n(8, 16)\n"


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / link).exists(), link


def test_custom_environment_learns(capsys):
    """The example reaches the goal: 1 less a hundredth for each of at most 9 steps before it."""
    custom_environment.main()
    shown = capsys.readouterr().out
    returns = [float(x) for x in re.findall(r"[\d.]+", shown.split(":")[1])]
    assert len(returns) == 4
    assert np.min(returns) > 0.9


def test_its_table_is_of_the_results():
    assert compare.with_table(README, load("compare", {})) == README
