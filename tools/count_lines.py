"""Count the package's lines of code, without blank lines, comments and docstrings: small is a feature (part of `make check`).

    python tools/count_lines.py

Prints a line for each module. Exit code 1 where the package has grown beyond its ceiling, which is to go down towards the goal,
or a file has more than 300 lines.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GOAL = 4000  # lines of code in helpers/
CEILING = 9890  # where it stands: with new code some other code must go
LONG_FILE = 300  # lines of a file, all kinds: more are two ideas
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Lines of Python source that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def main() -> int:
    total, long = 0, 0
    for path in sorted((ROOT / "helpers").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        count, length = code_lines(source), len(source.splitlines())
        total += count
        long += length > LONG_FILE
        print(f"{count:6}  {path.relative_to(ROOT)}{f'  ({length} lines in all: two ideas?)' if length > LONG_FILE else ''}")
    print(f"{total:6}  lines of code in helpers, of at most {CEILING:,}; the goal is {GOAL:,}")
    return int(total > CEILING or long > 0)


if __name__ == "__main__":
    sys.exit(main())
