"""The processor's measures inside trainers that people use: a callback for TRL, a step for verl."""
