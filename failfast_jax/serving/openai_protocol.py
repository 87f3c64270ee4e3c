"""What OpenAI's clients send and expect: requests, checked, and the shapes of answers and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field, model_validator

from failfast_jax.config import HOTTEST
from failfast_jax.results import TokenLogprob
from failfast_jax.serving.request_queue import Finished, Piece
from failfast_jax.serving.token_logprobs import Spelling, of_chat, of_completion

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
MOST_STOPS, MOST_LOGPROBS = 16, 20
SEEDS = 2**32

Token = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Token], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class RequestError(Exception):
    """A request that is answered with an error in OpenAI's shape."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None, **headers: str
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


RULES = {
    "missing": "is missing",
    "extra_forbidden": "is not served",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_unicode": "must be valid UTF-8 text",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "json_invalid": "the body is not JSON: {error}",
}
"""What a request must be, by pydantic's names of faults."""
CHOICES = {
    "prompt": "must be valid UTF-8 text, token ids, or a list of texts or of lists of token ids, none of them empty",
    "stop": "must be text or a list of texts",
    "content": "must be valid UTF-8 text, or a list of text parts",
}
"""Likewise, of arguments that may be one thing or another."""


def explained(errors: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """What is wrong with a request's body, from the first of pydantic's errors, and the argument's name."""
    first = errors[0]
    parts = [str(part) for part in first["loc"][1:]]
    either = next((at for at, part in enumerate(parts) if part in CHOICES), None)
    if first["type"] == "json_invalid":
        return RULES["json_invalid"].format(**first["ctx"]), None
    if not parts and isinstance(first.get("input"), bytes):
        return "the body: must be JSON, with the header 'Content-Type: application/json'", None
    if first["type"] == "value_error":
        said = str(first["msg"]).removeprefix("Value error, ")
        name, colon, _ = said.partition(":")
        return said, name if colon else None
    if either is not None and parts[-1] not in CHOICES:
        parts, said = parts[: either + 1], CHOICES[parts[either]]
    else:
        said = RULES.get(first["type"], str(first["msg"])).format(**first.get("ctx", {}))
    place = ".".join(parts)
    return f"{place or 'the body'}: {said}", place or None


NEUTRAL = {
    "min_p": [0],
    "repetition_penalty": [1],
    "length_penalty": [1],
    "use_beam_search": [False],
    "skip_special_tokens": [True],
    "add_generation_prompt": [True],
    "modalities": [["text"]],
    "function_call": ["none", "auto"],
    "min_tokens": [0],
    "no_repeat_ngram_size": [0],
    "repeat_penalty": [1],
    "typical_p": [1],
    "echo": [False],
    "include_stop_str_in_output": [False],
    "continue_final_message": [False],
    "continuous_usage_stats": [False],
    "prefix": [False],
}
"""Fields that are not served, and values with which they change nothing."""


def _is_nothing(value: Any) -> bool:
    """True for null, an empty text, and lists and objects of nothing else."""
    if isinstance(value, (list, dict)):
        return all(map(_is_nothing, value.values() if isinstance(value, dict) else value))
    return value is None or value == ""


class _Body(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, body: Any) -> Any:
        """Drops unknown fields that ask for nothing: many clients send every field that they know."""
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        empty = {name for name, value in body.items() if _is_nothing(value) or value in NEUTRAL.get(name, ())}
        return {name: value for name, value in body.items() if name in known or name not in empty}


class StreamOptions(_Body):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(_Body):
    """What both kinds of requests have. Fields that would change the text, and are not served, are refused."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=HOTTEST, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(
        default=None, ge=0, lt=2**31, description="not OpenAI's: keep the k best; 0: all, 1: greedy"
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="taken modulo 2**32")
    n: int | None = Field(default=None, ge=1, le=65536)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**30)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(default=None, description="not OpenAI's: go on after stop tokens")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _served(self) -> _Request:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name}: is not served")
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise ValueError(f"stop: must be at most {MOST_STOPS} strings, none of them empty")
        asked = self.stream_options is not None and any(self.stream_options.model_dump().values())
        if asked and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if the request says so."""
        return self.max_tokens


class CompletionRequest(_Request):
    """A text to be continued as it is, without a chat template; or several."""

    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _served_here(self) -> CompletionRequest:
        for name in ("echo", "suffix"):
            if getattr(self, name):
                raise ValueError(f"{name}: is not served")
        if self.best_of not in (None, 1, self.n):
            raise ValueError("best_of: is not served")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, as a list."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]

    @property
    def best_tokens(self) -> int | None:
        """Most probable tokens to tell beside each token's log-probability; None: not even that."""
        return self.logprobs


class TextPart(_Body):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn of a conversation, also as clients send back an answer: with whatever else was null in it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    annotations: list[dict[str, Any]] | None = None
    reasoning_content: str | None = Field(default=None, description="not OpenAI's: for templates that write it")
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")

    @model_validator(mode="before")
    @classmethod
    def _with_content(cls, message: Any) -> Any:
        """Puts a text in place of the content null, or none, of an answer without a word."""
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        return {**message, "content": ""} if is_answer and _is_nothing(message.get("content")) else message

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        thought = self.reasoning_content or self.reasoning
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"reasoning_content": thought} if thought else {})


class ChatRequest(_Request):
    """A conversation to be continued by its next turn."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**30)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _served_here(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_completion_tokens: is another name of max_tokens, which says something else")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        asked = {name: value for name, value in (self.response_format or {}).items() if not _is_nothing(value)}
        if asked not in ({}, {"type": "text"}):
            raise ValueError("response_format: only text is served")
        if self.tools:
            raise ValueError("tools: is not served")
        if self.tool_choice not in (None, "", "none", "auto"):
            raise ValueError("tool_choice: is not served")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, under either of its names."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def best_tokens(self) -> int | None:
        """As in `CompletionRequest`."""
        return self.top_logprobs or 0 if self.logprobs else None


def usage_of(finished: Sequence[Finished], prompts: int) -> dict[str, Any]:
    """Tokens of a request's answers, of which each of its `prompts` has as many. `speculation` is not OpenAI's."""
    samples = len(finished) // prompts
    prompt = sum(len(one.prompt_ids) for one in finished[::samples])
    output = sum(len(one.output_ids) for one in finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(one.reused for one in finished[::samples])},
        "speculation": {
            "rounds": sum(len(one.rounds) for one in finished),
            "drafted_tokens": sum(one.drafted for one in finished),
            "accepted_tokens": sum(one.accepted for one in finished),
        },
    }


class Reply:
    """The JSON of one answer, whole or in chunks: of a chat, or of a completion.

    Args:
      spelling: of the tokens whose log-probabilities are told.
      best: most probable tokens that are told beside each.
    """

    def __init__(self, model: str, chat: bool, spelling: Spelling, best: int | None):
        self._chat, self._spelling, self._best = chat, spelling, best
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _object(self, chunk: bool) -> str:
        if not self._chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def _with(self, choices: list[dict[str, Any]], chunk: bool, **more: Any) -> dict[str, Any]:
        return {**self._head, "object": self._object(chunk), "choices": choices, **more}

    def _logprobs(self, ids: Sequence[int], found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        if self._chat:
            return of_chat(self._spelling, ids, found)
        return of_completion(self._spelling, ids, found, 0, self._best or 0)

    def whole(self, finished: Sequence[Finished], prompts: int) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, one in enumerate(finished):
            said = {"message": {"role": "assistant", "content": one.text}} if self._chat else {"text": one.text}
            ends = {"finish_reason": FINISH_REASONS[one.finish_reason]}
            choices.append({"index": index, **said, **ends, "logprobs": self._logprobs(one.output_ids, one.logprobs)})
        return self._with(choices, False, usage=usage_of(finished, prompts))

    def chunk(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A piece of one choice."""
        text = piece.text or ""
        if self._chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            said: dict[str, Any] = {"delta": delta}
        else:
            said = {"text": text}
        told = self._logprobs(piece.ids, piece.logprobs)
        return self._with([{"index": index, **said, "finish_reason": None, "logprobs": told}], True)

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The end of one choice, and why it ended."""
        said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._with([{"index": index, **said, "finish_reason": FINISH_REASONS[reason], "logprobs": None}], True)

    def usage(self, finished: Sequence[Finished], prompts: int) -> dict[str, Any]:
        """The last chunk, where it was asked for."""
        return self._with([], True, usage=usage_of(finished, prompts))
