import pytest

from steerlab.core._hook_points import SITES, HookPoint, resolve_layer, resolve_layers
from steerlab.core.errors import HookPointError


@pytest.mark.parametrize("site", SITES)
def test_name_and_parse_are_inverse(site):
    point = HookPoint(14, site)
    assert point.name == f"blocks.14.hook_{site}"
    assert HookPoint.parse(point.name) == point


def test_transformer_lens_names_mean_the_same_points():
    assert HookPoint.parse("blocks.3.hook_out") == HookPoint(3, "resid_post")
    assert HookPoint.parse("blocks.3.hook_in") == HookPoint(3, "resid_pre")


@pytest.mark.parametrize(
    "name",
    ["", "blocks.hook_resid_post", "blocks.3.resid_post", "blocks.-1.hook_resid_post", "blocks.3.hook_resid_pst"],
)
def test_unknown_name_is_refused(name):
    with pytest.raises(HookPointError):
        HookPoint.parse(name)


def test_unknown_site_names_the_nearest():
    with pytest.raises(HookPointError, match="Did you mean 'resid_post'"):
        HookPoint(0, "resid_pots")


@pytest.mark.parametrize("layer", [-1, 1.0, True, "3", None])
def test_layer_is_an_integer_from_zero(layer):
    with pytest.raises(HookPointError):
        HookPoint(layer)


def test_check_names_the_layers_there_are():
    assert HookPoint(3).check(4) == HookPoint(3)
    with pytest.raises(HookPointError, match="numbered 0 to 3"):
        HookPoint(4).check(4)


def test_negative_layers_count_from_the_end():
    assert resolve_layer(-1, 30) == 29
    assert resolve_layer(-30, 30) == 0
    for layer in (30, -31):
        with pytest.raises(HookPointError, match="does not exist"):
            resolve_layer(layer, 30)


def test_layers_keep_their_order():
    assert resolve_layers("all", 3) == [0, 1, 2]
    assert resolve_layers(-1, 3) == [2]
    assert resolve_layers(range(1, 3), 3) == [1, 2]
    assert resolve_layers((2, 0), 3) == [2, 0]


@pytest.mark.parametrize("layers", ["some", [], [0, -3], [0, 0], [3], 1.5, None, ["1"], True])
def test_bad_layers_are_refused(layers):
    with pytest.raises(HookPointError):
        resolve_layers(layers, 3)
