"""Edits learned by gradient: the published methods `reft_r1`, `reps` and `loreft`.

`examples` is their data, `training` the loop with held-out loss, early stop and cost, and `reft_r1`, `reps` and
`loreft` one method each. The gradient goes into the edit only: the model's parameters take none and stay as they are.
"""
