"""Which tokens an edit reaches, how strongly along the generated tokens, and in which rows.

`where` builds sets of positions (classes in `_sets`), `schedule` factors over the generated positions, `condition`
answers per row whether an edit acts. `_rows` says which tokens a forward pass holds; `_prompt_lookup` finds the sets
that depend on a prompt's text.
"""

from steerlab.steering.positions._rows import Marks, RowPositions

__all__ = ["Marks", "RowPositions"]
