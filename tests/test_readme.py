"""What the README shows works as shown."""

import re

import numpy as np

from benchmarks import compare, returns
from benchmarks.shared import README, load, with_table
from scripts import custom_environment

TEXT = README.read_text()


def test_python_example(capsys):
    examples = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (code,) = [example for example in examples if "make_train" in example]
    small = code.replace("total_timesteps=500_000", "total_timesteps=4096")
    assert small != code
    exec(small, {})
    assert capsys.readouterr().out == "(8, 2)\n(8, 16)\n"


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (README.parent / link).exists(), link


def test_custom_environment_learns(capsys):
    """The example reaches the goal: 1 less a hundredth for each of at most 9 steps before it."""
    custom_environment.main()
    shown = capsys.readouterr().out
    returns = [float(x) for x in re.findall(r"[\d.]+", shown.split(":")[1])]
    assert len(returns) == 4
    assert np.min(returns) > 0.9


def test_its_tables_are_of_the_results():
    assert with_table(TEXT, "compare", compare.table(load("compare", {}))) == TEXT
    assert with_table(TEXT, "returns", returns.table()) == TEXT
