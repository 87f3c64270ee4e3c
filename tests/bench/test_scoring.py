"""Right answers, wrong ones, and programs that misbehave."""

import pytest

from failfast_jax.bench import scoring
from failfast_jax.bench.prompts import humaneval_problems


def test_humaneval_answers():
    problem = humaneval_problems()[0]
    rest = problem["canonical_solution"]
    whole = f"Sure, here it is:\n\n```python\n{problem['prompt']}{rest}\n```\n\nIt compares all pairs.\n```\nTrue\n```"
    alone = "```\n" + problem["prompt"].partition("\n\n\n")[2] + rest  # no import, fence never closed
    for answer in (rest, rest + "\n\nprint(has_close_elements([1.0], 1))\n", whole, alone):
        assert scoring.is_right("humaneval", answer, problem)
    for answer in ("", "    return False\n", "I cannot do that.", "```python\ndef other():\n    pass\n```"):
        assert not scoring.is_right("humaneval", answer, problem)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "data = bytearray(2**31)",
        "open('big', 'wb').write(bytes(2**22))",
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
        "import os; assert os.environ.get('FAILFAST_COMPILE_CACHE')",
        "import os; assert os.listdir('.')",
        "import os; os.write(1, b'yes'); raise SystemExit",
        "def broken(:",
        "assert False",
    ],
)
def test_programs_that_fail(program, monkeypatch):
    monkeypatch.setenv("FAILFAST_COMPILE_CACHE", "seen")
    assert not scoring.run_program(program, seconds=1)


def test_a_program_that_runs():
    assert scoring.run_program("import math\nopen('note', 'w').write('x')\nprint(math.pi)\nassert True", seconds=5)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("Half of it: $\\boxed{\\frac{1}{2}}$.", "\\frac12", True),
        ("so the total is \\boxed{1,000}.", "1000", True),
        ("\\boxed{7}", "8", False),
        ("I do not know", "8", False),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
    ],
)
def test_mathematics(answer, gold, right):
    assert scoring.is_right("math", answer, {"answer": gold}) is right


def test_choices():
    assert scoring.boxed_letter("\\boxed{A}, no: \\boxed{(c)}") == "C"
    assert scoring.boxed_letter("\\boxed{\\text{B}}") == "B"
    assert scoring.boxed_letter("the answer is A") is None
    assert scoring.is_right("choice", "\\boxed{D}", {"answer": "D"})
