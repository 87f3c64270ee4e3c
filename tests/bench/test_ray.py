"""Questions shared out among Ray actors: every one answered once, in order, though an actor is lost."""

from __future__ import annotations

import json
import threading
import time

import pytest

from failfast_jax.bench.__main__ import main
from failfast_jax.bench.answer_log import RECORDS
from failfast_jax.bench.ray_workers import RayComparison

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.long(rare=True)
QUESTIONS = ["Name a colour.", "Count to five.", "What is 2 + 2?", "Say hello.", "Name a fruit."]


@pytest.fixture(scope="module", autouse=True)
def own_cluster():
    import ray

    yield
    ray.shutdown()


def arguments(folder, *more):
    file = folder.parent / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    common = "run", "--dataset", str(file), "--methods", "lookup", "--max-new-tokens", "8", "--no-figures"
    return [*common, "--out", str(folder), *more]


def answers(folder):
    lines = (json.loads(line) for line in (folder / RECORDS).read_text().splitlines())
    return [line for line in lines if line["kind"] == "answer"]


def test_a_lost_actor_changes_nothing(tmp_path, monkeypatch):
    asked = []
    run = RayComparison.run

    def losing(self, log):
        def lose():
            while not log.answers:
                time.sleep(0.05)
            self.ray.kill(self.actors[0], no_restart=False)
            asked.append("lost")

        threading.Thread(target=lose, daemon=True).start()
        run(self, log)

    monkeypatch.setattr(RayComparison, "run", losing)
    assert main(arguments(tmp_path / "ray", "--engine", "ray", "--actors", "2")) == 0
    monkeypatch.undo()
    assert asked == ["lost"]
    found = answers(tmp_path / "ray")
    assert len({(line["question"], line["setting"]) for line in found}) == len(found) == 2 * len(QUESTIONS)
    assert main(arguments(tmp_path / "local")) == 0
    texts = {(line["question"], line["setting"]): line["output_ids"] for line in answers(tmp_path / "local")}
    assert {(line["question"], line["setting"]): line["output_ids"] for line in found} == texts
    # Nothing is left to do, and the same figures come out of the records in either order.
    assert main(arguments(tmp_path / "ray", "--engine", "ray")) == 0
    assert len(answers(tmp_path / "ray")) == len(found)


def test_errors_of_actors_are_told_in_a_line(tmp_path, capsys):
    assert main(arguments(tmp_path / "out", "--engine", "ray", "--target", str(tmp_path / "nothing"))) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("error: ")


def test_a_corpus_needs_the_questions_in_order(tmp_path, capsys):
    flags = "--methods", "suffix", "--set", "suffix:corpus=1000", "--engine", "ray"
    assert main(arguments(tmp_path / "out", *flags)) == 2
    assert "--engine local" in capsys.readouterr().err
