"""What runs inside vLLM's workers: the operator in the model, and the state that steers it pass by pass.

On which tokens of a row an edit acts is decided in `op_torch` and `op_triton`, out of `tables` that hold runs of
positions and out of `token_rules`, which follow the tokens of each request.
"""
