"""Operators: the maps h → h + Δ(h) that an edit applies to the residual stream.

Each computes Δ in float32 from the stream at one hook point; `u` is the vector's unit direction. `scaled(k)` of a plan
multiplies Δ by k for every operator, so that scale 0 is always the unsteered model. `form` says what they have in
common, the classes what each one is.

Strength comes in two units. A **coefficient** is raw: `add` adds coef·v, and bounds and targets are values of the
projection u·h. A **dose** is measured in median norms of the stream at that hook point (on the shipped reference text,
position 0 left out): `add` adds a vector of norm dose·median along v, and bounds and targets are multiples of the
median.

Every operator takes four options:

- `where`: positions, or the name of a simple set ("all"); by default the last prompt token and everything generated.
- `norm="keep"`: the edited stream is given the norm it had, at every scale.
- `schedule`: a factor over generated positions, see `steerlab.steering.positions.schedule`.
- `when`: a condition answered per row, see `steerlab.steering.positions.condition`.
"""

from steerlab.steering.operators._ablate import Ablate, ablate
from steerlab.steering.operators._add import Add, add
from steerlab.steering.operators._base import Direction, Operator, Unit
from steerlab.steering.operators._clamp import Clamp, clamp
from steerlab.steering.operators._edit import Edit, Norm
from steerlab.steering.operators._feature import Feature, feature
from steerlab.steering.operators._form import Gate, Term
from steerlab.steering.operators._loreft import Loreft, loreft
from steerlab.steering.operators._rotate import Rotate, rotate
from steerlab.steering.operators._set import Set, set
from steerlab.steering.operators.registry import SHIPPED_OPERATORS, operator_from_json, register_operator

SHIPPED_OPERATORS.update(
    add=Add, ablate=Ablate, clamp=Clamp, set=Set, rotate=Rotate, loreft=Loreft, sae_feature=Feature
)

__all__ = [
    "Ablate",
    "Add",
    "Clamp",
    "Direction",
    "Edit",
    "Feature",
    "Gate",
    "Loreft",
    "Norm",
    "Operator",
    "Rotate",
    "Set",
    "Term",
    "Unit",
    "ablate",
    "add",
    "clamp",
    "feature",
    "loreft",
    "operator_from_json",
    "register_operator",
    "rotate",
    "set",
]
