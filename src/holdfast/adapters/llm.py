"""Chat with any OpenAI-compatible endpoint: one request, its usage, and its cost.

- The operator configures the endpoint and its key (`Endpoint`). They appear in no parameter,
  receipt, error or log.
- `usage_bound` computes an upper bound of the usage before the call: a token has at least one byte,
  and the response has at most `max_tokens`. So parameters that multiply the response (`n`,
  `best_of`) are refused.
- An endpoint may accept parameters that this module does not know. Under a limit, `extra`, tools
  and messages may contain only names that cannot raise the cost (`_BOUNDED_*`), or the caller
  states the bound of the whole call in `input_tokens_max` and `output_tokens_max`.
- A response without usage is charged at its bound.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast import codec
from holdfast.adapters.errors import BadResponse, NotConfigured, NotInstalled, RejectedByServer
from holdfast.adapters.http import (
    BODY_BYTES_MAX,
    ERROR_BODY_CHARS,
    TIMEOUT_S_MAX,
    unavailable_error,
)
from holdfast.effects.budget import MONEY, TOKENS, Cost
from holdfast.errors import HoldfastError, Invalid
from holdfast.store.api import Txn, operation

# Millionths (micros) per unit of the currency.
MICRO = 1_000_000
MAX_TOKENS_MAX = 10_000_000
# No call uses more. A larger count is an error of the endpoint and must not be charged.
USAGE_TOKENS_MAX = 1_000_000_000
# The overhead of each message and of the request: roles, separators, a primer.
OVERHEAD_TOKENS = 32

_KEY = re.compile(r"[\x21-\x7e]+")
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
# Parameters that are set elsewhere, or that would break the bound.
_RESERVED_PARAMETERS = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "stream", "n", "best_of", "tools"}
)
# Parameters in `extra` that raise neither the number of responses nor their length. Their bytes
# count as input.
_BOUNDED_EXTRA = frozenset(
    {"frequency_penalty", "logit_bias", "logprobs", "metadata", "min_p", "parallel_tool_calls",
     "presence_penalty", "repetition_penalty", "response_format", "safety_identifier", "seed", "stop",
     "temperature", "tool_choice", "top_k", "top_logprobs", "top_p", "user"}
)  # fmt: skip
# Fields of a message and of a text part that contain text. Another field may refer to an image or a
# file.
_BOUNDED_MESSAGE = frozenset(
    {"content", "function_call", "name", "reasoning_content", "refusal", "role", "tool_call_id",
     "tool_calls"}
)  # fmt: skip
_BOUNDED_PART = frozenset({"cache_control", "text", "type"})


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The price of a million tokens, in the currency of the budgets."""

    input: float
    output: float

    def __post_init__(self) -> None:
        if not (0 <= self.input < math.inf and 0 <= self.output < math.inf):
            raise Invalid(what="price", found=[self.input, self.output], why="must be at least 0")

    def micros(self, usage: Usage) -> int:
        """Return the cost in millionths, rounded up. A price per million tokens is the number of
        millionths per token."""
        exact = usage.input_tokens * self.input + usage.output_tokens * self.output
        return -int(-exact // 1)


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a call."""

    input_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Endpoint(msgspec.Struct, frozen=True):
    """The URL of an endpoint, its key and its prices."""

    base_url: str
    api_key: str = ""
    prices: dict[str, Price] = {}
    # Some endpoints use the name max_completion_tokens.
    max_tokens_field: str = "max_tokens"
    ca_file: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({urlsplit(self.base_url).hostname!r}, models={sorted(self.prices)})"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Endpoint:
        """Read `HOLDFAST_LLM_BASE_URL` (or `OPENAI_BASE_URL`), `_API_KEY`, `_PRICES` (JSON),
        `_CA_FILE`."""
        base_url = env.get("HOLDFAST_LLM_BASE_URL") or env.get("OPENAI_BASE_URL")
        if not base_url:
            raise NotConfigured(what="LLM endpoint", missing="HOLDFAST_LLM_BASE_URL")
        try:
            prices = msgspec.json.decode(
                env.get("HOLDFAST_LLM_PRICES") or "{}", type=dict[str, Price]
            )
        except msgspec.MsgspecError as error:
            raise NotConfigured(what="HOLDFAST_LLM_PRICES", why=str(error)) from None
        return cls(
            base_url,
            (env.get("HOLDFAST_LLM_API_KEY") or env.get("OPENAI_API_KEY") or "").strip(),
            prices,
            env.get("HOLDFAST_LLM_MAX_TOKENS_FIELD") or "max_tokens",
            env.get("HOLDFAST_LLM_CA_FILE") or None,
        )

    def price(self, model: str) -> Price | None:
        return self.prices.get(model)


class ChatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The options of a chat besides messages and model."""

    max_tokens: int = 1024
    temperature: float | None = None
    tools: list[dict[str, Any]] = []
    # Other parameters of the endpoint: `response_format`, `seed`, `stop`, …
    extra: dict[str, Any] = {}
    timeout_s: float = 120.0
    # The maximum tokens of the messages. A budget requires it for parts that are not text.
    input_tokens_max: int | None = None
    # The maximum tokens of all responses. Under a limit it is required, together with
    # `input_tokens_max`, for an `extra` or a tool that this module does not know. `usage_bound`
    # counts at least `max_tokens` in any case.
    output_tokens_max: int | None = None


class Reply(msgspec.Struct, frozen=True):
    """The response. `estimated`: the endpoint reported no usage, so the bound was charged."""

    text: str
    model: str
    finish_reason: str
    usage: Usage
    tool_calls: list[dict[str, Any]] = []
    id: str = ""
    estimated: bool = False


@operation("llm.cost_bound")
def cost_bound(txn: Txn, params: bytes, prices: bytes, limited: bool = False) -> list[Cost]:
    """Return the maximum cost of a call with these parameters, in tokens only if the model has no
    price.

    It runs in the commit of the claim, which also reserves the amount. `limited`: an account that
    the call is charged to has a limit.
    """
    try:
        messages, model, *rest = codec.unpack(params)
        known = _decode_prices(prices)
        check_messages(messages)
        options = parse_options(rest[0] if rest else None)
    except (ValueError, TypeError) as error:
        raise Invalid(what="chat", why=str(error)) from None
    check_bounded(messages, options)
    if limited:
        check_cost_known(messages, options)
    return charges_of(known.get(model), usage_bound(messages, options), str(model))


def charges_of(price: Price | None, usage: Usage, model: str = "") -> list[Cost]:
    """Return the charges for a usage."""
    money = [] if price is None else [Cost(MONEY, price.micros(usage), model)]
    return [*money, Cost(TOKENS, usage.tokens, model)]


_decode_prices = msgspec.msgpack.Decoder(dict[str, Price]).decode


def usage_bound(messages: list[dict[str, Any]], options: ChatOptions) -> Usage:
    """Return the maximum tokens of a call. Text always counts, even if the caller states a lower
    bound."""
    counted = messages if options.input_tokens_max is None else _text_parts(messages)
    input_tokens = len(msgspec.json.encode([counted, options.tools, options.extra]))
    input_tokens += OVERHEAD_TOKENS * (len(messages) + 1)
    return Usage(
        max(input_tokens, options.input_tokens_max or 0),
        max(options.max_tokens, options.output_tokens_max or 0),
    )


def _text_parts(messages: list[dict[str, Any]]) -> list[Any]:
    """Return the text parts of the messages. The caller's `input_tokens_max` bounds the tokens of
    other parts (images, audio)."""
    return [
        [
            {name: value for name, value in message.items() if name != "content"},
            [part for part in content if part.get("type") == "text"]
            if isinstance(content := message.get("content"), list)
            else content,
        ]
        for message in messages
    ]


def check_bounded(messages: list[dict[str, Any]], options: ChatOptions) -> None:
    """Require `input_tokens_max` for parts that are not text: an image costs more tokens than its
    URL has bytes."""
    parts = [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    ]
    plain = all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
    if not plain and options.input_tokens_max is None:
        raise Invalid(
            what="input_tokens_max",
            why="required with a budget if a message has parts that are not text",
        )


def check_cost_known(messages: list[dict[str, Any]], options: ChatOptions) -> None:
    """Require that a call under a limit has only parameters of known cost, or states its bound."""
    unbounded = {f"extra.{name}" for name in options.extra if name not in _BOUNDED_EXTRA}
    unbounded |= {
        f"tools.{tool.get('type')}" for tool in options.tools if tool.get("type") != "function"
    }
    stated = [options.input_tokens_max, options.output_tokens_max]
    if unbounded and None in stated:
        raise Invalid(
            what="extra or tools",
            found=sorted(unbounded)[:20],
            why="with a budget, these require input_tokens_max and output_tokens_max",
        )
    if options.input_tokens_max is None:
        unbounded_fields = sorted(
            {name for message in messages for name in _unbounded_fields(message)}
        )
        if unbounded_fields:
            raise Invalid(
                what="messages",
                found=unbounded_fields[:20],
                why="with a budget, these fields require input_tokens_max",
            )


def _unbounded_fields(message: dict[str, Any]) -> set[str]:
    """Return the names in a message whose cost may exceed their bytes."""
    content = message.get("content")
    found = set(message) - _BOUNDED_MESSAGE
    for part in content if isinstance(content, list) else ():
        found |= set(part) - _BOUNDED_PART
    if not isinstance(content, str | list | None):
        found.add("content")
    return found


def parse_options(options: ChatOptions | Mapping[str, Any] | None) -> ChatOptions:
    try:
        wanted = (
            options
            if isinstance(options, ChatOptions)
            else codec.convert({} if options is None else options, ChatOptions)
        )
    except msgspec.ValidationError as error:
        raise Invalid(what="options of llm.chat", why=str(error)) from None
    if not 0 < wanted.max_tokens <= MAX_TOKENS_MAX:
        raise Invalid(what="max_tokens", found=wanted.max_tokens, min=1, max=MAX_TOKENS_MAX)
    if not 0 < wanted.timeout_s <= TIMEOUT_S_MAX:
        raise Invalid(what="timeout_s", found=wanted.timeout_s, max=TIMEOUT_S_MAX)
    for name in ("input_tokens_max", "output_tokens_max"):
        stated = getattr(wanted, name)
        if stated is not None and not 0 < stated <= MAX_TOKENS_MAX:
            raise Invalid(what=name, found=stated, max=MAX_TOKENS_MAX)
    taken = sorted(_RESERVED_PARAMETERS.intersection(wanted.extra))
    if taken:
        raise Invalid(
            what="extra",
            found=taken,
            why="another option sets this parameter, or its cost has no bound",
        )
    return wanted


async def chat(
    endpoint: Endpoint,
    messages: list[dict[str, Any]],
    model: str,
    options: ChatOptions | Mapping[str, Any] | None,
    *,
    key: str,
) -> Reply:
    """Send one chat request and return the response with its usage."""
    wanted = parse_options(options)
    check_messages(messages)
    try:
        from holdfast.adapters import pinned_connection
    except ImportError as error:
        raise NotInstalled(what="httpx", why=str(error)) from None
    headers = {
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
        "idempotency-key": key,
    }
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {_check_key(endpoint.api_key)}"
    url = endpoint.base_url.rstrip("/") + "/chat/completions"
    # Errors contain only the host of the URL, because the URL may contain a password.
    parts = urlsplit(endpoint.base_url)
    host = parts.hostname or ""
    trusted = pinned_connection.tls_context(endpoint.ca_file) if parts.scheme == "https" else None
    try:
        async with (
            asyncio.timeout(wanted.timeout_s),
            pinned_connection.client(trusted) as client,
            client.stream(
                "POST", url, headers=headers, content=_body(endpoint, messages, model, wanted)
            ) as answer,
        ):
            status, response_headers = answer.status_code, dict(answer.headers)
            text = await pinned_connection.read_body(answer, BODY_BYTES_MAX)
    except HoldfastError:
        raise
    except Exception as error:
        raise pinned_connection.to_adapter_error(error, host, wanted.timeout_s) from None
    if status in _RETRIED:
        raise unavailable_error(status, host, response_headers)
    if status != 200:
        raise RejectedByServer(status=status, model=model, body=_excerpt(text, endpoint))
    return _reply(text, model, usage_bound(messages, wanted))


def check_messages(messages: list[dict[str, Any]]) -> None:
    fit = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not fit or not messages:
        raise Invalid(what="messages", expected='[{"role": …, "content": …}, …]')


# -- inside --------------------------------------------------------------------------------------


class _MessageJson(msgspec.Struct):
    # Some endpoints return the content in parts.
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _ChoiceJson(msgspec.Struct):
    message: _MessageJson
    finish_reason: str | None = None


class _UsageJson(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0


class _CompletionJson(msgspec.Struct):
    choices: list[_ChoiceJson]
    model: str = ""
    id: str = ""
    usage: _UsageJson | None = None


def _body(
    endpoint: Endpoint, messages: list[dict[str, Any]], model: str, wanted: ChatOptions
) -> bytes:
    document: dict[str, Any] = {
        **wanted.extra,
        "model": model,
        "messages": messages,
        endpoint.max_tokens_field: wanted.max_tokens,
    }
    if wanted.temperature is not None:
        document["temperature"] = wanted.temperature
    if wanted.tools:
        document["tools"] = wanted.tools
    return msgspec.json.encode(document)


def _reply(text: bytes, model: str, usage_max: Usage) -> Reply:
    try:
        completion = msgspec.json.decode(text, type=_CompletionJson)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadResponse(model=model, why=str(error)[:200]) from None
    usage = completion.usage
    counts = (0, 0)
    if usage is not None and usage.prompt_tokens is not None:
        counts = (usage.prompt_tokens, usage.completion_tokens)
    else:
        usage = None  # an incomplete usage is ignored
    if not completion.choices or min(counts) < 0 or max(counts) > USAGE_TOKENS_MAX:
        raise BadResponse(model=model, why="the response has no choice, or its usage is not valid")
    first = completion.choices[0]
    return Reply(
        _join_text(first.message.content),
        completion.model or model,
        first.finish_reason or "",
        usage_max if usage is None else Usage(*counts),
        first.message.tool_calls or [],
        completion.id,
        usage is None,
    )


def _join_text(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _check_key(key: str) -> str:
    """Check the key here, because later errors about it would contain it."""
    if not _KEY.fullmatch(key):
        raise NotConfigured(
            what="API key", why="it contains a space, a line break or another invalid character"
        )
    return key


def _excerpt(text: bytes, endpoint: Endpoint) -> str:
    excerpt = text.decode(errors="replace")
    if endpoint.api_key:
        excerpt = excerpt.replace(endpoint.api_key, "[key]")
    return excerpt[:ERROR_BODY_CHARS]
