"""Costs of rounds: measured in the loop itself, remembered for this machine, taken anew when they drift."""

import json
import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_engines import extended_engine

from failfast_jax import FailFast
from failfast_jax.errors import ConfigError, OptionError
from failfast_jax.generation_config import GenerationConfig
from failfast_jax.policy import cost_book
from failfast_jax.policy.cost_book import CostBook, RoundCounts, costs_of, entry_of, kalman_update, prior_covariance
from failfast_jax.policy.expected_tokens import Costs
from failfast_jax.results import Round, RowLog

MEASURE = cost_book.measure


def session(batch: int = 1):
    model = extended_engine()
    drafter = model.build_drafter(GenerationConfig("auto"))
    return model.runtime.session(drafter, batch=batch, capacity=256, decodes=batch == 1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where costs are kept, and how often they were measured."""
    monkeypatch.setattr(CostBook, "path", staticmethod(lambda: tmp_path / cost_book.FILE))
    counted = []

    def measured(session):
        counted.append(session.batch)
        return Costs(np.arange(1, len(session.plan.widths) + 1, dtype=np.float32), np.float32(0.5), 0, 0)

    monkeypatch.setattr(cost_book, "measure", measured)
    return tmp_path / cost_book.FILE, counted


def test_rounds_of_each_kind_are_timed():
    work = session()
    widths = work.plan.widths
    costs = MEASURE(work)
    assert costs.verify.shape == (len(widths),) and (np.diff(costs.verify) >= 0).all() and costs.verify[0] > 0
    assert costs.draft > 0 and int(costs.rows) == int(costs.ask) == 0
    for rows, ask in [*((width, -1) for width in widths), (1, 1)]:
        timed = work.with_costs(Costs.of(np.ones(len(widths)), 0.0, rows, ask))
        (log,) = timed.rounds(timed.advance(timed.start_endless([3, 4, 5]), 3))
        drafted = min(rows - 1, work.drafter.max_draft)
        assert [len(entry.drafted) for entry in log.rounds] == [drafted] * 3
        assert [entry.passes for entry in log.rounds] == [int(ask > 0)] * 3


class TimedSession:
    """A session on a clock of its own: a call takes 3 s, a round 1 s and 0.1 s per row, a drafter's pass 0.5 s."""

    def __init__(self):
        self.plan, self.capacity, self.now, self.kind = SimpleNamespace(widths=(1, 2, 8)), 64, 0.0, None
        self.drafter = SimpleNamespace(shape=SimpleNamespace(has_model=True))

    def with_costs(self, costs):
        self.kind = int(costs.rows), max(int(costs.ask), 0)
        return self

    def start_endless(self, prompt):
        return SimpleNamespace(log=SimpleNamespace(drafter_passes=0))

    def advance(self, state, rounds):
        rows, passes = self.kind
        self.now += 3 + rounds * (1 + 0.1 * rows + 0.5 * passes)
        state.log.drafter_passes += rounds * passes
        return state


def test_a_call_of_the_loop_is_no_part_of_its_rounds(monkeypatch):
    timed = TimedSession()
    monkeypatch.setattr(cost_book.time, "perf_counter", lambda: timed.now)
    costs = MEASURE(timed)
    np.testing.assert_allclose([*costs.verify, costs.draft], [1.1, 1.2, 1.8, 0.5], rtol=1e-5)


def test_costs_are_remembered_for_this_machine(cache, caplog):
    path, counted = cache
    work = session()
    priced, entry = CostBook().price(work)
    assert entry["source"].startswith("measured") and entry["draft"] == 0.5
    np.testing.assert_array_equal(priced.drafter.costs.verify, list(entry["verify"].values()))
    assert CostBook().price(work)[1] == entry and len(counted) == 1
    CostBook().price(session(batch=2))
    assert counted == [1, 2] and len(json.loads(path.read_text())["costs"]) == 2

    file = json.loads(path.read_text())
    file["machine"]["processor"] = "Another 9000"
    path.write_text(json.dumps(file))
    with caplog.at_level(logging.WARNING, logger="failfast_jax"):
        book = CostBook()
        book.price(work)
        book.price(session(batch=2))
    assert counted == [1, 2, 1, 2]
    assert [r.message for r in caplog.records] == [f"{path}: ignored: measured on another machine (processor)"]
    assert json.loads(path.read_text())["machine"] != file["machine"]


def test_the_log_says_when_costs_were_measured_and_how_to_measure_again(cache, caplog):
    alone = FailFast(extended_engine().target)
    text = alone.runtime.session(alone.build_drafter(GenerationConfig("auto")), capacity=256, decodes=False)
    with caplog.at_level(logging.INFO, logger="failfast_jax"):
        for work, passes in ((session(), ", a drafter pass 0.50"), (text, "")):
            CostBook().price(work)
            when = rf"\(measured \d{{4}}-\d\d-\d\d \d\d:\d\d; remove {cache[0]} to measure again\)"
            assert re.search(rf"{when}; in steps, verifies by rows [^a-z]*{passes}$", caplog.messages[-1])


def test_costs_that_drift_are_measured_again(cache):
    _, counted = cache
    book, work = CostBook(), session()
    book.price(work)
    done = RoundCounts((1, *[0] * (len(work.plan.widths) - 1)), 0)
    for took in (1.9, 2.0, 1.0, 2.0, 0.5):  # two in a row do not count
        book.learn(work, done, took)
        book.price(work)
    assert len(counted) == 1
    book.learn(work, done, 2.0)
    book.price(work)
    assert len(counted) == 2
    CostBook().price(work)
    assert len(counted) == 2  # and kept


def test_costs_follow_what_answers_take():
    """A step becomes 30 % cheaper and wide verifies 10 %: after some dozens of answers both are known."""
    rng, widths = np.random.default_rng(0), (1, 4, 8, 16)
    costs = Costs(np.float32([10, 13, 14, 18]), np.float32(1.0), np.int32(0), np.int32(0))
    true, doubt = np.array([7.0, 11.0, 12.5, 16.5, 0.8]), prior_covariance(5)
    for _ in range(60):
        rounds = tuple(int(n) for n in rng.multinomial(80, rng.dirichlet([2, 1, 1.5, 0.7])))
        done = RoundCounts(rounds, int(rng.integers(0, 60)))
        took = float(np.append(done.rounds, done.passes) @ true * rng.normal(1, 0.02))
        costs, doubt = kalman_update(costs, doubt, done, took)
    np.testing.assert_allclose(costs.verify / costs.verify[0], true[:4] / true[0], rtol=0.05)
    assert (np.diff(costs.verify) >= 0).all() and entry_of(costs, widths)["verify"]["1"] == pytest.approx(7, rel=0.05)


def test_corrected_costs_are_filed(cache):
    path, _ = cache
    book, work = CostBook(), session()
    book.price(work)
    done = RoundCounts((40, *[0] * (len(work.plan.widths) - 1)), 7)
    expected = float(done.expected_seconds(book.price(work)[0].drafter.costs).sum())
    book.learn(work, done, 1.02 * expected)
    assert (
        book.price(work)[1]["verify"]["1"] > 1 and json.loads(path.read_text())["costs"][work.key]["verify"]["1"] == 1
    )
    for _ in range(12):
        book.learn(work, done, 1.3 * expected)
    priced, entry = book.price(work)
    assert float(done.expected_seconds(priced.drafter.costs).sum()) == pytest.approx(1.3 * expected, rel=0.05)
    filed = json.loads(path.read_text())["costs"][work.key]
    assert filed["verify"]["1"] == pytest.approx(entry["verify"]["1"], rel=0.06) and filed["verify"]["1"] > 1.1


def test_rounds_are_counted_by_their_widths():
    def log(widths: list[int], passes: list[int]) -> RowLog:
        return RowLog([Round([], [], 0, [1], count) for count in passes], sum(passes), len(passes), widths)

    counts = RoundCounts.of([log([1, 4, 8, 8], [0, 0, 2, 1]), log([1, 4], [0, 1])], (1, 4, 8))
    assert counts == RoundCounts((1, 1, 2), 4)
    assert counts.expected_seconds(Costs.of([1, 2, 4], 0.25)).tolist() == [1, 2, 8, 1]


def test_a_file_can_say_the_costs(tmp_path, cache):
    _, counted = cache
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"verify": {"1": 0.01, "101": 0.03}, "draft": 0.002}))
    costs = costs_of(json.loads(path.read_text()), (1, 51, 101), "here")
    np.testing.assert_allclose(costs.verify, [0.01, 0.02, 0.03], rtol=1e-6)
    assert entry_of(costs, (1, 51, 101))["verify"]["51"] == pytest.approx(0.02)
    model = extended_engine()
    entry = FailFast.load(model, model.drafter, costs=path).generate([[3, 4, 5]], max_new_tokens=4)[0].stats.costs
    assert entry["source"] == str(path) and entry["draft"] == pytest.approx(0.002) and not counted


@pytest.mark.parametrize(
    "content, message",
    [
        ("{}", "costs.json: costs are"),
        ('{"verify": {"1": -1}}', "costs.json: costs are"),
        ('{"verify": {"one": 1}}', "costs.json: costs are"),
        ('{"verify": {"1": 1}, "draft": "x"}', "costs.json: costs are"),
        ("[", "costs.json: not valid JSON"),
        ('{"verify": {"1": 1.0}}', "'verify' ends .* rows"),
    ],
)
def test_bad_files_are_named(content, message, tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(OptionError, match="--costs .*costs.json: no such file"):
        CostBook(path)
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        CostBook(path).price(session())


def test_timed_rounds_add_up(monkeypatch):
    model = extended_engine()
    monkeypatch.setattr(model, "time_rounds", True)
    (result,) = model.generate([[3, 4, 5]], max_new_tokens=24)
    assert all(entry.took > 0 for entry in result.rounds)
    assert sum(entry.took for entry in result.rounds) == pytest.approx(result.stats.decode_s)
