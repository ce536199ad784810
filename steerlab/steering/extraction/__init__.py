"""From contrast pairs or targets to steering vectors, and how good the vectors look on held-out pairs.

`extract` is the entry; `_pair_activations` reads both sides of the pairs, `estimators` turns them into directions (with
`_axes` and `_moments`), `bipo` learns a vector by gradient, `diagnostics` judges vectors on other pairs.
"""
