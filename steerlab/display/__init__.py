"""What a notebook shows of results: plain HTML without network or scripts, safe against markup in texts.

Nothing here knows a model, a plan or a result; those say what to show of them in these words.
"""

from steerlab.display.colors import Scale, diverging, sequential
from steerlab.display.html import Face, Fold, Table, escaped, figure
from steerlab.display.tokens import TokenRow, TokenView, tokens

__all__ = [
    "Face",
    "Fold",
    "Scale",
    "Table",
    "TokenRow",
    "TokenView",
    "diverging",
    "escaped",
    "figure",
    "sequential",
    "tokens",
]
