"""Clients of a server, run as a script in a process of its own, so that they cost the server's process nothing.

A job comes as JSON on stdin; what became of each request goes as JSON to stdout. Imports nothing of this package.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import httpx

LIMIT_S = 600.0
"""Seconds without a byte after which a request counts as lost."""
PATIENCE_S = 1.0
"""Most seconds between a 429 and the next attempt, whatever the server asks for."""


class Clients:
    """So many clients at once; each asks its next request when its last one is over.

    Args:
      job: `url`; `kinds`, what is asked in turn: `path` and `body`; `clients`; `requests` or `seconds`, when to end;
        `kill`, the share that hangs up, at moments up to `typical` seconds; `seed`.

    Attributes:
      records: what became of each request: `number`, `kind`, `stream`, `refused` (429s), `killed`; if it was answered
        `id`, `text`, `tokens` and `seconds`, of a stream `first`; else `fault`.
    """

    def __init__(self, job: dict[str, Any]):
        self._job, self._asked = job, 0
        self._end = time.perf_counter() + (job.get("seconds") or 1e9)
        self._most = job.get("requests") or 10**9
        self.records: list[dict[str, Any]] = []

    async def run(self) -> list[dict[str, Any]]:
        """What became of each request."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30)
        async with httpx.AsyncClient(base_url=self._job["url"], limits=limits, timeout=LIMIT_S) as http:
            await asyncio.gather(*(self._client(http) for _ in range(self._job["clients"])))
        return self.records

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self._asked < self._most and time.perf_counter() < self._end:
            number, self._asked = self._asked, self._asked + 1
            dice = random.Random(f"{self._job['seed']} {number}")
            index = number % len(self._job["kinds"])
            kind = self._job["kinds"][index]
            record = {"number": number, "kind": index, "stream": dice.random() < 0.5}
            record |= {"refused": 0, "killed": False, "fault": None}
            self.records.append(record)
            asking = asyncio.ensure_future(self._ask(http, kind, record, dice))
            if dice.random() < self._job["kill"]:
                await asyncio.wait({asking}, timeout=dice.uniform(0.0, self._job["typical"]))
                record["killed"] = asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, http: httpx.AsyncClient, kind: dict, record: dict[str, Any], dice: random.Random) -> None:
        body = dict(kind["body"])
        if record["stream"]:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            while True:
                begin = time.perf_counter()
                async with http.stream("POST", kind["path"], json=body) as response:
                    record["status"] = response.status_code
                    if response.status_code == 200:
                        await (_streamed if record["stream"] else _whole)(response, record, begin)
                        record["seconds"] = time.perf_counter() - begin
                        return
                    said = (await response.aread()).decode(errors="replace")
                if response.status_code != 429:
                    record["fault"] = said[:200]
                    return
                record["refused"] += 1
                await asyncio.sleep(dice.uniform(0.1, 1.0) * min(float(response.headers["Retry-After"]), PATIENCE_S))
        except (httpx.HTTPError, KeyError, ValueError, IndexError, TypeError) as error:
            record["fault"] = f"{type(error).__name__}: {error}"[:200]


async def _whole(response: httpx.Response, record: dict[str, Any], begin: float) -> None:
    answer = json.loads(await response.aread())
    (choice,) = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    _keep(record, answer["id"], text, [choice["finish_reason"]], answer["usage"])


async def _streamed(response: httpx.Response, record: dict[str, Any], begin: float) -> None:
    text, reasons, ids, usage, done = "", [], set(), None, False
    async for line in response.aiter_lines():
        if not line:
            continue
        if not line.startswith("data: ") or done:
            raise ValueError(f"no event: {line}")
        if (done := line == "data: [DONE]") or "error" in (event := json.loads(line[6:])):
            if not done:
                raise ValueError(f"in the stream: {event['error']}")
            continue
        ids.add(event["id"])
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            record.setdefault("first", time.perf_counter() - begin)
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    if not done or len(ids) != 1:
        raise ValueError(f"the stream ended early, or had {len(ids)} ids")
    _keep(record, ids.pop(), text, reasons, usage)


def _keep(record: dict[str, Any], name: str, text: str, reasons: list[str], usage: dict[str, Any]) -> None:
    if len(reasons) != 1 or reasons[0] not in ("stop", "length"):
        raise ValueError(f"the answer ended {len(reasons)} times: {reasons}")
    record |= {"id": name, "text": text, "tokens": usage["completion_tokens"]}


def metrics(text: str) -> dict[str, float]:
    """Values by name and labels of Prometheus' text format."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(Clients(json.load(sys.stdin)).run())))
