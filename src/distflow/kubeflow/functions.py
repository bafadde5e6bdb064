"""Turn a Python function into a script: its source, and a call with its arguments.

As with Kubeflow, only the source of the function itself is sent to the nodes. Everything else that it uses must be imported in
the function, defined in it, or passed as an argument. ``function_script`` checks the names in the source.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import symtable
from collections.abc import Callable, Mapping
from typing import Any

from distflow.documents.text import listed

__all__ = ["function_script"]

_MODULE_ATTRIBUTES = {
    "__annotations__",
    "__builtins__",
    "__doc__",
    "__file__",
    "__loader__",
    "__name__",
    "__package__",
    "__spec__",
}
_LAZY_ANNOTATIONS = "from __future__ import annotations\n\n"
_DEFINED_EVERYWHERE = {*dir(builtins), *_MODULE_ATTRIBUTES}


def function_script(function: object, arguments: Mapping[str, Any] | None) -> str:
    """Return a script that defines a function and calls it with keyword arguments.

    Raises ``ValueError`` if the function is not a plain ``def``, has no source, or uses names that are defined outside of it.
    Also raises ``ValueError`` if the function does not take the arguments, or if an argument cannot be written as Python code.
    """
    inner = inspect.unwrap(function) if callable(function) else function
    if not inspect.isfunction(inner):
        raise ValueError(f"`{function!r}` is not a function defined with `def`: define one, and pass it as `func`")
    name = inner.__name__
    if name == "<lambda>":
        raise ValueError("a lambda cannot be sent to the nodes: define a function with `def`, and pass it as `func`")
    if inspect.iscoroutinefunction(inner):
        raise ValueError(f"`{name}` is an `async` function: pass a function that calls `asyncio.run`")
    is_lazy = bool(inner.__code__.co_flags & __future__.annotations.compiler_flag)
    start = f"if __name__ == '__main__':\n    {name}({_arguments_source(inner, name, arguments or {})})\n"
    script = f"{_LAZY_ANNOTATIONS if is_lazy else ''}{_source(inner)}\n\n{start}"
    try:
        missing = sorted(_missing_names(script, name, has_lazy_annotations=is_lazy))
    except SyntaxError as error:  # `nonlocal`, for example
        raise ValueError(f"`{name}` depends on the code around it ({error}): define it at the top level of a module") from error
    if missing:
        raise ValueError(
            f"`{name}` uses {listed(missing)} from outside the function, but only its own source is sent to the nodes: "
            "import or define each name in the function, or pass its value in `func_args`"
        )
    return script


def _source(function: Callable[..., Any]) -> str:
    """Return the source of a function, in a form that is valid at the top level of a module."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"the source of `{function.__name__}` is not available ({error}): define it in a file or in a cell of a notebook"
        ) from error
    if source[0].isspace():  # dedenting a nested function would change its strings of several lines
        source = f"if True:\n{source}"
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(
            f"the source of `{function.__name__}` is not a complete definition ({error}): define it with `def`"
        ) from error
    defined = body[0].body if isinstance(body[0], ast.If) else body
    if [getattr(one, "name", None) for one in defined] != [function.__name__]:
        raise ValueError(
            f"the source of `{function.__name__}` does not begin with `def {function.__name__}`: if its file has changed since "
            f"the import, import it again; otherwise define it with `def {function.__name__}`"
        )
    return source


def _arguments_source(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> str:
    """Return the arguments of the call as source."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"`func_args` does not fit `{name}`: {error}") from error
    for key, value in arguments.items():
        try:
            names = {node.id for node in ast.walk(ast.parse(repr(value), mode="eval")) if isinstance(node, ast.Name)}
        except SyntaxError:
            names = {repr(value)}
        if names - _DEFINED_EVERYWHERE:
            raise ValueError(
                f"`func_args`: the value of `{key}` cannot be written as Python code: pass finite numbers, strings, and lists "
                "and dictionaries of them, and build other values in the function"
            )
    return f"**{dict(arguments)!r}" if arguments else ""


def _missing_names(script: str, name: str, *, has_lazy_annotations: bool) -> set[str]:
    """Return the names that a script uses and that neither the script nor Python defines."""
    if not has_lazy_annotations:  # `symtable` ignores lazy annotations
        script = ast.unparse(_WithoutLocalAnnotations().visit(ast.parse(script)))
    tables = [symtable.symtable(script, name, "exec")]
    defined = {name}
    used = set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            is_global = symbol.is_global() or table.get_type() == "module"
            if is_global and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            elif is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    return used - defined - _DEFINED_EVERYWHERE


class _WithoutLocalAnnotations(ast.NodeTransformer):
    """Replaces the annotations of variables in functions by ``None``, because Python does not evaluate them."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Keep the annotations in the body of the class."""
        node.body = [one if isinstance(one, ast.AnnAssign) else self.visit(one) for one in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Replace the annotation."""
        node.annotation = ast.Constant(None)
        return node
