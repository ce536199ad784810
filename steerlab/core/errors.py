"""Every error that steerlab raises on purpose, in one tree.

::

    SteerlabError
    ├── InputError (ValueError)          something the caller passed
    │   ├── ModelNotFoundError           no such alias, directory or hub id
    │   ├── HookPointError               no such hook point, layer or site
    │   ├── VectorShapeError             a vector of the wrong width or rank
    │   │   └── VectorMismatchError      it is as wide as the stream of another model
    │   ├── VectorValueError             NaN, infinite or all-zero vector
    │   ├── VectorFileError              not a steering-vector file, or a damaged one
    │   ├── PlanError                    a plan that cannot be carried out
    │   │   └── UnknownOperatorError     a stored plan with an operator that is not registered here
    │   ├── PolicyError                  sampling values outside their range
    │   ├── PromptError                  an empty or malformed prompt
    │   ├── TargetError                  an empty target, or one without tokens
    │   ├── ContextLengthError           more tokens than the model's context
    │   ├── NonFiniteError               activations or logits left the range of the model's numbers
    │   └── DataError                    a bad row in a data or configuration file
    ├── ReceiptError (RuntimeError)      a plan edited other positions than it implies
    ├── EngineError (RuntimeError)       an engine or one of its processes has died
    ├── RewardError (RuntimeError)       a reward function failed; names the row
    ├── RunError (RuntimeError)          a run directory that cannot be used
    └── BackendMissingError (ImportError)  an optional dependency is not installed

Catch `SteerlabError` to catch them all. Each message says what was wrong, which values were seen and what to do.
"""


class SteerlabError(Exception):
    """Base of every error raised by steerlab on purpose."""


class InputError(SteerlabError, ValueError):
    """Something the caller passed cannot be used."""


class ModelNotFoundError(InputError):
    """A model name is neither an alias, nor a local model directory, nor a reachable hub id."""


class HookPointError(InputError):
    """A hook point, layer or site does not exist on this model, or a hook on it never fired."""


class VectorShapeError(InputError):
    """A vector does not have the shape the model needs."""


class VectorValueError(InputError):
    """A vector holds NaN or infinities, or has no direction because it is zero."""


class VectorFileError(InputError):
    """A file is not a steering-vector file of ours, or it is damaged."""


class VectorMismatchError(VectorShapeError):
    """A vector is not as wide as the residual stream of this model: it belongs to another one."""


class PlanError(InputError):
    """A plan states something that cannot be carried out as stated."""


class UnknownOperatorError(PlanError):
    """A plan that is read back holds an operator that is neither shipped nor registered in this process."""


class PolicyError(InputError):
    """A sampling policy holds a value outside its range."""


class PromptError(InputError):
    """A prompt is empty or malformed."""


class TargetError(InputError):
    """A scoring target is empty or tokenises to nothing."""


class ContextLengthError(InputError):
    """A sequence is longer than the model's context."""


class NonFiniteError(InputError):
    """Activations or logits of a row are NaN or infinite: they left the range of the model's numbers."""


class DataError(InputError):
    """A data or configuration file holds a row or key that cannot be used."""


class ReceiptError(SteerlabError, RuntimeError):
    """A plan edited other positions than it implies."""


class EngineError(SteerlabError, RuntimeError):
    """An engine, or a process that it runs in, has died; its requests are lost."""


class RewardError(SteerlabError, RuntimeError):
    """A reward function failed or gave something else than a number; the message names the row."""


class RunError(SteerlabError, RuntimeError):
    """A run directory is missing, damaged, or in use."""


class BackendMissingError(SteerlabError, ImportError):
    """An optional dependency is not installed; the message names the install command."""
