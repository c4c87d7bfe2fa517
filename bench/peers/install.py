"""The peers, in a directory of their own: `build/peers`. Nothing of it is part of the product.

Python packages come from `requirements-peers.lock`, with hashes; Restate's server from npm, by
version and sha512; RabbitMQ is the package of a Debian system, installed by apt if it is missing and
we may. All are downloaded by whatever pip, npm and apt are configured to use.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

from bench.place import ROOT

HOME = ROOT / "build" / "peers"
LOCK = ROOT / "requirements-peers.lock"
INSTALL_S = 900.0

RESTATE_VERSION = "1.7.12"
# Of the npm package @restatedev/restate-server-PLATFORM.
RESTATE_SHA512 = {
    "linux-x64": "URotJ1AIqaSCDkRMl4OrQfTLH+NYuOZb3ZsP7wxxiuAB6pncgPhTUYSvegTF5PTrAShnNyHNpju9kjf2O3QxoA==",
    "linux-arm64": "aV7YxWvPhp88MjQtObGDhDCTwCBa68wwZOAMmJqDreO0auHYuSfOqabEx4I90coZsx3zShNusppbTPKprOa+dw==",
    "darwin-x64": "ZRS1kk3S4pzIiup2IRRQ3eHoKJSZ43FG4rDe7UbGFWwZ/Yz0xSDa4/3/kiuwaMHXWs/CsKtJe0shx8JCR0DO1g==",
    "darwin-arm64": "pHrZMaaeBJxXTgI19WG/aJvxuUDQ2nhSDEEJVseTZQiTEdJ7hboPlhvYacgXIE2iMnLMmWkN5XIlXqosHK8Byg==",
}
RABBIT_PACKAGE = "rabbitmq-server"
# Rather than the wrapper in PATH, which would run it as another user, in a directory of the system.
RABBIT_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
# Kept by Debian for programs that must not be started by their installation.
NOT_STARTED = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}

_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class CannotInstall(RuntimeError):
    """Why a peer is not there; the run goes on without it."""


def interpreter() -> Path:
    """The Python that has the peers' packages."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    home = HOME / f"python-{digest}"
    python = home / "bin" / "python"
    done = home / ".done"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", home])
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--require-hashes", "-r", LOCK])
        done.touch()
    return python


def restate_server() -> Path:
    """The server's binary."""
    system = f"{platform.system().lower()}-{_MACHINES.get(platform.machine().lower(), 'unknown')}"
    wanted = RESTATE_SHA512.get(system)
    if wanted is None:
        raise CannotInstall(f"Restate has no server for {system}")
    home = HOME / f"restate-{RESTATE_VERSION}-{system}"
    binary = home / "restate-server"
    if binary.exists():
        return binary
    if shutil.which("npm") is None:
        raise CannotInstall("npm is not there to download Restate's server")
    package = f"@restatedev/restate-server-{system}@{RESTATE_VERSION}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    _run(["npm", "pack", "--silent", "--ignore-scripts", package], cwd=home)
    [archive] = home.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != wanted:
        archive.unlink()
        raise CannotInstall(f"{package} does not have the pinned sha512")
    with tarfile.open(archive) as tar:
        source = tar.extractfile("package/bin/restate-server")
        assert source
        partial = binary.with_suffix(".partial")
        with partial.open("wb") as target:
            shutil.copyfileobj(source, target)
    partial.chmod(0o755)
    partial.rename(binary)
    archive.unlink()
    return binary


def rabbit_server() -> tuple[Path, Path]:
    """The server's script and Erlang's port mapper."""
    if not RABBIT_SERVER.exists():
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            raise CannotInstall(
                f"{RABBIT_PACKAGE} is missing, and installing it needs apt-get and root"
            )
        apt = ["apt-get", "--quiet", "--yes"]
        _run([*apt, "update"])
        _run([*apt, "install", "--no-install-recommends", RABBIT_PACKAGE], env=NOT_STARTED)
    mapper = shutil.which("epmd")
    if mapper is None or not RABBIT_SERVER.exists():
        raise CannotInstall(f"{RABBIT_PACKAGE} is installed, but not where Debian has it")
    return RABBIT_SERVER, Path(mapper)


def version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return f"{package} {found.stdout.strip()}"


def package_version(package: str) -> str:
    """Of a package of the system."""
    argv = ["dpkg-query", "--show", "--showformat", "${Version}", package]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return found.stdout.strip()


def _run(
    argv: list[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    what = Path(argv[0]).name
    try:
        subprocess.run(
            [str(part) for part in argv],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_S,
        )
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines()
        raise CannotInstall(f"{what}: {said[-1] if said else error.returncode}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{what}: {type(error).__name__}") from None
