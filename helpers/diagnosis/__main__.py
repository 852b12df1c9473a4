"""`make diagnose LOG=file`: the diagnosis of a log on the terminal."""

import sys
from pathlib import Path

from helpers.diagnosis import diagnose


def main(arguments: list[str]) -> int:
    """Print the diagnosis of the log whose path is the one argument; 2 where there is none that can be read."""
    if len(arguments) != 1 or not arguments[0]:
        print("Which log? make diagnose LOG=job.log")
        return 2
    try:
        print(diagnose(Path(arguments[0])))
    except OSError as error:
        print(f"This log cannot be read: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
