"""Writes functions of notebooks and scripts to files that other processes import, with the source of what they use."""

import ast
import builtins
import dis
import inspect
import linecache
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlhf_triton.errors import FunctionError

SESSIONS = ("__main__", "__mp_main__")  # a script or a notebook; importing it again would run it again
FUTURE = "from __future__ import annotations\n"  # so that annotations need none of the names that they use
REMEDY = "; put it into a file, and give its name as 'file.py:name'"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def function_spec(function: Callable[..., Any], folder: Path, files: dict[Path, str]) -> str:
    """Return the `file.py:name` by which another process imports a function or a class.

    A function of a module outside packages is imported from the module's file. For any other function a file in
    `folder` is added to `files`, {path: text}. It imports a function of a package; of a function that a script, a
    notebook or another function defines it has the source, with the imports, constants and functions that this uses.

    Raises FunctionError for a lambda, a closure, a method or another object, and for one that uses a value without
    source code.
    """
    name = str(getattr(function, "__name__", type(function).__name__))
    module = _module_of(function)
    is_package = hasattr(module, "__path__")
    if module is not None and hasattr(module, "__file__") and not is_package and "." not in module.__name__:
        return f"{Path(str(module.__file__)).absolute()}:{name}"
    path = folder / f"{name.strip('<>')}_function.py"  # a module called as the function could hide one of Python's
    text = _Source(name, function).text
    while files.get(path, text) != text:  # another function of this name
        path = path.with_name(f"_{path.name}")
    files[path] = text
    return f"{path}:{name}"


def _module_of(value: Any) -> ModuleType | None:
    """Return the module from which other processes can import a function or a class by its name."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if (
        module is None
        or module.__name__ in SESSIONS
        or getattr(module, getattr(value, "__name__", ""), None) is not value
    ):
        return None
    return module if getattr(module, "__file__", None) or module.__name__ in sys.builtin_module_names else None


class _Source:
    """The source of a function and of everything in its module that it uses, ordered so that it can be executed."""

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._paths: set[str] = set()  # folders of modules that are not installed
        self._imports: set[str] = set()
        self._definitions: dict[str, str] = {}
        self._add(name, function, frozenset())

    @property
    def text(self) -> str:
        """The file's text."""
        lines = [f'"""`{self._name}` as it was when the run was started; written by rlhf_triton."""\n', FUTURE]
        if self._paths:
            lines += ["import sys\n", f"sys.path += {sorted(self._paths)!r}"]
        return (
            "\n".join([*lines, *sorted(self._imports), "", "\n\n\n".join(self._definitions.values())]).rstrip() + "\n"
        )

    def _add(self, name: str, value: Any, attributes: frozenset[str]) -> None:
        """Add a definition or import of `name`; `attributes`: of a module, the names that the code uses."""
        if name in self._definitions:
            return
        if isinstance(value, ModuleType):
            alias = "" if name == value.__name__ else f" as {name}"
            self._import(value, f"import {value.__name__}{alias}")
            for inner in attributes:
                if isinstance(module := sys.modules.get(f"{value.__name__}.{inner}"), ModuleType):
                    self._import(module, f"import {module.__name__}")
        elif isinstance(value, re.Pattern):
            self._imports.add("import re")
            self._definitions[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})"
        elif (text := _literal(value)) is not None:
            self._definitions[name] = f"{name} = {text}"
        elif hasattr(value, "__name__") and (module := _module_of(value)) is not None:
            self._import(module, f"from {module.__name__} import {value.__name__} as {name}")
        else:
            self._define(name, value)

    def _import(self, module: ModuleType, line: str) -> None:
        self._imports.add(line)
        file = getattr(module, "__file__", None)
        if file is not None:
            depth = module.__name__.count(".") + hasattr(module, "__path__")
            root = str(Path(file).absolute().parents[depth])
            if root not in INSTALLED and not root.endswith("lib-dynload"):
                self._paths.add(root)

    def _define(self, name: str, value: Any) -> None:
        wrappers = list[Any]()
        inner = inspect.unwrap(value, stop=wrappers.append) if callable(value) else value
        self._check(name, inner)
        try:
            source = textwrap.dedent(_source_of(inner))
            definition = _definition(source)
            self._check_wrappers(name, inner, wrappers, definition)
            values = [*_evaluated(definition, inner)]
            source = _with_literals(source, values)
            code = compile(FUTURE + source, name, "exec")
        except (OSError, TypeError, SyntaxError) as error:
            raise FunctionError(f"{self._name}: the source of {name} cannot be read{REMEDY}") from error
        self._definitions[name] = ""  # in progress: it may use itself
        if isinstance(inner, FunctionType):
            others = ((node, value) for node, value in values if _literal(value) is None)
            namespace = inner.__globals__ | {node.id: value for node, value in others if isinstance(node, ast.Name)}
        else:
            namespace = next((method.__globals__ for method in _methods(inner)), vars(sys.modules[inner.__module__]))
        used, stored, attributes = _names_in(code)
        self._check(name, inner, used)
        for used_name in sorted(used):
            if used_name in namespace:
                self._add(used_name, namespace[used_name], attributes)
            elif used_name not in stored and not hasattr(builtins, used_name):
                raise FunctionError(f"{self._name} uses {used_name!r}, which its module does not define{REMEDY}")
        del self._definitions[name]
        alias = f"\n{name} = {inner.__name__}" if name != inner.__name__ else ""
        self._definitions[name] = f"{source.rstrip()}{alias}"
        if alias and inner.__name__ in self._definitions:  # which is another function by now
            self._definitions[inner.__name__] = self._definitions.pop(inner.__name__)

    def _check_wrappers(self, name: str, inner: Any, wrappers: Sequence[Any], definition: Definition) -> None:
        """Raise FunctionError unless the source has the wrappers: `reward = clipped(reward)` is no part of it."""
        is_unwrapped = getattr(inner, "__globals__", {}).get(inner.__name__) is inner
        if len(wrappers) > len(definition.decorator_list) or (wrappers and is_unwrapped):
            subject = self._name if name == self._name else f"{self._name} uses {name!r}, which"
            raise FunctionError(
                f"{subject} is wrapped by a call, which its source does not have; write the wrapper as a decorator "
                f"(@), or as a function that calls {inner.__name__}"
            )

    def _check(self, name: str, inner: Any, used: Collection[str] = ()) -> None:
        """Raise FunctionError unless `inner` is a function or a class that uses no names of a function around it."""
        remedy = REMEDY
        if inspect.ismethod(inner):
            why = f"is a method of a {type(inner.__self__).__name__}, whose state the processes of a run cannot receive"
        elif not isinstance(inner, (FunctionType, type)):
            why = f"is a {type(inner).__name__}, which cannot be written into the run's folder"
        elif inner.__name__ == "<lambda>":
            why = "is a lambda, which has no name"
            remedy = "; write it as a function"
        elif free := sorted(_free_names(inner).intersection(used)):
            why = f"uses {free[0]!r} of the function around it, which the processes of a run cannot receive"
            remedy = "; make it an argument with a default"
        else:
            return
        subject = self._name if name == self._name else f"{self._name} uses {name!r}, which"
        raise FunctionError(f"{subject} {why}{remedy}")


def _methods(inner: Any) -> list[FunctionType]:
    """Return the functions that the source of a class defines; [] for a function."""
    members = vars(inner).values() if isinstance(inner, type) else ()
    methods = [member for member in members if isinstance(member, FunctionType)]
    own = [method for method in methods if method.__globals__.get("__name__") == inner.__module__]
    return [method for method in own if linecache.getlines(method.__code__.co_filename)]


def _source_of(inner: Any) -> str:
    """Return the source of a function or a class. Raises OSError, TypeError or SyntaxError if it cannot be read."""
    if hasattr(sys.modules.get(inner.__module__), "__file__") or not (methods := _methods(inner)):
        return inspect.getsource(inner)
    code = methods[0].__code__  # `inspect` finds only functions in a notebook's cell
    lines = linecache.getlines(code.co_filename)
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.ClassDef) and node.name == inner.__name__:
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if start <= code.co_firstlineno <= (node.end_lineno or 0):
                return "".join(lines[start - 1 : node.end_lineno])
    raise OSError(f"{code.co_filename} does not define {inner.__name__}")


def _definition(source: str) -> Definition:
    """Return the definition that is the source of a function or class. Raises OSError, SyntaxError."""
    for node in ast.parse(source).body:
        if isinstance(node, Definition):
            return node
    raise OSError("no definition")


def _evaluated(definition: Definition, inner: Any) -> Iterator[tuple[ast.expr, Any]]:
    """Yield each default of a function, or of the methods of a class, and each attribute of a class, with its value.

    The names in these expressions may mean something else by now, and an attribute may have been set since.
    """
    if isinstance(inner, FunctionType) and not isinstance(definition, ast.ClassDef):
        arguments = definition.args
        yield from zip(arguments.defaults, inner.__defaults__ or (), strict=False)
        by_name = inner.__kwdefaults__ or {}
        for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if node is not None and argument.arg in by_name:
                yield node, by_name[argument.arg]
    for part in definition.body if isinstance(definition, ast.ClassDef) else ():
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _evaluated(part, inspect.unwrap(vars(inner).get(name, part)))
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as node)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as node)
            ) if name in vars(inner) and not isinstance(node, ast.Call):  # such as a data class's `field(…)`
                yield node, vars(inner)[name]


def _with_literals(source: str, values: Iterable[tuple[ast.expr, Any]]) -> str:
    """Return the source with the values that have a literal in the place of their expressions."""
    text = source.encode()
    starts = [0, *(i + 1 for i, byte in enumerate(text) if byte == ord("\n"))]  # positions are in bytes of UTF-8
    for node, value in sorted(values, key=lambda pair: (pair[0].lineno, pair[0].col_offset), reverse=True):
        if (literal := _literal(value)) is not None:
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            text = text[:begin] + literal.encode() + text[end:]
    return text.decode()


def _free_names(inner: Any) -> set[str]:
    functions = [inner] if isinstance(inner, FunctionType) else vars(inner).values()
    names = {
        name for function in functions if isinstance(function, FunctionType) for name in function.__code__.co_freevars
    }
    return names - {"__class__"}  # `super()` refers to it


def _literal(value: Any) -> str | None:
    """Return a value of plain types as Python's source; None for any other."""
    if isinstance(value, (bool, int, float, complex, str, bytes, list, tuple, dict, set, type(None))):
        try:
            return repr(value) if ast.literal_eval(repr(value)) == value else None
        except (ValueError, SyntaxError, RecursionError):
            pass
    return None


def _names_in(code: CodeType) -> tuple[set[str], set[str], frozenset[str]]:
    """Return the global names that the code reads, the names that it stores, and all attributes that it uses."""
    used = set[str]()
    stored = set[str]()
    attributes = set[str]()
    pending = [code]
    for block in pending:
        pending += [inner for inner in block.co_consts if isinstance(inner, CodeType)]
        attributes |= {*block.co_names}
        for step in dis.get_instructions(block):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used.add(str(step.argval))
            elif step.opname in ("STORE_GLOBAL", "STORE_NAME"):
                stored.add(str(step.argval))
    return {name for name in used if not re.fullmatch("__.*__", name)}, stored, frozenset(attributes)
