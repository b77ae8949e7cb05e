"""Calls that a model writes as Python, read without running anything."""

import ast
import json

_MOST_CHARACTERS = 2**16


def python_calls(code: str) -> list[tuple[str, str]]:
    """Names and arguments (as JSON text) of the calls in a piece of code, such as `f(city="Paris")`, or a list of them.

    Each call has keyword arguments of literals only; `print(f(…))` and `result = f(…)` are calls of f.

    Raises:
        ValueError: for any other code.
    """
    if len(code) > _MOST_CHARACTERS:
        raise ValueError(f"code of more than {_MOST_CHARACTERS} characters")
    try:
        body = ast.parse(code.strip()).body
        calls = [call for statement in body for call in _calls_of(statement)]
        found = [_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no calls in Python: {error}") from error
    if not found:
        raise ValueError("no calls")
    return found


def _calls_of(statement: ast.stmt) -> list[ast.expr]:
    if not isinstance(statement, ast.Expr | ast.Assign):
        raise ValueError("a statement that is no call")
    value = statement.value
    if isinstance(value, ast.List | ast.Tuple):
        return list(value.elts)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print" and value.args:
        return list(value.args)
    return [value]


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with names for its arguments")
    values = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without a name")
        values[keyword.arg] = keyword.value
    try:
        arguments = {name: ast.literal_eval(value) for name, value in values.items()}  # {[]} is a TypeError
        return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(f"arguments that JSON has not: {error}") from error
