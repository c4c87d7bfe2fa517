"""Chat with any OpenAI-compatible endpoint: one request, its usage, and what it cost.

- Where the endpoint is, and its key, are the operator's (`Endpoint`): they are in no parameter, no
  receipt, no error and no log.
- `bound` says before the call what it can cost at most: a token has at least one byte, and the answer
  has at most `max_tokens`. So whatever could multiply an answer (`n`, `best_of`) is refused.
- An endpoint may understand more parameters than this module knows. Where a limit is set, `extra`,
  tools and messages hold names that cannot raise the cost (`_BOUNDED_*`), or the caller states the
  bound of the whole call in `input_tokens_max` and `output_tokens_max`.
- An answer without usage is booked at its bound.
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
from holdfast.adapters.errors import Answered, BadAnswer, NotConfigured, NotInstalled
from holdfast.adapters.http import BODY_BYTES_MAX, ERROR_BODY_CHARS, TIMEOUT_S_MAX, unavailable
from holdfast.effects.budget import MONEY, TOKENS, Charge
from holdfast.errors import HoldfastError, Invalid
from holdfast.store.api import Txn, operation

# Millionths of the currency in one unit of it.
MICRO = 1_000_000
MAX_TOKENS_MAX = 10_000_000
# No call uses more; a larger count is a mistake of the endpoint's, and must not be booked.
TOKENS_TOLD_MAX = 1_000_000_000
# What a message, or the request as a whole, adds to its text: roles, separators, a primer.
OVERHEAD_TOKENS = 32

_KEY = re.compile(r"[\x21-\x7e]+")
_RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
# Said elsewhere, or they would break the bound.
_NOT_EXTRA = frozenset(
    {"model", "messages", "max_tokens", "max_completion_tokens", "stream", "n", "best_of", "tools"}
)
# Of `extra` these raise neither the number of answers nor their length. Their bytes count as input.
_BOUNDED_EXTRA = frozenset(
    {"frequency_penalty", "logit_bias", "logprobs", "metadata", "min_p", "parallel_tool_calls",
     "presence_penalty", "repetition_penalty", "response_format", "safety_identifier", "seed", "stop",
     "temperature", "tool_choice", "top_k", "top_logprobs", "top_p", "user"}
)  # fmt: skip
# Of a message and of a part of text these hold text. Another name may point at an image, or a file.
_BOUNDED_MESSAGE = frozenset(
    {"content", "function_call", "name", "reasoning_content", "refusal", "role", "tool_call_id",
     "tool_calls"}
)  # fmt: skip
_BOUNDED_PART = frozenset({"cache_control", "text", "type"})


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a million tokens, in the currency of your budgets."""

    input: float
    output: float

    def __post_init__(self) -> None:
        if not (0 <= self.input < math.inf and 0 <= self.output < math.inf):
            raise Invalid(what="price", found=[self.input, self.output], why="0 or more")

    def micros(self, usage: Usage) -> int:
        """The cost in millionths, rounded up: so many per million is one millionth per token."""
        exact = usage.input_tokens * self.input + usage.output_tokens * self.output
        return -int(-exact // 1)


class Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class Endpoint(msgspec.Struct, frozen=True):
    """Where to ask, with which key, and what it charges."""

    base_url: str
    api_key: str = ""
    prices: dict[str, Price] = {}
    # Some endpoints call it max_completion_tokens.
    max_tokens_field: str = "max_tokens"
    ca_file: str | None = None

    def __repr__(self) -> str:
        return f"Endpoint({urlsplit(self.base_url).hostname!r}, models={sorted(self.prices)})"

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Endpoint:
        """`HOLDFAST_LLM_BASE_URL` (or `OPENAI_BASE_URL`), `_API_KEY`, `_PRICES` (JSON), `_CA_FILE`."""
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
    """What a chat may say besides messages and model."""

    max_tokens: int = 1024
    temperature: float | None = None
    tools: list[dict[str, Any]] = []
    # Anything else that the endpoint understands: `response_format`, `seed`, `stop`, …
    extra: dict[str, Any] = {}
    timeout_s: float = 120.0
    # The most that the messages can come to. Needed in a budget for parts that are not text.
    input_tokens_max: int | None = None
    # The most that all answers can come to. Needed under a limit, with the one above, for an `extra` or
    # a tool that this module does not know: `bound` counts at least `max_tokens` in any case.
    output_tokens_max: int | None = None


class Reply(msgspec.Struct, frozen=True):
    """The answer. `estimated`: the endpoint told no usage, and the bound was booked."""

    text: str
    model: str
    finish_reason: str
    usage: Usage
    tool_calls: list[dict[str, Any]] = []
    id: str = ""
    estimated: bool = False


@operation
def most(txn: Txn, params: bytes, prices: bytes, limited: bool = False) -> list[Charge]:
    """What a call with these parameters can cost at most; in tokens alone if it has no price.

    It is asked where effects are claimed, so that the amount is set aside in the same commit.
    `limited`: an account that the call is charged to has a limit.
    """
    try:
        messages, model, *rest = codec.unpack(params)
        known = _decode_prices(prices)
        check_messages(messages)
        options = options_of(rest[0] if rest else None)
    except (ValueError, TypeError) as error:
        raise Invalid(what="chat", why=str(error)) from None
    check_bounded(messages, options)
    if limited:
        check_known(messages, options)
    return charges(known.get(model), bound(messages, options))


def charges(price: Price | None, usage: Usage) -> list[Charge]:
    """What a usage is charged at."""
    money = [] if price is None else [Charge(MONEY, price.micros(usage))]
    return [*money, Charge(TOKENS, usage.tokens)]


_decode_prices = msgspec.msgpack.Decoder(dict[str, Price]).decode


def bound(messages: list[dict[str, Any]], options: ChatOptions) -> Usage:
    """The most tokens that this call can use. What is text counts, whatever the caller says."""
    counted = messages if options.input_tokens_max is None else _text_of(messages)
    said = len(msgspec.json.encode([counted, options.tools, options.extra]))
    said += OVERHEAD_TOKENS * (len(messages) + 1)
    return Usage(
        max(said, options.input_tokens_max or 0),
        max(options.max_tokens, options.output_tokens_max or 0),
    )


def _text_of(messages: list[dict[str, Any]]) -> list[Any]:
    """What is said in words; of other parts the caller names the bound."""
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
    """An image costs more tokens than its address has bytes: there the caller names the bound."""
    parts = [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    ]
    plain = all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
    if not plain and options.input_tokens_max is None:
        raise Invalid(what="input_tokens_max", why="a budget needs it for parts that are not text")


def check_known(messages: list[dict[str, Any]], options: ChatOptions) -> None:
    """Under a limit a call holds parameters of known cost, or states its bound."""
    odd = {f"extra.{name}" for name in options.extra if name not in _BOUNDED_EXTRA}
    odd |= {f"tools.{tool.get('type')}" for tool in options.tools if tool.get("type") != "function"}
    stated = [options.input_tokens_max, options.output_tokens_max]
    if odd and None in stated:
        raise Invalid(
            what="extra or tools",
            found=sorted(odd)[:20],
            why="under a limit they need input_tokens_max and output_tokens_max",
        )
    if options.input_tokens_max is None:
        strange = sorted({name for message in messages for name in _strange(message)})
        if strange:
            raise Invalid(
                what="messages", found=strange[:20], why="under a limit it needs input_tokens_max"
            )


def _strange(message: dict[str, Any]) -> set[str]:
    """Names in a message whose cost may be more than their bytes."""
    content = message.get("content")
    found = set(message) - _BOUNDED_MESSAGE
    for part in content if isinstance(content, list) else ():
        found |= set(part) - _BOUNDED_PART
    if not isinstance(content, str | list | None):
        found.add("content")
    return found


def options_of(options: ChatOptions | Mapping[str, Any] | None) -> ChatOptions:
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
    taken = sorted(_NOT_EXTRA.intersection(wanted.extra))
    if taken:
        raise Invalid(what="extra", found=taken, why="said elsewhere, or without a bound")
    return wanted


async def chat(
    endpoint: Endpoint,
    messages: list[dict[str, Any]],
    model: str,
    options: ChatOptions | Mapping[str, Any] | None,
    *,
    key: str,
) -> Reply:
    wanted = options_of(options)
    check_messages(messages)
    try:
        from holdfast.adapters import connection
    except ImportError as error:
        raise NotInstalled(what="httpx", why=str(error)) from None
    headers = {
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
        "idempotency-key": key,
    }
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {_usable(endpoint.api_key)}"
    url = endpoint.base_url.rstrip("/") + "/chat/completions"
    # Of the URL only the host is told: an operator may have put a password in it.
    parts = urlsplit(endpoint.base_url)
    host = parts.hostname or ""
    trusted = connection.trusting(endpoint.ca_file) if parts.scheme == "https" else None
    try:
        async with (
            asyncio.timeout(wanted.timeout_s),
            connection.client(trusted) as client,
            client.stream(
                "POST", url, headers=headers, content=_body(endpoint, messages, model, wanted)
            ) as answer,
        ):
            status, told = answer.status_code, dict(answer.headers)
            text = await connection.read_within(answer, BODY_BYTES_MAX)
    except HoldfastError:
        raise
    except Exception as error:
        raise connection.failure_of(error, host, wanted.timeout_s) from None
    if status in _RETRIED:
        raise unavailable(status, host, told)
    if status != 200:
        raise Answered(status=status, model=model, body=_excerpt(text, endpoint))
    return _reply(text, model, bound(messages, wanted))


def check_messages(messages: list[dict[str, Any]]) -> None:
    fit = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    if not fit or not messages:
        raise Invalid(what="messages", expected='[{"role": …, "content": …}, …]')


# -- inside --------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    # Some endpoints answer in parts.
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Told(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    model: str = ""
    id: str = ""
    usage: _Told | None = None


def _body(
    endpoint: Endpoint, messages: list[dict[str, Any]], model: str, wanted: ChatOptions
) -> bytes:
    said: dict[str, Any] = {
        **wanted.extra,
        "model": model,
        "messages": messages,
        endpoint.max_tokens_field: wanted.max_tokens,
    }
    if wanted.temperature is not None:
        said["temperature"] = wanted.temperature
    if wanted.tools:
        said["tools"] = wanted.tools
    return msgspec.json.encode(said)


def _reply(text: bytes, model: str, most: Usage) -> Reply:
    try:
        found = msgspec.json.decode(text, type=_Completion)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadAnswer(model=model, why=str(error)[:200]) from None
    told = found.usage
    counts = (0, 0)
    if told is not None and told.prompt_tokens is not None:
        counts = (told.prompt_tokens, told.completion_tokens)
    else:
        told = None  # half a usage is none
    if not found.choices or min(counts) < 0 or max(counts) > TOKENS_TOLD_MAX:
        raise BadAnswer(model=model, why="no choice, or a usage that cannot be")
    first = found.choices[0]
    return Reply(
        _joined(first.message.content),
        found.model or model,
        first.finish_reason or "",
        most if told is None else Usage(*counts),
        first.message.tool_calls or [],
        found.id,
        told is None,
    )


def _joined(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return content or ""


def _usable(key: str) -> str:
    """Checked here: what would complain of it later would quote it."""
    if not _KEY.fullmatch(key):
        raise NotConfigured(what="API key", why="a space, a line break or another odd character")
    return key


def _excerpt(text: bytes, endpoint: Endpoint) -> str:
    said = text.decode(errors="replace")
    if endpoint.api_key:
        said = said.replace(endpoint.api_key, "[key]")
    return said[:ERROR_BODY_CHARS]
