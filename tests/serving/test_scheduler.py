"""Who is served when: requests take turns in order of arrival, and a long prompt does not stop the others."""

from __future__ import annotations

import pytest
from served import quick
from tiny_engines import engine

from failfast_jax.runtime.model_runtime import Request
from failfast_jax.serving.scheduler import Job, RowSettings, Scheduler

pytestmark = pytest.mark.usefixtures("few_widths")
CAPACITY = 200


class Kept(Job):
    """Keeps why it ended."""

    reason: str | None = None

    def on_finish(self, reason, log):
        self.reason = reason

    def on_error(self, error):
        raise error


@pytest.fixture
def scheduler():
    config = engine().resolve(quick())
    return Scheduler(engine().runtime, engine().build_drafter(config), RowSettings(2, CAPACITY, rounds=1))


def test_others_go_on_while_a_long_prompt_is_prefilled(scheduler):
    """A chunk of it, then a round of theirs."""
    writing, reading = Kept(Request((3, 4), 190)), Kept(Request((5, 6) * 90, 4))
    scheduler.submit(writing)
    while not writing.ids:
        scheduler.step()
    scheduler.submit(reading)
    steps = 0
    while not reading.ids:
        before = len(writing.ids)
        scheduler.step()
        steps += 1
        assert len(writing.ids) > before
    assert steps > 1
    while scheduler.step():
        pass
    assert writing.reason == reading.reason == "length"


def test_requests_are_begun_in_order_of_arrival(scheduler):
    jobs = [Kept(Request((3, 4) * length, 8)) for length in (1, 40, 2, 30, 1, 3)]
    for job in jobs:
        scheduler.submit(job)
    while scheduler.step():
        pass
    begun = [job.started for job in jobs]
    assert None not in begun and begun == sorted(begun)
    assert all(job.reason == "length" and len(job.ids) == 8 for job in jobs)
