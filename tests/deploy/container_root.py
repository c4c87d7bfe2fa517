"""A container image without Docker: the instructions of a Dockerfile, executed in a new root directory.

The base image is this machine's system and Python, mounted read-only. A stage has its own root directory. RUN executes
as root, as Docker does. A command of the image runs as the user of the image in its own mount and network namespace,
with a read-only root. Only volumes and /tmp are writable. Needs root.

pip installs no dependencies: they come from the packages of this environment, mounted read-only at PACKAGES. The
directory of the checkout is not mounted.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deploy.dockerfile import BuildStage, read_dockerfile
from tests.processes import ROOT, Proc, require_programs

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/dev", "/proc", sys.base_prefix)
PACKAGES = "/packages"
PYTHON = "/python-bin"
RUN_S = 240
BASE_ENV = {
    "PATH": f"{PYTHON}:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "PYTHONPATH": PACKAGES,
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "false",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}


class ContainerImage:
    """The root directory of a stage after its instructions."""

    def __init__(self, root: Path, stage: BuildStage, others: Mapping[str, ContainerImage]) -> None:
        require_programs("unshare", "nsenter", "setpriv", "ip")
        assert os.geteuid() == 0, "mount namespaces need root: run the tests as root"
        self.root, self.stage = root, stage
        self.directory = "/"
        self.env = dict(BASE_ENV)
        self.volumes: list[str] = []
        self._make_base()
        for name, text in stage.steps:
            self._apply(name, text, others)

    def _make_base(self) -> None:
        self.root.mkdir(mode=0o755)
        for path in (*SYSTEM, PACKAGES, "/tmp", "/mnt"):
            self.host_path(path).mkdir(parents=True, exist_ok=True)
        self.host_path(PYTHON).mkdir()
        for name in ("python", "python3"):
            os.symlink(os.path.realpath(sys.executable), self.host_path(f"{PYTHON}/{name}"))

    def host_path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _apply(self, name: str, text: str, others: Mapping[str, ContainerImage]) -> None:
        if name == "WORKDIR":
            self.directory = text
            self.host_path(text).mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            for word in shlex.split(text):
                key, _, value = word.partition("=")
                self.env[key] = re.sub(r"\$(\w+)", lambda found: self.env[found[1]], value)
        elif name == "COPY":
            self._copy(text.split(), others)
        elif name == "RUN":
            self.run(["/bin/sh", "-c", text], (0, 0), writable=True)
        elif name == "VOLUME":
            self.volumes.append(text)
        else:
            assert name in ("USER", "EXPOSE", "HEALTHCHECK", "CMD"), name

    def _copy(self, words: list[str], others: Mapping[str, ContainerImage]) -> None:
        source_root = ROOT
        if words[0].startswith("--from="):
            source_root = others[words.pop(0).removeprefix("--from=")].root
        *sources, target = words
        into = self.host_path(os.path.join(self.directory, target))
        for source in sources:
            path = source_root / source.lstrip("/")
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy(path, into / path.name)

    # -- commands --------------------------------------------------------------------------------

    def run(
        self, words: Sequence[str], user: tuple[int, int], *, writable: bool = False
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command_line(words, user, writable=writable),
            capture_output=True, text=True, timeout=RUN_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        mounts: Mapping[str, str] | None = None,
    ) -> Proc:
        """Start a command as the user of the image and return when it printed its ready line."""
        line = self.command_line(words, self.stage.user, env=env, mounts=mounts or {})
        ready = '{"ready"' if "--json" in words else "ready"
        return Proc.spawn(line, ready=ready, timeout_s=90)

    def enter(
        self, running: Proc, words: Sequence[str], env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces of a running one, as `docker exec` does."""
        uid, gid = self.stage.user
        line = [
            "nsenter", f"--target={running.pid}", "--mount", "--net", "--root",
            "/usr/bin/env", f"--chdir={self.directory}", *_as_user(uid, gid), *_environment({**self.env, **(env or {})}), *words,
        ]  # fmt: skip
        return subprocess.run(line, capture_output=True, text=True, timeout=RUN_S, check=False)

    def command_line(
        self,
        words: Sequence[str],
        user: tuple[int, int],
        *,
        writable: bool = False,
        env: Mapping[str, str] | None = None,
        mounts: Mapping[str, str] | None = None,
    ) -> list[str]:
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        root = shlex.quote(str(self.root))
        lines = [f"mount --bind {root} {root}"]
        for source, target in [*((path, path) for path in SYSTEM), (packages, PACKAGES)]:
            place = shlex.quote(str(self.host_path(target)))
            lines.append(f"mount --rbind {shlex.quote(source)} {place}")
            if target not in ("/dev", "/proc"):
                lines.append(f"mount -o remount,ro,bind {place}")
        for path in self.volumes:
            place = shlex.quote(str(self.host_path(path)))
            lines.append(f"mount --bind {place} {place}")
        for source, target in (mounts or {}).items():
            self.host_path(target).mkdir(parents=True, exist_ok=True)
            place = shlex.quote(str(self.host_path(target)))
            lines.append(f"mount --bind {shlex.quote(source)} {place}")
        lines.append(
            f"mount -t tmpfs -o mode=1777 tmpfs {shlex.quote(str(self.host_path('/tmp')))}"
        )
        if not writable:
            lines += [f"mount -o remount,ro,bind {root}", "ip link set lo up"]
        inner = [
            "/usr/bin/env", f"--chdir={self.directory}", *_as_user(*user),
            *_environment({**self.env, **(env or {})}), *words,
        ]  # fmt: skip
        lines.append(f"exec chroot {root} {shlex.join(inner)}")
        unshare = ["unshare", "--mount", *([] if writable else ["--net"])]
        path = f"PATH={os.environ['PATH']}:/usr/sbin:/sbin"
        return ["/usr/bin/env", path, *unshare, "/bin/sh", "-euc", "\n".join(lines)]


def _as_user(uid: int, gid: int) -> list[str]:
    if uid == 0:
        return []
    bounds = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", *bounds]


def _environment(env: Mapping[str, str]) -> list[str]:
    return ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]


def build(dockerfile: Path, directory: Path) -> ContainerImage:
    """Execute all stages. The image is the last one."""
    images: dict[str, ContainerImage] = {}
    stages = read_dockerfile(dockerfile)
    for number, stage in enumerate(stages):
        image = ContainerImage(directory / f"stage-{number}", stage, images)
        images[stage.name or str(number)] = image
    return image
