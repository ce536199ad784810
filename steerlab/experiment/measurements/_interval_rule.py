"""By which rule the intervals of a stored table were made; those of earlier versions do not say: bootstraps."""

from typing import Final

import pandas as pd

RULE_COLUMN: Final = "interval"
STUDENT_T: Final = "Student's t"
EARLIER: Final = "percentile bootstrap"


def with_rule(frame: pd.DataFrame) -> pd.DataFrame:
    """A table whose intervals were made now: by Student's t."""
    return frame.assign(**{RULE_COLUMN: STUDENT_T})


def rule_of(frame: pd.DataFrame) -> str:
    """The rule of a table's intervals, in words."""
    return str(frame[RULE_COLUMN].iloc[0]) if RULE_COLUMN in frame.columns and len(frame) else EARLIER


def without_rule(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without that column, which a caption tells."""
    return frame.drop(columns=RULE_COLUMN, errors="ignore")
