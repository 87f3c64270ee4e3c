"""The server against its own OpenAPI description, by schemathesis."""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402
from served import CAPACITY, chat_engine, quick, served  # noqa: E402

from failfast_jax.serving.request_queue import Queue  # noqa: E402
from failfast_jax.serving.serve_options import ServeOptions  # noqa: E402

pytestmark = pytest.mark.long

KEY = "a-key"


@pytest.fixture(scope="module")
def schema(few_widths, tmp_path_factory):
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(KEY)
    with Queue(chat_engine(), quick(), batch=3, capacity=CAPACITY) as queue:
        with served(queue, ServeOptions(max_new_tokens=4, api_key_file=str(file))) as site:
            yield schemathesis.openapi.from_url(f"{site.url}/openapi.json")


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_operation_answers_as_described(schema, data):
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 6
    case = data.draw(st.sampled_from(operations).flatmap(lambda operation: operation.as_strategy()))
    # What fits the context, and which fields exclude each other, no schema says.
    excluded = [positive_data_acceptance]
    case.call_and_validate(timeout=30, headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=excluded)
