"""Print what pagemill requires, and what the extras named on the command line require beside it.

The images install this before the code: these layers are large, and change less often.
"""

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project in `pyproject`. Raises KeyError for an extra that it does not have."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return project["dependencies"] + [item for extra in extras for item in project["optional-dependencies"][extra]]


if __name__ == "__main__":
    sys.stdout.writelines(f"{item}\n" for item in requirements(Path("pyproject.toml"), sys.argv[1:]))
