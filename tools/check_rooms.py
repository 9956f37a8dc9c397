"""Check the repository's room rules, which say what may stand in which file, by reading syntax trees."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "src/accelerate/"
CODE_FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")
# What a command writes: skipped here, and an error where it is committed.
GENERATED_FOLDERS = frozenset({"site", "build", "dist", "demo-output", "tmp", "__pycache__", "htmlcov"})
TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ".json", ".sh", ".svg", ""})

MAX_LINES = 600
# The whole public class on one page, each method a line or a few.
LONGER_FILES = {"src/accelerate/accelerator.py": 900}
MAX_BRANCHES = 3
VENDORS = ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron", "mps")

# A file, or a folder with a trailing slash, that a rule does not bind; all relative to the package.
ENVIRONMENT_ROOMS = ("config/env.py", "runtime/rank_sources.py")
VENDOR_ROOMS = ("devices/", "_base/enums.py")
DISTRIBUTED_TYPE_ROOMS = ("strategies/registry.py",)
# The public load(), which defaults to weights_only=True and lets its caller choose.
TORCH_LOAD_ROOMS = ("checkpointing/torch_files.py",)
TORCH_FREE_ROOMS = ("__init__.py", "_base/", "config/")
STATE_ROOMS = ("runtime/current.py",)
# Module-level names that change after import, outside STATE_ROOMS: name -> why it stands where it stands.
# A registry (any file of the name registry.py) is filled by its register function and needs no line here.
KEPT_STATE = {
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS": "a public registry, whose name and place other libraries use",
    "_shown_warnings": "which warnings were given; _base stands below runtime",
}
# Of list, dict, set, deque, OrderedDict and ContextVar.
MUTATING_METHODS = frozenset(
    {"add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "move_to_end", "pop"}
    | {"popitem", "popleft", "remove", "reverse", "set", "setdefault", "sort", "update"}
)

_VENDOR_LITERAL = re.compile(rf"(?:{'|'.join(VENDORS)})(?::\d+)?")
# Written so that the pattern does not match its own source.
_MACHINE_PATH = re.compile(r"(?<![\w.:/}$*-])/(?:work|root|home|Users|opt/pypi[\w-]*|tmp/v)/")


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule at one place."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.message}"


@dataclass(frozen=True)
class Module:
    """A parsed Python file and its place in the repository."""

    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str | None:
        """Path inside the package, or None for a file outside it."""
        return self.path.removeprefix(PACKAGE) if self.path.startswith(PACKAGE) else None

    def is_outside(self, rooms: tuple[str, ...]) -> bool:
        """Whether this is a file of the package that none of the rooms holds."""
        return self.room is not None and not _is_in(self.room, rooms)

    def finding(self, node: ast.AST, rule: str, message: str) -> Finding:
        """Place a finding at a node of this module."""
        return Finding(self.path, getattr(node, "lineno", 1), rule, message)


Rule = Callable[[Module], Iterable[Finding]]


def _is_in(room: str, rooms: tuple[str, ...]) -> bool:
    return any(room.startswith(entry) if entry.endswith("/") else room == entry for entry in rooms)


def check_environment(module: Module) -> Iterator[Finding]:
    """Report every touch of the process environment outside its two rooms."""
    if not module.is_outside(ENVIRONMENT_ROOMS):
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    message = "the environment is read and written in config/env.py and runtime/rank_sources.py alone; call config.env"
    for node in ast.walk(module.tree):
        touches = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr in names
        )
        imports = isinstance(node, ast.ImportFrom) and node.module == "os" and any(a.name in names for a in node.names)
        if touches or imports:
            yield module.finding(node, "environment", message)


def check_vendors(module: Module) -> Iterator[Finding]:
    """Report vendor names (a literal such as a device type, or a `torch.<vendor>` module) outside devices/."""
    if not module.is_outside(VENDOR_ROOMS):
        return
    for node in ast.walk(module.tree):
        name: str | None = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VENDOR_LITERAL.fullmatch(node.value):
            name = repr(node.value)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in VENDORS
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            name = f"torch.{node.attr}"
        if name is not None:
            yield module.finding(node, "vendor", f"{name} names a vendor; ask the DeviceBackend (devices/) instead")


def check_distributed_type(module: Module) -> Iterator[Finding]:
    """Report comparisons with DistributedType outside the strategy registry."""
    if not module.is_outside(DISTRIBUTED_TYPE_ROOMS):
        return
    message = "DistributedType is compared in strategies/registry.py alone; ask a capability of the strategy"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Compare):
            compared: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        else:
            continue
        if any(_is_member_of_distributed_type(child) for operand in compared for child in ast.walk(operand)):
            yield module.finding(node, "distributed-type", message)


def _is_member_of_distributed_type(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    owner = node.value
    return (isinstance(owner, ast.Name) and owner.id == "DistributedType") or (
        isinstance(owner, ast.Attribute) and owner.attr == "DistributedType"
    )


def check_torch_free(module: Module) -> Iterator[Finding]:
    """Report imports of torch that run when a torch-free module is imported."""
    if module.room is None or not _is_in(module.room, TORCH_FREE_ROOMS):
        return
    message = "this module must not import torch when it is imported; import it inside the function that needs it"
    for node in _executed_at_import(module.tree.body):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        if any(name.split(".")[0] == "torch" for name in names):
            yield module.finding(node, "torch-free", message)


def _executed_at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk the statements that run at import: not function bodies, not `if TYPE_CHECKING` branches."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def check_length(module: Module) -> Iterator[Finding]:
    """Report files that are too long."""
    lines, limit = module.text.count("\n"), LONGER_FILES.get(module.path, MAX_LINES)
    if lines > limit:
        yield Finding(module.path, lines, "length", f"{lines} lines, at most {limit}; split it by responsibility")


def check_torch_load(module: Module) -> Iterator[Finding]:
    """Report `torch.load` calls that may unpickle code."""
    if module.room is not None and _is_in(module.room, TORCH_LOAD_ROOMS):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names):
            yield module.finding(node, "torch-load", "write torch.load in full, so that this check sees the call")
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"):
            continue
        safe = any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
        if not safe:
            yield module.finding(node, "torch-load", "torch.load may run code from the file; pass weights_only=True")


def check_branches(module: Module) -> Iterator[Finding]:
    """Report long if/elif chains in the package."""
    if module.room is None:
        return
    continuations: set[int] = set()
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.If) or id(node) in continuations:
            continue
        branches, link = 1, node
        while len(link.orelse) == 1 and isinstance(link.orelse[0], ast.If):
            link = link.orelse[0]
            continuations.add(id(link))
            branches += 1
        if branches > MAX_BRANCHES:
            message = f"a chain of {branches} conditions, at most {MAX_BRANCHES}; use a table, a registry or match"
            yield module.finding(node, "branches", message)


def check_state(module: Module) -> Iterator[Finding]:
    """Report module-level names that functions rebind or mutate outside runtime/current.py.

    A name counts when the module binds it to a value or a class at its top level, and a function of the same module
    rebinds it (`global`), assigns to or deletes an item or an attribute of it, calls a mutating method on it, or takes
    `next` of it. A function's own name hides it. A registry is filled by design, and a `functools.cache` is a memo of a
    pure function: neither is reported.
    """
    if not module.is_outside(STATE_ROOMS) or Path(module.path).name == "registry.py":
        return
    names = _bound_at_top(module.tree) - KEPT_STATE.keys()
    message = "{} changes after import; mutable state lives in runtime/current.py, so that one reset finds all of it"
    functions = (n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))
    found: set[Finding] = set()
    for function in functions:
        nodes = list(ast.walk(function))
        hidden = {node.arg for node in nodes if isinstance(node, ast.arg)}
        hidden |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        hidden -= {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        for node in nodes:
            for name in _changed_names(node) & names - hidden:
                found.add(module.finding(node, "state", message.format(name)))
    yield from found


def _bound_at_top(tree: ast.Module) -> set[str]:
    """Return the names that a module binds to values and classes at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {child.id for target in node.targets for child in ast.walk(target) if isinstance(child, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _changed_names(node: ast.AST) -> set[str]:
    """Return the names whose values one statement or call changes, the names that it rebinds by `global` among them."""
    match node:
        case ast.Global():
            return set(node.names)
        case ast.Assign() | ast.Delete():
            changed: list[ast.expr] = list(node.targets)
        case ast.AugAssign() | ast.AnnAssign():
            changed = [node.target]
        case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in MUTATING_METHODS:
            return {_owner(owner)}
        case ast.Call(func=ast.Name(id="next"), args=[counter, *_]):
            return {_owner(counter)}
        case _:
            return set()
    return {_owner(target) for target in changed if isinstance(target, ast.Subscript | ast.Attribute)}


def _owner(node: ast.expr) -> str:
    """Return the name that an expression such as `name.a[0].b` starts from, or nothing."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


RULES: tuple[Rule, ...] = (
    check_environment,
    check_vendors,
    check_distributed_type,
    check_torch_free,
    check_length,
    check_torch_load,
    check_branches,
    check_state,
)


def check_class_names(modules: Iterable[Module]) -> Iterator[Finding]:
    """Report every class of the package whose name another class has, private ones too."""
    places: dict[str, list[Finding]] = {}
    for module in modules:
        for node in ast.walk(module.tree):
            if module.room is not None and isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module.finding(node, "class-name", ""))
    for name, found in places.items():
        for place in found if len(found) > 1 else ():
            others = ", ".join(f"{other.path}:{other.line}" for other in found if other is not place)
            message = f"the class {name} stands in {others} too; give each a name of its own"
            yield Finding(place.path, place.line, place.rule, message)


def check_committed(root: Path) -> Iterator[Finding]:
    """Report files under version control in folders that commands write."""
    listing = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, text=True, check=False)
    for path in filter(None, listing.stdout.split("\0")):
        generated = GENERATED_FOLDERS & set(path.split("/")[:-1])
        if generated:
            yield Finding(path, 1, "generated", f"{min(generated)}/ is written by a command; ignore it and remove it")


def check_text(path: str, text: str) -> Iterator[Finding]:
    """Report paths of somebody's machine in any text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _MACHINE_PATH.search(line)
        if match:
            yield Finding(
                path, number, "machine-path", f"{match.group()!r} is a path of one machine; write a relative one"
            )


def check_module(path: str, text: str) -> list[Finding]:
    """Run every rule over one Python file.

    Args:
        path: Place in the repository, with forward slashes; the rules depend on it.
    """
    module = parse_module(path, text)
    if isinstance(module, Finding):
        return [module]
    return sorted(finding for rule in RULES for finding in rule(module))


def parse_module(path: str, text: str) -> Module | Finding:
    """Return a Python file with its syntax tree, or what is wrong with its syntax."""
    try:
        return Module(path, text, ast.parse(text, filename=path))
    except SyntaxError as error:
        return Finding(path, error.lineno or 1, "syntax", error.msg)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        hidden = path.name.startswith(".") and path.name not in {".ci", ".pre-commit-config.yaml", ".gitignore"}
        if hidden or path.name in GENERATED_FOLDERS:
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield path


def check_repository(root: Path) -> list[Finding]:
    """Run every rule over every file below a folder."""
    findings: list[Finding] = [*check_committed(root)]
    modules: list[Module] = []
    for path in _files(root):
        place = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        findings.extend(check_text(place, text))
        if path.suffix == ".py" and place.split("/")[0] in CODE_FOLDERS:
            module = parse_module(place, text)
            if isinstance(module, Finding):
                findings.append(module)
                continue
            modules.append(module)
            findings.extend(finding for rule in RULES for finding in rule(module))
    findings.extend(check_class_names(modules))
    return sorted(findings)


def main(arguments: list[str]) -> int:
    """Print what is wrong and return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    findings = check_repository(root)
    for finding in findings:
        print(finding)
    print(f"check_rooms: {len(findings)} finding{'' if len(findings) == 1 else 's'}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
