"""Installs the peers in a separate directory, `build/peers`. None of it is part of the product.

Python packages come from `requirements-peers.lock`, with hashes. Restate's server comes from npm, by
version and sha512. RabbitMQ is the package of a Debian system. apt installs it if it is missing and
the user is root. Downloads use the configuration of pip, npm and apt.
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
# Hashes of the npm package @restatedev/restate-server-PLATFORM.
RESTATE_SHA512 = {
    "linux-x64": "URotJ1AIqaSCDkRMl4OrQfTLH+NYuOZb3ZsP7wxxiuAB6pncgPhTUYSvegTF5PTrAShnNyHNpju9kjf2O3QxoA==",
    "linux-arm64": "aV7YxWvPhp88MjQtObGDhDCTwCBa68wwZOAMmJqDreO0auHYuSfOqabEx4I90coZsx3zShNusppbTPKprOa+dw==",
    "darwin-x64": "ZRS1kk3S4pzIiup2IRRQ3eHoKJSZ43FG4rDe7UbGFWwZ/Yz0xSDa4/3/kiuwaMHXWs/CsKtJe0shx8JCR0DO1g==",
    "darwin-arm64": "pHrZMaaeBJxXTgI19WG/aJvxuUDQ2nhSDEEJVseTZQiTEdJ7hboPlhvYacgXIE2iMnLMmWkN5XIlXqosHK8Byg==",
}
RABBIT_PACKAGE = "rabbitmq-server"
# The script itself: the wrapper in PATH would run it as another user in a system directory.
RABBIT_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
# Debian's switch that prevents the start of a service by its installation.
NOT_STARTED = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}

_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class CannotInstall(RuntimeError):
    """The reason why a peer is missing. The run continues without it."""


def interpreter() -> Path:
    """The Python interpreter with the packages of the peers."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    home = HOME / f"python-{digest}"
    python = home / "bin" / "python"
    done = home / ".done"
    if not done.exists():
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", home])
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # The lock names every package. Without `--no-deps`, pip 23 refuses an extra whose package has a newer version.
        _run([*pip, "--no-deps", "--require-hashes", "-r", LOCK])
        done.touch()
    return python


def restate_server() -> Path:
    """The path of the server binary."""
    system = f"{platform.system().lower()}-{_MACHINES.get(platform.machine().lower(), 'unknown')}"
    wanted = RESTATE_SHA512.get(system)
    if wanted is None:
        raise CannotInstall(f"Restate has no server for {system}")
    home = HOME / f"restate-{RESTATE_VERSION}-{system}"
    binary = home / "restate-server"
    if binary.exists():
        return binary
    if shutil.which("npm") is None:
        raise CannotInstall("npm is missing, which downloads Restate's server")
    package = f"@restatedev/restate-server-{system}@{RESTATE_VERSION}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    _run(["npm", "pack", "--silent", "--ignore-scripts", package], cwd=home)
    [archive] = home.glob("*.tgz")
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != wanted:
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
    """The paths of the server script and of Erlang's port mapper."""
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
        raise CannotInstall(f"{RABBIT_PACKAGE} is installed, but not at Debian's path")
    return RABBIT_SERVER, Path(mapper)


def version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    return f"{package} {result.stdout.strip()}"


def package_version(package: str) -> str:
    """The version of a system package."""
    argv = ["dpkg-query", "--show", "--showformat", "${Version}", package]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    return result.stdout.strip()


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
        lines = (error.stderr or error.stdout).strip().splitlines()
        raise CannotInstall(f"{what}: {lines[-1] if lines else error.returncode}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(f"{what}: {type(error).__name__}") from None
