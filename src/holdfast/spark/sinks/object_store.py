"""Object stores by URL: the one place that opens one. Outputs and spools share it.

Credentials come from the environment of the process that opens the store, or from `storage_options`. These
are kept in memory by URL: they are in no manifest, no store, no message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Invalid
from holdfast.spark.sinks.files import readable
from holdfast.spark.sinks.location import Location

# By URL, as this process was given them.
_options: dict[str, dict[str, str]] = {}


def keep_options(url: str, options: Mapping[str, str] | None) -> None:
    """Remember, in this process, the credentials and settings for the place at `url`."""
    if options is None:
        return
    if not all(isinstance(one, str) for pair in options.items() for one in pair):
        raise Invalid(what="storage_options", why="names and values are text")
    _options[url] = dict(options)


def options_of(url: str) -> dict[str, str]:
    """Those of the URL, or of the nearest one above it."""
    while url not in _options and "/" in url.partition("://")[2]:
        url = url.rpartition("/")[0]
    return dict(_options.get(url, {}))


def given_options() -> dict[str, dict[str, str]]:
    """All of them, for a process that writes on behalf of this one."""
    return {url: dict(options) for url, options in _options.items()}


def options_for(*urls: object) -> dict[str, dict[str, str]]:
    """Those that the places at these URLs need, and no others: executors get no more than their run uses."""
    wanted = [str(url) for url in urls if url]
    return {
        known: dict(options)
        for known, options in _options.items()
        if any(url == known or url.startswith(f"{known}/") for url in wanted)
    }


def open_bucket(place: Location) -> Any:
    """The bucket of a place, with the options that were kept for its URL. Nothing is asked of it yet."""
    library()
    from obstore.store import from_url

    options: Any = {name.lower(): value for name, value in options_of(place.url).items()}
    client: Any = {
        name: options.pop(found)
        for name in ("allow_http", "timeout")
        for found in (name, f"aws_{name}")
        if found in options
    }
    scheme = "s3" if place.scheme == "s3a" else place.scheme
    return from_url(
        f"{scheme}://{place.bucket}",
        config=options or None,
        client_options=client or None,
    )


def library() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        why = "install it: pip install 'holdfast[spark]'"
        raise Invalid(what="object store", missing="obstore", why=why) from error
    return obstore


def told(error: BaseException) -> str:
    """The first sentence of it: what follows is the debugging form of a request."""
    return readable(str(error).split("\n")[0])[:300]
