"""TLS by certificate files. A renewed certificate applies to new connections without a restart.

A renewal that cannot be loaded leaves the former certificate in force, and the server logs a warning.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from holdfast.errors import Invalid, NotFound

_log = logging.getLogger("holdfast.http")


class CertificateFiles:
    def __init__(self, certificate: str, key: str | None = None) -> None:
        """`certificate` is a PEM file with the chain. `key` is the PEM file of the private key, if it is another one."""
        self._files = [Path(certificate), *([Path(key)] if key else [])]
        for option, path in zip(("--http-cert", "--http-key"), self._files, strict=False):
            if not path.is_file():
                raise NotFound(what=option, path=str(path))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._stamps = self._read_stamps()
        try:
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise Invalid(what="--http-cert", path=certificate, why=str(error)) from None

    def refresh(self) -> None:
        """Load the files again if they changed."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            # A new context first: a key that does not match must not replace the certificate.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ValueError) as error:
            _log.warning("the former certificate stays in force: %s: %s", self._files[0], error)

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files[0], self._files[-1]
        for path in (certificate, key):
            if not path.is_file():
                # OpenSSL would wait for the writer of a FIFO.
                raise OSError(f"{path} is not a regular file")
        # Without a password, OpenSSL would ask for that of an encrypted key on the terminal.
        context.load_cert_chain(certificate, key, password=b"")

    def _read_stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files:
            try:
                status = path.stat()
            except OSError:
                continue
            stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
        return stamps
