"""Fails where a source file has outgrown one room, or is named after nothing in particular."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}


def faults(root: Path) -> list[str]:
    """One line for every file under `src` that breaks a rule."""
    found = []
    for path in sorted((root / "src").rglob("*.py")):
        name = path.relative_to(root).as_posix()
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append(f"{name}: {lines} lines, at most {MAX_LINES}; it is two rooms")
        if NAMELESS & {part.removesuffix(".py") for part in path.relative_to(root).parts}:
            found.append(f"{name}: say what it does instead of {', '.join(sorted(NAMELESS))}")
    return found


if __name__ == "__main__":
    lines = faults(ROOT)
    print("\n".join(lines) or f"sizes and names: ok (at most {MAX_LINES} lines)")
    sys.exit(bool(lines))
