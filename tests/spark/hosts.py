"""Hosts for tests on one machine: each has a separate network, root directory and host name.

    with hosts(tmp_path, shared={"/mnt/shared": tmp_path / "shared"}) as (first, second):
        first.spawn(first.python, "-c", "print('ready')")      # a process on it
        assert_isolated(first, second)                         # no other path is on both

- A host is the network, mount and UTS namespaces of one holder process. The namespaces have no name, so nothing
  remains: the kernel removes interfaces and mounts with the last process in them, and the processes of
  a host die with the test run.
- Addresses exist only inside the namespaces: a bridge in a separate namespace connects the hosts. It is not visible
  in the namespace of this machine and has no route out.
- The root directory contains only the declared mounts: software, read-only, and `shared`, read-write.
  `/tmp` and the working directory are private to the host. On a `moved` host, Python, this project
  and its packages are at other paths.
- `PYTHON` is a program on the PATH of every host, and the only name of Python that works on all of them.

Needs root. Without root the first line of the failure is `NEEDS_ROOT`.
"""

import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from holdfast.spark.java import find_java
from tests.processes import ROOT, Proc

NEEDS_ROOT = "two hosts need root (network and mount namespaces): run these tests as root"
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
NETWORK = "10.77.0"
PYTHON = "python-of-this-host"
BIN = "/opt/bin"
WORK = "/var/work"
OWN_DIRECTORIES = ("/tmp", WORK, "/root", "/run", BIN)
# Mounts of the kernel: equal on every host, and without files of a test.
KERNEL_MOUNTS = ("/proc", "/sys", "/dev")
DEVICES = ("null", "zero", "full", "random", "urandom")
MERGED_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SITE_DIRECTORIES = ("site-packages", "dist-packages")
MOVED_PREFIX = "/opt/elsewhere"

# Die with the parent (PR_SET_PDEATHSIG, SIGKILL), log to stdout, become the program.
ATTACHED_CODE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.dup2(1, 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MNT_DETACH = 1, 32, 4096, 16384, 2


# --- paths of software on a host ----------------------------------------------------------------


@dataclass(frozen=True)
class HostSoftware:
    """Directories of this machine and their paths on a host."""

    mounts: dict[str, str]  # source: path on the host
    python: str
    python_path: tuple[str, ...]
    env: dict[str, str]

    @classmethod
    def of(cls, moved: bool) -> "HostSoftware":
        base, prefix = Path(sys.base_prefix).resolve(), Path(sys.prefix)
        sites = [
            path for path in map(Path, sys.path) if path.name in SITE_DIRECTORIES and path.is_dir()
        ]
        sites = [path for path in dict.fromkeys(sites) if not _is_inside(path, base)]
        java = find_java(os.environ).home
        system = [Path(path) for path in ("/usr", "/etc", *([java] if java else []))]
        if moved:
            targets = [(base, f"{MOVED_PREFIX}/python"), (ROOT, f"{MOVED_PREFIX}/project")]
            targets += [(site, f"{MOVED_PREFIX}/site-{n}") for n, site in enumerate(sites)]
            mounts = {str(path): str(path) for path in system}
            mounts |= {str(path): target for path, target in targets}
            python = f"{MOVED_PREFIX}/python/{Path(sys.executable).resolve().relative_to(base)}"
            path_of = dict(targets)
            python_path = [f"{path_of[ROOT]}", f"{path_of[ROOT]}/src", *(p for _, p in targets[2:])]
            return cls(
                mounts,
                python,
                tuple(python_path),
                {"LD_LIBRARY_PATH": f"{MOVED_PREFIX}/python/lib"},
            )
        sources = sorted({*system, base, prefix, ROOT, *sites})
        kept = [p for p in sources if not any(p != q and _is_inside(p, q) for q in sources)]
        paths = (str(ROOT), str(ROOT / "src"))
        return cls({str(path): str(path) for path in kept}, sys.executable, paths, {})

    def host_path(self, path: str | os.PathLike[str]) -> str:
        """The path on the host of a path of this machine."""
        absolute = Path(path).absolute()
        sources = [source for source in self.mounts if _is_inside(absolute, Path(source))]
        nearest = max(sources, key=len)
        return str(Path(self.mounts[nearest]) / absolute.relative_to(nearest))


def _is_inside(path: Path, directory: Path) -> bool:
    return path == directory or directory in path.parents


# --- a host -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamespaceHost:
    name: str
    address: str
    holder: Proc
    software: HostSoftware
    # Mounts that another host may have, too: the software and the shared directories of the test.
    declared: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return self.software.python

    @property
    def spark_home(self) -> str:
        return self.software.host_path(Path(pyspark.__file__).parent)

    def spawn(
        self,
        *args: str,
        directory: str = WORK,
        env: Mapping[str, str] | None = None,
        ready: str | None = "ready",
        timeout_s: float = 60.0,
    ) -> Proc:
        """Start a process on this host, in its `directory`. The process dies with the test run."""
        self.machine_path(directory).mkdir(parents=True, exist_ok=True)
        into = ["--target", str(self.holder.pid), "--mount", "--net", "--uts"]
        command = [_program("nsenter"), *into, "--", "/usr/bin/env", f"--chdir={directory}", *args]
        settings = {**self.env, **(env or {})}
        return Proc.spawn(
            [sys.executable, "-c", ATTACHED_CODE, *command],
            ready=ready,
            env=settings,
            timeout_s=timeout_s,
        )

    def machine_path(self, path: str) -> Path:
        """The path on this machine of a path of this host, through the mounts of the host."""
        return Path(f"/proc/{self.holder.pid}/root") / path.lstrip("/")

    def undeclared_directories(self) -> Iterator[str]:
        """Every directory of this host outside its declared mounts."""
        excluded = {*self.declared, *KERNEL_MOUNTS}
        waiting = ["/"]
        while waiting:
            path = waiting.pop()
            yield path
            with contextlib.suppress(OSError), os.scandir(self.machine_path(path)) as entries:
                inner = [
                    os.path.join(path, e.name) for e in entries if e.is_dir(follow_symlinks=False)
                ]
                waiting += sorted(set(inner) - excluded)

    def undeclared_file_mounts(self) -> Iterator[str]:
        """Single files that are mounted on this host and not inside a declared mount."""
        for line in Path(f"/proc/{self.holder.pid}/mountinfo").read_text().splitlines():
            path = line.split()[4]
            known = (*self.declared, *KERNEL_MOUNTS)
            inside = any(
                path == directory or path.startswith(f"{directory}/") for directory in known
            )
            if not inside and self.machine_path(path).is_file():
                yield path


@contextlib.contextmanager
def hosts(
    directory: Path,
    count: int = 2,
    *,
    shared: Mapping[str, Path] | None = None,
    undeclared: Mapping[int, Mapping[str, Path]] | None = None,
    names: Mapping[str, int] | None = None,
) -> Iterator[list[NamespaceHost]]:
    """Start `count` hosts. The last one is moved. `names` maps further host names to host numbers.

    `undeclared` maps host numbers to undeclared mounts: the mistake that `assert_isolated` finds.
    """
    require_root()
    addresses = [f"{NETWORK}.{n + 1}" for n in range(count)]
    lines = ["127.0.0.1 localhost"]
    lines += [f"{address} {host_name(n)}" for n, address in enumerate(addresses)]
    lines += [f"{addresses[n]} {name}" for name, n in (names or {}).items()]
    text = "\n".join(lines) + "\n"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(
            Proc.spawn([_program("unshare"), "--net", *_holder_command({})], env=_import_env())
        )
        _ip(switch, ["link add hub type bridge", "link set hub up"])
        created = []
        for n in range(count):
            software = HostSoftware.of(moved=n == count - 1 and n > 0)
            files = directory / host_name(n)
            files.mkdir(parents=True)
            (files / "hosts").write_text(text)
            mounts = {**(shared or {}), **(undeclared or {}).get(n, {})}
            setup = {
                "name": host_name(n),
                "root": str(files / "root"),
                "hosts": str(files / "hosts"),
                "software": software.mounts,
                "shared": {at: str(source) for at, source in mounts.items()},
                "wrapper": _wrapper(software),
            }
            unshare = [_program("unshare"), "--mount", "--net", "--uts"]
            holder = stack.enter_context(
                Proc.spawn([*unshare, *_holder_command(setup)], env=_import_env(), timeout_s=60.0)
            )
            _ip(
                None,
                [f"link add eth0 netns {holder.pid} type veth peer name h{n} netns {switch.pid}"],
            )
            _ip(switch, [f"link set h{n} master hub", f"link set h{n} up"])
            address = addresses[n]
            _ip(holder, ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"])
            declared = (*software.mounts.values(), *(shared or {}), *_system_directories())
            created.append(
                NamespaceHost(
                    host_name(n), address, holder, software, declared, _host_env(software)
                )
            )
        yield created


def host_name(number: int) -> str:
    return f"host-{number}"


def require_root() -> None:
    assert os.geteuid() == 0, NEEDS_ROOT
    for program in PROGRAMS:
        _program(program)


def assert_isolated(first: NamespaceHost, second: NamespaceHost) -> None:
    """Assert that no directory outside the declared mounts is on both hosts, under any path."""
    for host in (first, second):
        assert not set(OWN_DIRECTORIES) & set(host.declared), (
            f"{host.name}: {OWN_DIRECTORIES} are a host's own"
        )
    ids = {_identity(first.machine_path(path)): path for path in first.undeclared_directories()}
    both = [
        f"{first.name}:{ids[identity]} is {second.name}:{path}"
        for path in second.undeclared_directories()
        if (identity := _identity(second.machine_path(path))) in ids
    ]
    assert not both, f"not declared, and on both hosts: {both}"
    files = {_identity(first.machine_path(path)): path for path in first.undeclared_file_mounts()}
    both = [
        path
        for path in second.undeclared_file_mounts()
        if _identity(second.machine_path(path)) in files
    ]
    assert not both, f"not declared, and mounted on both hosts: {both}"
    for path in ids.values():
        marker = f"{path.rstrip('/')}/marker-of-{first.name}"
        try:
            first.machine_path(marker).touch(exist_ok=False)
        except OSError:
            continue  # read-only, or removed meanwhile
        try:
            assert not second.machine_path(marker).exists(), (
                f"not declared, and on both hosts: {path}"
            )
        finally:
            first.machine_path(marker).unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _program(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    assert path, f"{name} is missing: apt-get install -y {PROGRAMS[name]}"
    return path


def _ip(inside: Proc | None, lines: Sequence[str]) -> None:
    """Run `ip` commands in the network namespace of a holder, or in the namespace of this machine."""
    into = [_program("nsenter"), "--target", str(inside.pid), "--net"] if inside else []
    command = [*into, _program("ip"), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    assert done.returncode == 0, f"ip: {lines}: {done.stderr}"


def _host_env(software: HostSoftware) -> dict[str, str]:
    java = find_java(os.environ).home
    return {
        "HOME": "/root",
        "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.pathsep.join(software.python_path),
        "TMPDIR": "/tmp",
        "VIRTUAL_ENV": "",
        **({"JAVA_HOME": java} if java else {}),
        **software.env,
    }


def _wrapper(software: HostSoftware) -> str:
    return f'#!/bin/sh\nexec {software.python} "$@"\n'


def _import_env() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def _system_directories() -> list[str]:
    return [f"/{name}" for name in MERGED_DIRECTORIES if Path(f"/{name}").is_dir()]


# --- the holder process -------------------------------------------------------------------------


def _holder_command(setup: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-c", ATTACHED_CODE, sys.executable, "-m", __name__, json.dumps(setup)]


def run_holder(setup: dict[str, object]) -> None:
    """Create the root directory of a host, pivot into it, and wait until standard input ends."""
    if setup:
        socket.sethostname(str(setup["name"]))
        _enter_root(setup)
    print("ready", flush=True)
    sys.stdin.read()


def _enter_root(setup: Mapping[str, object]) -> None:
    root = Path(str(setup["root"]))
    root.mkdir()
    _mount(str(root), root, flags=_MS_BIND)
    for path in OWN_DIRECTORIES:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    software, shared = setup["software"], setup["shared"]
    assert isinstance(software, dict)
    assert isinstance(shared, dict)
    for name in MERGED_DIRECTORIES:
        if Path(f"/{name}").is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
        elif Path(f"/{name}").is_dir():
            _bind(f"/{name}", root / name, read_only=True)
    for source, path in sorted(software.items(), key=lambda item: len(item[1])):
        _bind(source, root / path.lstrip("/"), read_only=True)
    _mount(str(setup["hosts"]), root / "etc/hosts", flags=_MS_BIND)
    for path, source in shared.items():
        _bind(source, root / path.lstrip("/"), read_only=False)
    wrapper = root / BIN.lstrip("/") / PYTHON
    wrapper.write_text(str(setup["wrapper"]))
    wrapper.chmod(0o755)
    for name in KERNEL_MOUNTS:
        (root / name.lstrip("/")).mkdir()
    _mount("proc", root / "proc", kind="proc")
    _mount("sysfs", root / "sys", kind="sysfs")
    _mount("tmpfs", root / "dev", kind="tmpfs")
    for device in DEVICES:
        (root / "dev" / device).touch()
        _mount(f"/dev/{device}", root / "dev" / device, flags=_MS_BIND)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    (root / "dev/shm").mkdir(mode=0o1777)
    os.chdir(root)
    (root / ".before").mkdir()
    subprocess.run(["pivot_root", ".", ".before"], check=True)
    os.chdir("/")
    _raise_on_error(_libc().umount2(b"/.before", _MNT_DETACH), "/.before")
    Path("/.before").rmdir()


def _bind(source: str, target: Path, *, read_only: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _mount(source, target, flags=_MS_BIND | _MS_REC)
    if read_only:
        _mount(source, target, flags=_MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: str, target: Path, *, kind: str = "", flags: int = 0) -> None:
    result = _libc().mount(
        source.encode(), str(target).encode(), kind.encode() or None, flags, None
    )
    _raise_on_error(result, str(target))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
    )  # fmt: skip
    return libc


def _raise_on_error(result: int, path: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


if __name__ == "__main__":
    run_holder(json.loads(sys.argv[1]))
