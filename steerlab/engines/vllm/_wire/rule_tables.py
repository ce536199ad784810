"""A plan's token rules as numbers: what decides on the device which tokens belong to sets that look at tokens.

See `steerlab.steering.positions._token_rules`. A sequence of ids stands at the end of its row, after `ANYTHING`.
"""

from collections.abc import Sequence

import numpy as np

from steerlab.engines.vllm._wire.config import MOST_SEQUENCES, MOST_TOKENS
from steerlab.steering.positions._token_rules import TokenRule

ANYTHING, NOTHING = -2, -3
"""What every token matches, and what none does."""
NO_LIMIT = 1 << 40
"""More tokens than any row has."""


def fits(rule: TokenRule) -> bool:
    """Whether the tables have room for a rule."""
    return all(
        len(event) <= MOST_SEQUENCES and all(len(part) <= MOST_TOKENS for part in event) for event in rule.events
    )


def limit_table(rules: Sequence[TokenRule]) -> np.ndarray:
    """Per rule, how many tokens after its last start, and whether events belong to it; int64 [rules, 2]."""
    rows = [(NO_LIMIT if rule.limit is None else rule.limit, int(rule.inclusive)) for rule in rules]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def sequence_table(rules: Sequence[TokenRule]) -> np.ndarray:
    """Per rule, the sequences of its start and of its end; int32 [rules, 2, MOST_SEQUENCES, MOST_TOKENS]."""
    table = np.full((len(rules), 2, MOST_SEQUENCES, MOST_TOKENS), NOTHING, dtype=np.int32)
    for of_rule, rule in zip(table, rules, strict=True):
        for of_event, event in zip(of_rule, rule.events, strict=True):
            for row, part in zip(of_event, event, strict=False):
                row[:] = [ANYTHING] * (MOST_TOKENS - len(part)) + list(part)
    return table
