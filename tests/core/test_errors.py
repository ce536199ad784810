import inspect

import pytest

from steerlab.core import errors

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_ours_and_in_the_drawn_tree(error):
    assert issubclass(error, errors.SteerlabError)
    assert error.__name__ in errors.__doc__


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InputError, ValueError),
        (errors.VectorFileError, ValueError),
        (errors.ReceiptError, RuntimeError),
        (errors.BackendMissingError, ImportError),
    ],
)
def test_builtin_handlers_catch_them_too(error, builtin):
    assert issubclass(error, builtin)
