"""Modules of a model, and the arguments of their forward."""

from torch import nn

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.modules import modules_in


def test_every_module_is_found_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(
        nn.ModuleList([shared, nn.Sequential(shared, nn.ReLU())]), shared, nn.ModuleDict({"a": nn.ELU()})
    )
    root.register_module("absent", None)
    found = modules_in(root)
    assert found[0] is root
    assert len(found) == len(set(found))
    assert set(found) == set(root.modules())


class Takes(nn.Module):
    def forward(self, ids, use_cache=True):
        return ids


def test_arguments_are_those_of_the_forward_in_place():
    replaced, other = Takes(), Takes()
    names = ("position_ids", "use_cache")
    assert optional_arguments(replaced, *names) == ["use_cache"]
    replaced.forward = lambda ids, position_ids=None: ids
    assert optional_arguments(replaced, *names) == ["position_ids"]
    assert optional_arguments(other, *names) == ["use_cache"]
