"""Right answers, wrong ones, and programs that misbehave."""

import pytest

from failfast_jax.bench import scoring
from failfast_jax.public_data.question_sets import humaneval_problems


def test_humaneval_answers():
    problem = humaneval_problems()[0]
    rest = problem["canonical_solution"]
    for answer in (rest, "```\n" + problem["prompt"].partition("\n\n\n")[2] + rest):  # no import, fence never closed
        assert scoring.is_right("humaneval", answer, problem)
    for answer in ("", "    return False\n", "I cannot do that.", "```python\ndef other():\n    pass\n```"):
        assert not scoring.is_right("humaneval", answer, problem)


ADD = "def add(a, b):\n    return a + b\n"
FENCE = f"```python\n{ADD}```\n"
ADDING = {
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
}


def moved(text: str, by: str) -> str:
    return "".join(f"{by}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    "answer",
    [
        f"1. The function:\n\n{moved(FENCE, '   ')}",
        f"- Code:\n{moved(FENCE, chr(9))}",
        f"Steps:\n\n{moved(FENCE, '        ')}",  # too far to the right to be a fence
        f"> Quoted:\n>\n{moved(FENCE, '> ')}",
        FENCE.replace("\n", "\r\n"),
        FENCE.replace("```", "~~~"),
        FENCE.replace("python", ""),
        FENCE.replace("python", " {.python .numberLines}"),
        FENCE.removesuffix("```\n"),
        FENCE.replace("\n```", "```"),
        FENCE.removesuffix("```\n") + "\nprint(add(1,",  # cut off
        f"Sure: {FENCE}",
        f"<div>\n{FENCE}</div>",
        "```bash\npip install x\n```\n" + FENCE,
        "```python\n>>> add(1, 2)\n3\n```\n" + FENCE + "```python\nassert add(1, 2) == 4\n```",
        "```\nadd(a, b): a plus b, as in def add(a, b)\n```\n" + FENCE,
        "```python\nimport math\n\ndef plus(a, b):\n    return a + b\n```\n" + FENCE.replace("a + b", "plus(a, b)"),
        FENCE.replace("a + b", "plus(a, b)") + "where\n```python\ndef plus(a, b):\n    return a + b\n```\n",
        FENCE + FENCE.replace("+", "-"),
        f"<think>\nPerhaps\n{FENCE.replace('+', '-')}</think>\n{FENCE}",
        f"Here it is:\n\n{ADD}\nIt adds.",
        f"from __future__ import annotations\n{ADD}\nif __name__ == '__main__':\n    print(add(int(input()), 1))",
        FENCE.replace("    return", '    """Adds.\n\n    ```\n    3\n    ```\n    """\n    return'),
        "```python\n    return a + b\n```",
        "    return a + b\n\n\nprint(add(1, 2))\n",
        "    return a + b\r\n\r\nprint(add(1,\r\n",
    ],
)
def test_code_is_found_in_every_form(answer):
    assert scoring.is_right("humaneval", answer, ADDING)


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
        ("\\fbox{8}, or in one box\n\\boxed\n{8}", "8", True),
        ("\\boxed{7}", "8", False),
        ("I do not know", "8", False),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
    ],
)
def test_mathematics(answer, gold, right):
    assert scoring.is_right("math", answer, {"answer": gold}) is right


@pytest.mark.parametrize(
    "answer", [r"\boxed{8}. Not \boxed{7}.", r"\boxed{7} is wrong: \boxed{8}", r"<think>\boxed{7}</think>\boxed{8}"]
)
def test_a_number_that_was_taken_back_is_none(answer):
    assert scoring.is_right("math", answer, {"answer": "8"}) and not scoring.is_right("math", answer, {"answer": "7"})
    assert scoring.is_right("math", r"Solutions: \boxed{1} and \boxed{-2}", {"answer": "1,-2"})


BOXES_OF_B = (
    r"B|b| B |(B)|(b)|[B]|B.|B)|$B$|**B**|\bf B|\boxed{B}|B. Both A' and x|\text{B}|\text{(B)}|(\text{B})|\textbf{B}|"
    r"\mathrm{B}|\mathbf{(B)}|\text{\textbf{B}}|\textbf{(B) } 12|B. 12|B: x^2|B) \frac{1}{2}|B = 12|(B)\ 12|"
    r"\text{B}\quad 12|B \; \frac{1}{2}|Option B|\text{Answer: B}|choice (B)|\text{The correct answer is B}|Answer = B|"
    r"B, the cell|\text{B) A cell}|(B) A cell and x"
).split("|")
ANSWERS = {
    r"\boxed B": "B",
    r"\boxed{ \text{B": "B",  # cut off
    r"\fbox{B}": "B",
    "\\boxed\n{B}": "B",
    r"\boxed{A}, no: \boxed{(c)}": "C",
    r"\boxed{A} is wrong: \boxed{\textbf{B}}": "B",
    r"$\boxed{B}$. $\boxed{A}$ is incorrect.": "B",
    r"\boxed{B}, not \boxed{A}": "B",
    r"\boxed{B} \text{(not } \boxed{A})": "B",
    r"\boxed{B} rather than $\boxed{C}$": "B",
    r"It isn't \boxed{A}.": "A",  # the only one
    r"\boxed{B}, which is \boxed{12}": "B",
}
NO_BOXES_OF_A_LETTER = (
    r"E|12||\text{Both}|A or B|A, B|(A) and (B)|AB|A molecule|Cl|A, B and C|B, A and C|B) or A)|a = 5|\alpha"
).split("|")
NO_LETTERS = ["the answer is A", r"\boxed", r"\boxedB", *(rf"\boxed{{{content}}}" for content in NO_BOXES_OF_A_LETTER)]


@pytest.mark.parametrize("content", BOXES_OF_B)
def test_letters_are_read_in_every_form(content):
    assert scoring.boxed_letter(rf"so $\boxed{{{content}}}$.") == "B"


def test_choices():
    assert {answer: scoring.boxed_letter(answer) for answer in (*ANSWERS, *NO_LETTERS)} == {
        **ANSWERS,
        **dict.fromkeys(NO_LETTERS),
    }
    assert scoring.is_right("choice", r"<think>\boxed{A}</think>It is \boxed{D}", {"answer": "D"})
    assert not scoring.is_right("choice", r"\boxed{D}", {"answer": "A"})
