"""Requests of OpenAI's clients, checked, and the JSON of answers, log-probabilities and errors."""

from __future__ import annotations

import collections
import itertools
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field, model_validator

from failfast_jax.generation_config import HOTTEST
from failfast_jax.results import TokenLogprob
from failfast_jax.serving.answer import Finished, Piece
from failfast_jax.serving.serve_options import NEUTRAL
from failfast_jax.text_stream import UNFINISHED, text_of
from failfast_jax.util.command_line import did_you_mean

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
MAX_STOPS, MAX_LOGPROBS = 16, 20
SEEDS = 2**32
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}

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

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


UNIONS = {
    "prompt": "must be valid UTF-8 text, token ids, or a list of texts or of lists of token ids, none of them empty",
    "stop": "must be text or a list of texts",
    "content": "must be valid UTF-8 text, or a list of text parts",
}
"""Messages for fields of several types, of which pydantic reports each type by itself."""


def validation_error(errors: Sequence[dict[str, Any]]) -> RequestError:
    """The first of pydantic's errors about a request's body, as an error that names the field."""
    first = errors[0]
    path, message = [str(part) for part in first["loc"][1:]], str(first["msg"])
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not JSON: {first['ctx']['error']}")
    if not path and isinstance(first.get("input"), bytes):
        return RequestError("the body: must be JSON, with the header 'Content-Type: application/json'")
    if first["type"] == "value_error":  # of the validators below, whose messages begin with the field
        message = message.removeprefix("Value error, ")
        return RequestError(message, param=message.partition(":")[0])
    union = next((index for index, part in enumerate(path) if part in UNIONS), None)
    if union is not None and path[-1] not in UNIONS:
        path, message = path[: union + 1], UNIONS[path[union]]
    elif first["type"] == "extra_forbidden":
        similar = did_you_mean(path[-1], _Request.model_fields) if len(path) == 1 else ""
        message = "is not served" if path[-1] in NEUTRAL else f"unknown or not served{similar}"
    place = ".".join(path)
    return RequestError(f"{place or 'the body'}: {message}", param=place or None)


IGNORED = set("user metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier".split())
IGNORED |= {"include_obfuscation", "name", "annotations"}
"""Fields of requests, stream options and messages that change nothing."""


def _has_effect(name: str, value: Any) -> bool:
    """True if a field that is not served might change the answer."""
    if isinstance(value, dict):
        value = {key: entry for key, entry in value.items() if _has_effect("", entry)}
    return value not in (None, "", [], {}) and name not in IGNORED and value not in NEUTRAL.get(name, [])


class _Body(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        """Drops null, and unknown fields without effect: many clients send every field that they know."""
        if not isinstance(body, dict):
            return body
        known = {name: value for name, value in body.items() if value is not None and name in cls.model_fields}
        return known | {n: value for n, value in body.items() if n not in cls.model_fields and _has_effect(n, value)}


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class _Request(_Body):
    """Fields of both kinds of requests. Fields that would change the text, and are not served, are refused."""

    model: str | None = None
    temperature: float = Field(default=1.0, ge=0, le=HOTTEST, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, lt=2**31, description="not OpenAI's: keep the k best; 0: all, 1: greedy")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="taken modulo 2**32")
    n: int = Field(default=1, ge=1, le=65536)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**30)
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = Field(default=False, description="not OpenAI's: go on after stop tokens")

    @model_validator(mode="after")
    def _list_stops(self) -> _Request:
        """Makes `stop` a list, and checks it."""
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise ValueError(f"stop: must be at most {MAX_STOPS} strings, none of them empty")
        return self


class CompletionRequest(_Request):
    """One or several texts to continue as they are, without a chat template."""

    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, as a list."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]

    @property
    def best_tokens(self) -> int | None:
        """Most probable tokens to report beside each token; None: no log-probabilities."""
        return self.logprobs


class TextPart(_Body):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn of a conversation, also an answer as clients send it back, null fields included."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    reasoning_content: str | None = Field(default=None, description="not OpenAI's: for templates that write it")
    reasoning: str | None = Field(default=None, description="another name of reasoning_content")

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: Any) -> Any:
        """Replaces the missing content of an assistant's turn by an empty text."""
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        return {**message, "content": ""} if is_answer and message.get("content") in (None, []) else message

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        reasoning = self.reasoning_content or self.reasoning
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content} | ({"reasoning_content": reasoning} if reasoning else {})


class ChatRequest(_Request):
    """A conversation to continue by its next turn."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**30, description="counts before max_tokens")
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        """Makes `max_tokens` the limit under either name, and checks `top_logprobs`."""
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """The conversation, as the only prompt."""
        return [[message.plain for message in self.messages]]

    @property
    def best_tokens(self) -> int | None:
        """As in `CompletionRequest`."""
        return self.top_logprobs if self.logprobs else None


# -- log-probabilities, of chats and of completions ------------------------------------------------------------------

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot express."""
WORD_START = "▁"
"""In SentencePiece's vocabularies: the space before a word, which decoding a single token leaves out."""


class Spelling:
    """Single tokens as text and as bytes.

    Args:
      tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer, self._texts = tokenizer, {}
        self._bytes = {character: byte for byte, character in bytes_to_unicode().items()}

    def text(self, token: int) -> str:
        """Returns a token's text: special tokens by name, partial characters as U+FFFD."""
        if token not in self._texts:
            text = text_of(self._tokenizer, [token], skip_special_tokens=False)
            lacks_space = self._piece(token).startswith(WORD_START) and not text.startswith(" ")
            self._texts[token] = f" {text}" if lacks_space else text
        return self._texts[token]

    def bytes(self, token: int) -> list[int] | None:
        """Returns a token's UTF-8 bytes; None for a partial character whose bytes the vocabulary does not tell."""
        text, piece = self.text(token), self._piece(token)
        if UNFINISHED not in text:
            return list(text.encode())
        if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
            return [int(byte[1], 16)]
        known = piece and all(character in self._bytes for character in piece)
        return [self._bytes[character] for character in piece] if known else None

    def name(self, token: int) -> str:
        """Returns a token's text; for partial characters a unique name such as `bytes:\\xf0`."""
        text = self.text(token)
        if text and UNFINISHED not in text:
            return text
        spelled = self.bytes(token)
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in spelled) if spelled else f"token_id:{token}"

    def _piece(self, token: int) -> str:
        """The token's entry in the vocabulary."""
        convert = getattr(self._tokenizer, "convert_ids_to_tokens", None)
        return (convert(token) if convert else None) or ""


def of_chat(spelling: Spelling, ids: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Returns `logprobs` of a chat's choice."""

    def entry_of(token: int, logprob: float) -> dict[str, Any]:
        return {"token": spelling.text(token), "bytes": spelling.bytes(token), "logprob": max(logprob, MIN_LOGPROB)}

    content = [
        {**entry_of(token, entry.logprob), "top_logprobs": [entry_of(*best) for best in entry.best]}
        for token, entry in zip(ids, entries)
    ]
    return {"content": content, "refusal": None}


def of_completion(
    spelling: Spelling, ids: Sequence[int], entries: Sequence[TokenLogprob], offset: int, best: int
) -> dict[str, Any]:
    """Returns `logprobs` of a completion's choice. A partial character counts as one U+FFFD in the offsets.

    Args:
      offset: characters of the text before these tokens.
      best: number of most probable tokens that were requested; the picked token is reported beside them.
    """

    def top(token: int, entry: TokenLogprob) -> dict[str, float]:
        # Of two tokens with the same text the more probable one overwrites the other.
        pairs = [(token, entry.logprob), *reversed(entry.best)]
        return {spelling.name(other): max(logprob, MIN_LOGPROB) for other, logprob in pairs}

    # Tokens of 4 and 3 characters after 7 others begin at [7, 11].
    offsets = list(itertools.accumulate((len(spelling.text(token)) for token in ids), initial=offset))[:-1]
    return {
        "tokens": [spelling.name(token) for token in ids],
        "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in entries],
        "top_logprobs": [top(*pair) for pair in zip(ids, entries)] if best else None,
        "text_offset": offsets,
    }


# -- answers ---------------------------------------------------------------------------------------------------------


class Reply:
    """The JSON of one answer, whole or in chunks: of a chat, or of a completion.

    Args:
      spelling: spelling of the tokens whose log-probabilities are reported.
    """

    def __init__(self, model: str, request: CompletionRequest | ChatRequest, spelling: Spelling):
        self._chat, self._spelling = isinstance(request, ChatRequest), spelling
        self._best, self._prompts = request.best_tokens, len(request.prompts)
        self._lengths: collections.Counter[int] = collections.Counter()
        """Characters of each choice so far, as its tokens spell them."""
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def _reply(self, choices: list[dict[str, Any]], *, chunk: bool = True, **usage: Any) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * chunk) if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _logprobs(self, index: int, part: Finished | Piece, ids: Sequence[int]) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        if self._chat:
            return of_chat(self._spelling, ids, part.logprobs)
        offset = self._lengths[index]
        self._lengths[index] += sum(len(self._spelling.text(token)) for token in ids)
        return of_completion(self._spelling, ids, part.logprobs, offset, self._best or 0)

    def whole(self, finished: Mapping[int, Finished]) -> dict[str, Any]:
        """The answers by choice, in one piece."""
        choices = []
        for index, answer in sorted(finished.items()):
            text = {"message": {"role": "assistant", "content": answer.text}} if self._chat else {"text": answer.text}
            reason, logprobs = FINISH_REASONS[answer.finish_reason], self._logprobs(index, answer, answer.output_ids)
            choices.append({"index": index, **text, "finish_reason": reason, "logprobs": logprobs})
        return self._reply(choices, chunk=False, usage=self._usage(finished))

    def chunk(self, index: int, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A piece of one choice."""
        text = {("content" if self._chat else "text"): piece.text or ""}
        if self._chat:
            text = {"delta": {"role": "assistant", **text} if first else text}
        logprobs = self._logprobs(index, piece, piece.ids)
        return self._reply([{"index": index, **text, "finish_reason": None, "logprobs": logprobs}])

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """The end of one choice, and its reason."""
        text: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._reply([{"index": index, **text, "finish_reason": FINISH_REASONS[reason], "logprobs": None}])

    def usage(self, finished: Mapping[int, Finished]) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
        return self._reply([], usage=self._usage(finished))

    def _usage(self, finished: Mapping[int, Finished]) -> dict[str, Any]:
        """Token counts; those of a prompt count once for all its samples. `speculation` is not OpenAI's."""
        answers = [answer for _, answer in sorted(finished.items())]
        firsts = answers[:: len(answers) // self._prompts]
        prompt = sum(len(answer.prompt_ids) for answer in firsts)
        output = sum(len(answer.output_ids) for answer in answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": sum(answer.reused for answer in firsts)},
            "speculation": {
                "rounds": sum(len(answer.rounds) for answer in answers),
                "drafted_tokens": sum(answer.drafted for answer in answers),
                "accepted_tokens": sum(answer.accepted for answer in answers),
            },
        }
