"""Tests, and `checked`: the type checker they run on steerlab's own functions."""

from beartype import BeartypeConf, beartype

# As type checkers and users understand it, an int is good where a float is asked for.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
