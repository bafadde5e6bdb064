"""Convert errors of the command line's parser, such as an unknown option, to the format of all other errors.

Some versions of typer import click, and others contain a copy of it. This module therefore recognizes the errors by their
attributes and the names of their classes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distflow.documents.text import most_similar
from distflow.errors import InputError

__all__ = ["explain_usage_error", "help_page"]


def help_page(error: Any) -> str | None:
    """Return the help page if the user gave no arguments to a command that needs some. Otherwise, return ``None``."""
    return error.message if type(error).__name__ == "NoArgsIsHelpError" else None


def explain_usage_error(error: Any, root: Any, arguments: Sequence[str]) -> InputError:
    """Convert an error of the parser to an error with the command, the problem and a remedy.

    Args:
        error: An error of the parser, which has ``format_message``.
        root: The root of all commands.
        arguments: The arguments of the command line, for errors that do not contain their command.

    """
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _command_path(root, arguments)
    details = f"details: {path} --help"
    option: Any = getattr(error, "option_name", None)
    parameter: Any = getattr(error, "param", None)
    if hasattr(error, "possibilities"):
        known = [name for one in context.command.get_params(context) for name in (*one.opts, *one.secondary_opts)]
        near = most_similar(option, [name for name in known if name.startswith("--")]) if option.startswith("--") else None
        suggestion = f"did you mean `{near}`? " if near else ""
        return InputError(f"`{option}` is not an option of `{path}`", hint=f"{suggestion}{details}")
    if option is not None:
        verb = "takes no" if "not take" in error.message else "needs a"
        return InputError(f"{path}: `{option}` {verb} value", hint=details)
    if type(error).__name__ == "MissingParameter":
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.human_readable_name
        return InputError(f"{path}: `{name}` is missing", hint=f"{name}: {_first_sentence(parameter.help)}\n{details}")
    if parameter is not None:
        name = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.human_readable_name
        return InputError(f"{path}: `{name}`: {_invalid_value(error.message, parameter.type)}", hint=details)
    extra = re.search(r"extra arguments?(?:\(s\))? \((.*)\)", error.message)
    if extra is not None:
        usage = re.sub(r"\s+", " ", context.get_usage().partition(" ")[2])
        return InputError(f"{path}: unexpected argument: `{extra[1]}`", hint=f"usage: {usage}\n{details}")
    return InputError(f"{path}: {error.format_message()}", hint=details)


def _command_path(root: Any, arguments: Sequence[str]) -> str:
    """Return the command at the start of the arguments, such as ``distflow workflow list``."""
    path, command = ["distflow"], root
    for word in arguments:
        command = command.get_command(None, word) if hasattr(command, "get_command") else None
        if command is None:
            break
        path.append(word)
    return " ".join(path)


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", text or "required")[0].rstrip(".")


def _invalid_value(message: str, kind: Any) -> str:
    """Return a plain message about an invalid value. For a number, it has the limits, if there are any."""
    message = message.rstrip(".")
    number = re.fullmatch(r"'?(.*?)'? is not (?:a valid (?:int|float)\w*(?: range)?|in the range .*)", message)
    if number is None:
        return re.sub(r"'([^']*)'", r"`\1`", message)
    noun = "a number" if "float" in kind.name else "a whole number"
    limits = [
        f"{word} {limit}"
        for word, limit in (("at least", getattr(kind, "min", None)), ("at most", getattr(kind, "max", None)))
        if limit is not None
    ]
    return f"`{number[1]}` is not {noun}{' of ' if limits else ''}{' and '.join(limits)}"
