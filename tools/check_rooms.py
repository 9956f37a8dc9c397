"""Check the repository's room rules, which say what may stand in which file, by reading syntax trees."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "src/accelerate/"
CODE_FOLDERS = ("src", "tests", "tools", "examples", "benchmarks")
SKIPPED_FOLDERS = frozenset({"site", "build", "dist", "demo-output", "__pycache__"})
TEXT_SUFFIXES = frozenset({".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ".json", ".sh", ".svg", ""})

MAX_LINES = 600
MAX_BRANCHES = 3
VENDORS = ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu", "neuron", "mps")

# A file, or a folder with a trailing slash, that a rule does not bind; all relative to the package.
ENVIRONMENT_ROOMS = ("config/env.py", "runtime/rank_sources.py")
VENDOR_ROOMS = ("devices/", "_base/enums.py", "_base/imports.py", "utils/imports.py")
DISTRIBUTED_TYPE_ROOMS = ("strategies/registry.py",)
# The public load(), which defaults to weights_only=True and lets its caller choose.
TORCH_LOAD_ROOMS = ("checkpointing/files.py",)
TORCH_FREE_ROOMS = ("__init__.py", "_base/", "config/")

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
    lines = module.text.count("\n")
    if lines > MAX_LINES:
        yield Finding(module.path, lines, "length", f"{lines} lines, at most {MAX_LINES}; split it by responsibility")


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


RULES: tuple[Rule, ...] = (
    check_environment,
    check_vendors,
    check_distributed_type,
    check_torch_free,
    check_length,
    check_torch_load,
    check_branches,
)


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
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        return [Finding(path, error.lineno or 1, "syntax", error.msg)]
    module = Module(path, text, tree)
    return sorted(finding for rule in RULES for finding in rule(module))


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.iterdir()):
        hidden = path.name.startswith(".") and path.name not in {".ci", ".pre-commit-config.yaml", ".gitignore"}
        if hidden or path.name in SKIPPED_FOLDERS:
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in TEXT_SUFFIXES:
            yield path


def check_repository(root: Path) -> list[Finding]:
    """Run every rule over every file below a folder."""
    findings: list[Finding] = []
    for path in _files(root):
        place = path.relative_to(root).as_posix()
        text = path.read_text(encoding="utf-8")
        findings.extend(check_text(place, text))
        if path.suffix == ".py" and place.split("/")[0] in CODE_FOLDERS:
            findings.extend(check_module(place, text))
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
