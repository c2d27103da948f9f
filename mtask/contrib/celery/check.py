"""Finds what a program for Celery uses and the bridge does not map: `python -m mtask.contrib.celery.check src/`.

It reads the source and imports nothing. Each line of its output is `file:line: what: what to write instead`. The exit
code is 0 if everything maps, 1 if something does not, 2 if a path does not exist. It cannot see options that are made
at run time: `apply_async(**options)`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtask.contrib.celery import words
from mtask.contrib.celery.config import is_mongodb, scheme_of

_BRIDGE = "mtask.contrib.celery"
#: What the modules of `celery` export, as far as the bridge has it.
_EXPORTS: Mapping[str, frozenset[str]] = {
    "": frozenset({
        "Celery", "Signature", "Task", "chain", "chord", "current_app", "group", "shared_task", "signature",
    }),
    "app": frozenset({"shared_task"}),
    "app.task": frozenset({"Task"}),
    "canvas": frozenset({"Signature", "chain", "chord", "group", "signature"}),
    "exceptions": frozenset({
        "CeleryError", "MaxRetriesExceededError", "Retry", "TaskError", "TaskRevokedError", "TimeoutError",
    }),
    "result": frozenset({"AsyncResult", "EagerResult", "GroupResult"}),
    "schedules": frozenset({"crontab", "schedule"}),
    "utils.log": frozenset({"get_logger", "get_task_logger"}),
}  # fmt: skip
#: Attributes that no other object has by accident, and what to write instead.
_ATTRIBUTES = {
    name: instead
    for table in (words.OF_TASK, words.OF_SIGNATURE, words.OF_RESULT)
    for name, instead in table.items()
    if name in {
        "add_to_chord", "apply_async_on_commit", "delay_on_commit", "link_error", "on_error", "starmap", "update_state",
        "iter_native", "join_native", "iterdeps",
    }
}  # fmt: skip
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
_CALLS = frozenset({"apply_async", "send_task"})
_SIGNATURES = frozenset({"s", "si", "signature", "subtask"})


class Finding(NamedTuple):
    """A use that does not map."""

    path: Path
    line: int
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.instead}"


class Checked(NamedTuple):
    """What was found in some files."""

    findings: list[Finding]
    task_cnt: int
    call_cnt: int


def check(paths: Iterable[Path]) -> Checked:
    """Check all Python files below these paths."""
    findings: list[Finding] = []
    task_cnt = call_cnt = 0
    for path in _files(paths):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            findings.append(Finding(path, line, "this file cannot be read", str(error)))
            continue
        reader = _Reader(path)
        reader.visit(tree)
        findings += sorted(set(reader.findings), key=lambda found: (found.line, found.what))
        task_cnt, call_cnt = task_cnt + reader.task_cnt, call_cnt + reader.call_cnt
    return Checked(findings, task_cnt, call_cnt)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_file():
            yield path
            continue
        for found in sorted(path.rglob("*.py")):
            inner = found.relative_to(path).parts
            if not any(part in _SKIPPED or part.startswith(".") for part in inner):
                yield found


class _Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[Finding] = []
        self.task_cnt = self.call_cnt = 0
        #: The names under which the file knows `celery.Task`, `celery.signals` and other modules of Celery.
        self._classes = {"celery.Task", "app.Task"}
        self._signals: set[str] = set()
        self._modules: set[str] = set()
        self._is_of_celery = False

    def _find(self, node: ast.AST, what: str, instead: str) -> None:
        self.findings.append(Finding(self.path, getattr(node, "lineno", 1), what, instead))

    # --- imports ----------------------------------------------------------------------------------------------

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = _as_celery(alias.name)
            if module is None:
                self._foreign(node, alias.name)
                continue
            self._is_of_celery = True
            self._modules.add(alias.asname or alias.name.partition(".")[0])
            self._module(node, module)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = _as_celery(node.module or "") if not node.level else None
        if module is None:
            if not node.level:
                self._foreign(node, node.module or "")
            return
        self._is_of_celery = True
        if module == "celery.signals":
            for alias in node.names:
                self._find(node, f"the signal {alias.name}", words.SIGNALS.get(alias.name, words.SIGNAL))
            return
        if self._module(node, module):
            return
        for alias in node.names:
            self._imported(node, module, alias)

    def _imported(self, node: ast.ImportFrom, module: str, alias: ast.alias) -> None:
        name, inner = alias.name, module.removeprefix("celery").lstrip(".")
        own = f"{inner}.{name}".lstrip(".")
        if name == "signals":
            self._signals.add(alias.asname or name)
        elif own in _EXPORTS or name in _EXPORTS.get(inner, ()):
            if name == "Task":
                self._classes.add(alias.asname or name)
        else:
            instead = words.NAMES.get(name) or words.MODULES.get(f"{module}.{name}")
            self._find(node, f"{module}.{name}", instead or "the bridge has nothing of this name")

    def _module(self, node: ast.AST, module: str) -> bool:
        """Tell of a module that the bridge has not; return whether it is one."""
        for name, instead in words.MODULES.items():
            if module == name or module.startswith(f"{name}."):
                self._find(node, f"the module {module}", instead)
                return True
        return False

    def _foreign(self, node: ast.AST, module: str) -> None:
        if module.partition(".")[0] in words.MODULES:
            self._find(node, f"the module {module}", words.MODULES[module.partition(".")[0]])

    # --- declarations -----------------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if ast.unparse(base) in self._classes:
                self._find(node, f"the class {node.name} of tasks", words.REFUSED_TASK_OPTIONS["base"])
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)
        self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        if self._function(node):
            self._find(node, f"the async task {node.name}", words.ASYNC)
        self.generic_visit(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        is_task = False
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            text = ast.unparse(called)
            if text.startswith(tuple(f"{name}." for name in self._signals)) and ".connect" in text:
                signal = text.split(".")[1]
                self._find(decorator, f"the signal {signal}", words.SIGNALS.get(signal, words.SIGNAL))
            if not self._makes_task(called, text):
                continue
            is_task = True
            self.task_cnt += 1
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                self._task_option(keyword, node.name)
        if is_task:
            own = node.args.vararg or next(iter(node.args.posonlyargs), None)
            if own is not None:
                self._find(node, f"the parameter {own.arg!r} of task {node.name}", words.POSITIONAL)
        return is_task

    def _makes_task(self, called: ast.expr, text: str) -> bool:
        if text in ("shared_task", "celery.shared_task"):
            return True
        return isinstance(called, ast.Attribute) and called.attr == "task" and "mtask" not in text

    def _task_option(self, keyword: ast.keyword, name: str) -> None:
        option = keyword.arg
        if option is None or option in words.TASK_OPTIONS:
            return
        if option in words.IDLE_TASK_OPTIONS:
            if option == "serializer":
                self._serializer(keyword.value)
            return
        instead = words.REFUSED_TASK_OPTIONS.get(option, words.REFUSED_CALL_OPTIONS.get(option))
        if instead is not None:
            self._find(keyword.value, f"the option {option!r} of task {name}", instead)

    # --- calls ------------------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute):
            self._method(node, function)
        elif isinstance(function, ast.Name):
            if function.id == "Celery":
                self._app(node)
            elif function.id == "crontab":
                self._keywords(node, {"nowfunc": "the setting `timezone` is that of all crontabs"}, "crontab")
        self.generic_visit(node)

    def _method(self, node: ast.Call, function: ast.Attribute) -> None:
        name, receiver = function.attr, function.value
        if name == "Celery":
            self._app(node)
        elif name == "delay" or name in _CALLS:
            self.call_cnt += 1
            if name in _CALLS:
                self._keywords(node, words.REFUSED_CALL_OPTIONS, name)
                self._serializer(next((each.value for each in node.keywords if each.arg == "serializer"), None))
        elif name == "set" and _is_signature(receiver):
            self._keywords(node, words.REFUSED_CALL_OPTIONS, "set")
        elif name == "link" and _is_signature(receiver):
            self._find(node, "link", words.OF_SIGNATURE["link"])
        elif name == "retry" and isinstance(receiver, ast.Name) and receiver.id == "self":
            unknown = [each.arg for each in node.keywords if each.arg and each.arg not in words.RETRY_ARGUMENTS]
            for option in unknown:
                self._find(node, f"retry({option}=...)", "a task that is tried again stays in its queue")
        elif name == "replace" and isinstance(receiver, ast.Name) and any(map(_is_signature, node.args)):
            self._find(node, "replace", words.OF_TASK["replace"])
        elif isinstance(receiver, ast.Attribute) and receiver.attr == "control" and name in words.OF_CONTROL:
            self._find(node, f"control.{name}", words.OF_CONTROL[name])
        elif ast.unparse(receiver).endswith("conf") and name == "update":
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._setting(keyword.value, keyword.arg, keyword.value)
            for given in node.args:
                self._settings(given)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _ATTRIBUTES:
            self._find(node, node.attr, _ATTRIBUTES[node.attr])
        elif ast.unparse(node.value).endswith(".request") and node.attr in words.OF_REQUEST:
            if ast.unparse(node.value) == "self.request" and self._is_of_celery:
                self._find(node, f"self.request.{node.attr}", words.OF_REQUEST[node.attr])
        elif isinstance(node.value, ast.Name) and node.value.id in self._modules and node.attr in words.NAMES:
            self._find(node, f"{node.value.id}.{node.attr}", words.NAMES[node.attr])
        self.generic_visit(node)

    def _keywords(self, node: ast.Call, refused: Mapping[str, str], called: str) -> None:
        for keyword in node.keywords:
            is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
            if keyword.arg is not None and keyword.arg in refused and not is_none:
                self._find(keyword.value, f"the option {keyword.arg!r} of {called}", refused[keyword.arg])

    def _serializer(self, value: ast.expr | None) -> None:
        if isinstance(value, ast.Constant) and value.value not in (None, "json"):
            self._find(value, f"the serializer {value.value!r}", words.SERIALIZER)

    # --- settings ---------------------------------------------------------------------------------------------

    def _app(self, node: ast.Call) -> None:
        named = {"broker": "broker_url", "backend": "result_backend"}
        for keyword in node.keywords:
            option = keyword.arg
            if option in ("task_cls", "loader", "log", "control", "events", "amqp", "fixups", "strict_typing"):
                self._find(keyword.value, f"Celery({option}=...)", words.UNKNOWN_SETTING)
            elif option is not None and option in {*named, *words.REFUSED_SETTINGS, *words.SETTINGS}:
                self._setting(keyword.value, named.get(option, option), keyword.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value).endswith("conf"):
                self._setting(node, target.attr, node.value)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith(".conf"):
                if isinstance(target.slice, ast.Constant):
                    self._setting(node, str(target.slice.value), node.value)
            elif isinstance(target, ast.Name) and target.id.startswith("CELERY_"):
                self._setting(node, target.id.removeprefix("CELERY_").lower(), node.value)
            elif isinstance(target, ast.Name) and target.id.startswith("CELERY"):
                self._find(node, f"the setting {target.id!r}", words.OLD_SETTING)
        self.generic_visit(node)

    def _settings(self, given: ast.expr) -> None:
        if not isinstance(given, ast.Dict):
            return
        for key, value in zip(given.keys, given.values, strict=True):
            if isinstance(key, ast.Constant):
                self._setting(value, str(key.value), value)

    def _setting(self, node: ast.AST, name: str, value: ast.expr) -> None:
        literal = value.value if isinstance(value, ast.Constant) else None
        if name in words.REFUSED_SETTINGS:
            self._find(node, f"the setting {name!r}", words.REFUSED_SETTINGS[name])
        elif name == "broker_url" and isinstance(literal, str) and not is_mongodb(literal):
            self._find(node, f"the broker {scheme_of(literal)!r}", words.BROKER)
        elif name == "result_backend" and isinstance(literal, str) and not is_mongodb(literal):
            self._find(node, f"the result backend {scheme_of(literal)!r}", words.RESULTS)
        elif name in ("task_serializer", "result_serializer"):
            self._serializer(value)
        elif name not in words.SETTINGS | words.IDLE_SETTINGS and isinstance(node, ast.Assign):
            self._find(node, f"the setting {name!r}", words.UNKNOWN_SETTING)


def _as_celery(module: str) -> str | None:
    """Return the module of Celery that a module is, or stands for. None: it is another one."""
    for name in (_BRIDGE, "celery"):
        if module == name or module.startswith(f"{name}."):
            return "celery" + module.removeprefix(name)
    return None


def _is_signature(node: ast.expr) -> bool:
    """Whether an expression looks like a signature: `task.s(...)`, or canvases of some."""
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute):
            return function.attr in _SIGNATURES or (function.attr in ("set", "clone") and _is_signature(function.value))
        return isinstance(function, ast.Name) and function.id in ("signature", "chain", "group", "chord")
    return isinstance(node, ast.BinOp) and (_is_signature(node.left) or _is_signature(node.right))


def main(arguments: Sequence[str]) -> int:
    """Print what does not map below these paths; return the exit code."""
    paths = [Path(argument) for argument in arguments]
    missing = [path for path in paths if not path.exists()]
    if missing or not paths:
        said = f"there is no {missing[0]}" if missing else "name files or folders"
        sys.stderr.write(f"{said}: python -m mtask.contrib.celery.check src/\n")
        return 2
    checked = check(paths)
    for finding in checked.findings:
        sys.stdout.write(f"{finding}\n")
    count = len(checked.findings)
    said = f"{checked.task_cnt} tasks and {checked.call_cnt} calls were seen"
    told = "everything maps" if not count else f"{count} use{'s' * (count > 1)} do{'es' * (count == 1)} not map"
    sys.stderr.write(f"{said}; {told}\n")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
