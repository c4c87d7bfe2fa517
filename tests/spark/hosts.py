"""Hosts for tests: each has a network, a root directory and a host name of its own, on one machine.

    with hosts(tmp_path, shared={"/mnt/shared": tmp_path / "shared"}) as (first, second):
        first.spawn(first.python, "-c", "print('ready')")      # a process on it
        assert_apart(first, second)                            # no other path is on both

- A host is the network, mount and UTS namespaces of one holder process. They have no name, so nothing
  stays behind: the kernel removes interfaces and mounts with the last process in them, and processes of
  a host die with the test run.
- Addresses exist only inside: a bridge in a namespace of its own connects the hosts, and this machine's
  own namespace sees none of it. There is no way out of them.
- The root directory is empty but for what is declared: software, read-only, and `shared`, read-write.
  `/tmp` and the working directory are the host's own. On a host that is `moved`, Python, this project
  and its packages lie at other paths.
- `PYTHON` is a program on the PATH of every host, and the only way to name Python on all of them.

Needs root. Without it the first line of the failure says so.
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

from holdfast.spark.java import find
from tests.processes import ROOT, Proc

NEEDS_ROOT = "two hosts need root (network and mount namespaces): run these tests as root"
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
NETWORK = "10.77.0"
PYTHON = "python-of-this-host"
BIN = "/opt/bin"
WORK = "/var/work"
OWN = ("/tmp", WORK, "/root", "/run", BIN)
# What the kernel makes: the same everywhere, and no place for files.
KERNEL = ("/proc", "/sys", "/dev")
DEVICES = ("null", "zero", "full", "random", "urandom")
MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
SITES = ("site-packages", "dist-packages")
MOVED = "/opt/elsewhere"

# Die with the parent (PR_SET_PDEATHSIG, SIGKILL), log to stdout, become the program.
ATTACHED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.dup2(1, 2); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MNT_DETACH = 1, 32, 4096, 16384, 2


# --- where software lies on a host --------------------------------------------------------------


@dataclass(frozen=True)
class Software:
    """Directories of this machine, and where a host sees them."""

    mounts: dict[str, str]  # source: path on the host
    python: str
    python_path: tuple[str, ...]
    env: dict[str, str]

    @classmethod
    def of(cls, moved: bool) -> "Software":
        base, prefix = Path(sys.base_prefix).resolve(), Path(sys.prefix)
        sites = [path for path in map(Path, sys.path) if path.name in SITES and path.is_dir()]
        sites = [path for path in dict.fromkeys(sites) if not _in(path, base)]
        java = find(os.environ).home
        system = [Path(path) for path in ("/usr", "/etc", *([java] if java else []))]
        if moved:
            places = [(base, f"{MOVED}/python"), (ROOT, f"{MOVED}/project")]
            places += [(site, f"{MOVED}/site-{n}") for n, site in enumerate(sites)]
            mounts = {str(path): str(path) for path in system}
            mounts |= {str(path): place for path, place in places}
            python = f"{MOVED}/python/{Path(sys.executable).resolve().relative_to(base)}"
            path_of = dict(places)
            python_path = [f"{path_of[ROOT]}", f"{path_of[ROOT]}/src", *(p for _, p in places[2:])]
            return cls(
                mounts, python, tuple(python_path), {"LD_LIBRARY_PATH": f"{MOVED}/python/lib"}
            )
        places_here = sorted({*system, base, prefix, ROOT, *sites})
        kept = [p for p in places_here if not any(p != q and _in(p, q) for q in places_here)]
        paths = (str(ROOT), str(ROOT / "src"))
        return cls({str(path): str(path) for path in kept}, sys.executable, paths, {})

    def at(self, path: str | os.PathLike[str]) -> str:
        """Where the host sees a path of this machine."""
        found = Path(path).absolute()
        sources = [source for source in self.mounts if _in(found, Path(source))]
        nearest = max(sources, key=len)
        return str(Path(self.mounts[nearest]) / found.relative_to(nearest))


def _in(path: Path, directory: Path) -> bool:
    return path == directory or directory in path.parents


# --- a host -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    holder: Proc
    software: Software
    # Mounts that another host may have too: the software, and what the test shares.
    declared: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return self.software.python

    @property
    def spark_home(self) -> str:
        return self.software.at(Path(pyspark.__file__).parent)

    def spawn(
        self,
        *args: str,
        directory: str = WORK,
        env: Mapping[str, str] | None = None,
        ready: str | None = "ready",
        timeout_s: float = 60.0,
    ) -> Proc:
        """A process on this host, in `directory` of it, which dies with the test run."""
        self.seen(directory).mkdir(parents=True, exist_ok=True)
        into = ["--target", str(self.holder.pid), "--mount", "--net", "--uts"]
        command = [_program("nsenter"), *into, "--", "/usr/bin/env", f"--chdir={directory}", *args]
        settings = {**self.env, **(env or {})}
        return Proc.spawn(
            [sys.executable, "-c", ATTACHED, *command],
            ready=ready,
            env=settings,
            timeout_s=timeout_s,
        )

    def seen(self, path: str) -> Path:
        """A path of this host, as a path of this machine: its mounts are crossed as they are there."""
        return Path(f"/proc/{self.holder.pid}/root") / path.lstrip("/")

    def directories(self) -> Iterator[str]:
        """Every directory of this host outside of its declared mounts."""
        apart = {*self.declared, *KERNEL}
        waiting = ["/"]
        while waiting:
            path = waiting.pop()
            yield path
            with contextlib.suppress(OSError), os.scandir(self.seen(path)) as entries:
                inner = [
                    os.path.join(path, e.name) for e in entries if e.is_dir(follow_symlinks=False)
                ]
                waiting += sorted(set(inner) - apart)

    def mounted_files(self) -> Iterator[str]:
        """Single files that are mounted on this host and not declared."""
        for line in Path(f"/proc/{self.holder.pid}/mountinfo").read_text().splitlines():
            path = line.split()[4]
            known = (*self.declared, *KERNEL)
            inside = any(path == one or path.startswith(f"{one}/") for one in known)
            if not inside and self.seen(path).is_file():
                yield path


@contextlib.contextmanager
def hosts(
    directory: Path,
    count: int = 2,
    *,
    shared: Mapping[str, Path] | None = None,
    undeclared: Mapping[int, Mapping[str, Path]] | None = None,
    names: Mapping[str, int] | None = None,
) -> Iterator[list[Host]]:
    """So many hosts, the last one moved. `names` are further host names, by number of host.

    `undeclared` are mounts by number of host that are not declared: the mistake that `assert_apart` finds.
    """
    require_root()
    addresses = [f"{NETWORK}.{n + 1}" for n in range(count)]
    lines = ["127.0.0.1 localhost"]
    lines += [f"{address} {host_name(n)}" for n, address in enumerate(addresses)]
    lines += [f"{addresses[n]} {name}" for name, n in (names or {}).items()]
    text = "\n".join(lines) + "\n"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(
            Proc.spawn([_program("unshare"), "--net", *_holder({})], env=_importable())
        )
        _ip(switch, ["link add hub type bridge", "link set hub up"])
        made = []
        for n in range(count):
            software = Software.of(moved=n == count - 1 and n > 0)
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
                Proc.spawn([*unshare, *_holder(setup)], env=_importable(), timeout_s=60.0)
            )
            _ip(
                None,
                [f"link add eth0 netns {holder.pid} type veth peer name h{n} netns {switch.pid}"],
            )
            _ip(switch, [f"link set h{n} master hub", f"link set h{n} up"])
            address = addresses[n]
            _ip(holder, ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"])
            declared = (*software.mounts.values(), *(shared or {}), *_plain_system())
            made.append(Host(host_name(n), address, holder, software, declared, _env(software)))
        yield made


def host_name(number: int) -> str:
    return f"host-{number}"


def require_root() -> None:
    assert os.geteuid() == 0, NEEDS_ROOT
    for program in PROGRAMS:
        _program(program)


def assert_apart(first: Host, second: Host) -> None:
    """No directory outside the declared mounts is on both hosts, under whatever path."""
    for host in (first, second):
        assert not set(OWN) & set(host.declared), f"{host.name}: {OWN} are a host's own"
    ids = {_identity(first.seen(path)): path for path in first.directories()}
    both = [
        f"{first.name}:{ids[identity]} is {second.name}:{path}"
        for path in second.directories()
        if (identity := _identity(second.seen(path))) in ids
    ]
    assert not both, f"not declared, and on both hosts: {both}"
    files = {_identity(first.seen(path)): path for path in first.mounted_files()}
    both = [path for path in second.mounted_files() if _identity(second.seen(path)) in files]
    assert not both, f"not declared, and mounted on both hosts: {both}"
    for path in ids.values():
        marker = f"{path.rstrip('/')}/marker-of-{first.name}"
        try:
            first.seen(marker).touch(exist_ok=False)
        except OSError:
            continue  # read-only, or gone meanwhile
        try:
            assert not second.seen(marker).exists(), f"not declared, and on both hosts: {path}"
        finally:
            first.seen(marker).unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    assert found, f"{name} is missing: apt-get install -y {PROGRAMS[name]}"
    return found


def _ip(inside: Proc | None, lines: Sequence[str]) -> None:
    """Commands of `ip` in the network of a holder, or where the ends of a pair are named."""
    into = [_program("nsenter"), "--target", str(inside.pid), "--net"] if inside else []
    command = [*into, _program("ip"), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    assert done.returncode == 0, f"ip: {lines}: {done.stderr}"


def _env(software: Software) -> dict[str, str]:
    java = find(os.environ).home
    return {
        "HOME": "/root",
        "PATH": f"{BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": os.pathsep.join(software.python_path),
        "TMPDIR": "/tmp",
        "VIRTUAL_ENV": "",
        **({"JAVA_HOME": java} if java else {}),
        **software.env,
    }


def _wrapper(software: Software) -> str:
    return f'#!/bin/sh\nexec {software.python} "$@"\n'


def _importable() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def _plain_system() -> list[str]:
    return [f"/{name}" for name in MERGED if Path(f"/{name}").is_dir()]


# --- the holder process -------------------------------------------------------------------------


def _holder(setup: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-c", ATTACHED, sys.executable, "-m", __name__, json.dumps(setup)]


def hold(setup: dict[str, object]) -> None:
    """Make the root directory of a host, move into it, and stay until standard input ends."""
    if setup:
        socket.sethostname(str(setup["name"]))
        _enter_root(setup)
    print("ready", flush=True)
    sys.stdin.read()


def _enter_root(setup: Mapping[str, object]) -> None:
    root = Path(str(setup["root"]))
    root.mkdir()
    _mount(str(root), root, flags=_MS_BIND)
    for path in OWN:
        (root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    software, shared = setup["software"], setup["shared"]
    assert isinstance(software, dict)
    assert isinstance(shared, dict)
    for name in MERGED:
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
    for name in KERNEL:
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
    _checked(_libc().umount2(b"/.before", _MNT_DETACH), "/.before")
    Path("/.before").rmdir()


def _bind(source: str, target: Path, *, read_only: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    _mount(source, target, flags=_MS_BIND | _MS_REC)
    if read_only:
        _mount(source, target, flags=_MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def _mount(source: str, target: Path, *, kind: str = "", flags: int = 0) -> None:
    told = _libc().mount(source.encode(), str(target).encode(), kind.encode() or None, flags, None)
    _checked(told, str(target))


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p,
    )  # fmt: skip
    return libc


def _checked(told: int, path: str) -> None:
    if told:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


if __name__ == "__main__":
    hold(json.loads(sys.argv[1]))
