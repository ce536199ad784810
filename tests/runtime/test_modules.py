"""Modules of a model, what they hold, and the arguments of their forward."""

import torch
from torch import nn

from steerlab._runtime.arguments import optional_arguments
from steerlab._runtime.modules import modules_in, parameters_of


def test_every_module_is_found_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(
        nn.ModuleList([shared, nn.Sequential(shared, nn.ReLU())]), shared, nn.ModuleDict({"a": nn.ELU()})
    )
    root.register_module("absent", None)
    found = modules_in(root)
    assert found == list(root.modules())


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


def test_parameters_are_torchs_in_its_order():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ModuleList([shared, nn.Linear(2, 3, bias=False)]), shared, nn.ReLU())
    model[1][1].weight = nn.Parameter(torch.zeros(3, 2))
    model.add_module("head", nn.Linear(3, 3))
    model.head.weight = shared.weight
    model.add_module("nothing", None)
    assert [id(parameter) for parameter in parameters_of(model)] == [id(parameter) for parameter in model.parameters()]
    assert len(list(parameters_of(model))) == 6
