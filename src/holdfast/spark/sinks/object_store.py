"""Object stores by URL, shared by outputs and spools.

Credentials come from the environment of the opening process or from `storage_options`. These are
kept in memory by URL, never in a manifest, a store or a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Invalid
from holdfast.spark.sinks.location import Location
from holdfast.spark.sinks.parquet_files import one_line

# Options by URL, of this process.
_options: dict[str, dict[str, str]] = {}


def keep_options(url: str, options: Mapping[str, str] | None) -> None:
    """Keep the credentials and settings for the location `url` in this process."""
    if options is None:
        return
    if not all(isinstance(one, str) for pair in options.items() for one in pair):
        raise Invalid(what="storage_options", why="names and values are text")
    _options[url] = dict(options)


def forget_options() -> None:
    """Forget all options. The next run of a process has its own."""
    _options.clear()


def options_of(url: str) -> dict[str, str]:
    """Return the options of the URL or of its nearest parent."""
    while url not in _options and "/" in url.partition("://")[2]:
        url = url.rpartition("/")[0]
    return dict(_options.get(url, {}))


def all_options() -> dict[str, dict[str, str]]:
    """Return all options, for a process that writes on behalf of this one."""
    return {url: dict(options) for url, options in _options.items()}


def options_for(*urls: object) -> dict[str, dict[str, str]]:
    """Return the options that these URLs need. Executors get no others."""
    wanted = [str(url) for url in urls if url]
    return {
        known: dict(options)
        for known, options in _options.items()
        if any(url == known or url.startswith(f"{known}/") for url in wanted)
    }


def open_bucket(place: Location) -> Any:
    """Open the bucket of a location with the options kept for its URL. Sends no request yet."""
    obstore_library()
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


def obstore_library() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        why = "install it: pip install 'holdfast[spark]'"
        raise Invalid(what="object store", missing="obstore", why=why) from error
    return obstore


def error_text(error: BaseException) -> str:
    """Return the first line of the error. Debug output of the request follows it."""
    return one_line(str(error).split("\n")[0])[:300]
