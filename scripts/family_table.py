"""Prints the table of families as the page docs/models.md shows it.

Usage: `.venv/bin/python scripts/family_table.py`, after a change of `steerlab/models/families.json`.
"""

from steerlab.models.families import ENGINES, FEATURES, Family, checks, families


def as_markdown() -> str:
    """The table as the page on model families shows it."""
    lines = [f"| family | `model_type` | {' | '.join(ENGINES)} |", "| --- " * (len(ENGINES) + 2) + "|"]
    for family in families().values():
        lines.append(
            f"| {family.label} | `{family.name}` | {' | '.join(_marks(family, engine) for engine in ENGINES)} |"
        )
    lines += ["", "| check | how | with | when |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {check.how} | {check.versions} | {check.when} |" for name, check in checks().items()]
    lines += ["", "| family | engine | checked by, or why not |", "| --- | --- | --- |"]
    for family in families().values():
        for engine in ENGINES:
            notes = _notes(family, engine)
            if notes:
                lines.append(f"| {family.label} | {engine} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


def _marks(family: Family, engine: str) -> str:
    """The features of one engine in a line, in the order of `FEATURES`."""
    return " · ".join(str(family.cells[engine, feature]) for feature in FEATURES)


def _notes(family: Family, engine: str) -> list[str]:
    """Each note once, with the features it is about."""
    by_note: dict[str, list[str]] = {}
    for feature in FEATURES:
        cell = family.cells[engine, feature]
        if cell.state != "open":
            by_note.setdefault(cell.note, []).append(feature)
    return [f"{', '.join(features)}: {note}" for note, features in by_note.items()]


if __name__ == "__main__":
    print(as_markdown(), end="")
