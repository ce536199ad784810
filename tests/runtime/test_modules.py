"""What a model holds, as torch itself lists it."""

import torch
from torch import nn

from steerlab._runtime.modules import buffers_of, parameters_of


def test_parameters_and_buffers_are_torchs_in_its_order():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.ModuleList([shared, nn.Linear(2, 3, bias=False)]), shared, nn.ReLU())
    model[1][1].weight = nn.Parameter(torch.zeros(3, 2))
    model.add_module("head", nn.Linear(3, 3))
    model.head.weight = shared.weight
    model.add_module("nothing", None)
    for ours, theirs in ((parameters_of, model.parameters), (buffers_of, model.buffers)):
        assert [id(tensor) for tensor in ours(model)] == [id(tensor) for tensor in theirs()]
    assert len(list(parameters_of(model))) == 6
    assert len(list(buffers_of(model))) == 3
