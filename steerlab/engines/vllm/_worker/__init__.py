"""What runs inside vLLM's workers: the operator in the model, and the state that steers it pass by pass."""
