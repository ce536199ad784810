import math

import numpy as np
import pytest
import torch
from transformers import Adafactor

import steerlab as sl
from steerlab.core.errors import InputError, PlanError
from steerlab.sequences import adam_second_moments, group_advantages, preconditioned, update_direction

NAME = "model.layers.2.mlp.up_proj.weight"
ADVANTAGES = [[1.0, -0.5, 0.0], [0.25, 2.0, -1.0]]


def test_advantages_compare_with_the_others():
    np.testing.assert_allclose(group_advantages([[1, 0, 0], [2, 2, 2]]), [[1, -0.5, -0.5], [0, 0, 0]])
    with pytest.raises(InputError, match="at least two responses"):
        group_advantages([[1.0], [0.0]])
    with pytest.raises(InputError, match=r"response \(0, 1\) is nan"):
        group_advantages([[1.0, math.nan]])


def test_the_direction_is_the_gradient_of_weighted_log_q(make_processor, sequences):
    processor = make_processor(temperature=0.9)
    found = update_direction(processor, sequences, ADVANTAGES, names=[NAME], tf_batch_size=2)
    scored = processor.teacher_force_logprobs(sequences, with_grad=True)
    loss = sum(
        a * values.sum()
        for row, log_qs in zip(ADVANTAGES, scored.token_logqs, strict=True)
        for a, values in zip(row, log_qs, strict=True)
        if len(values)
    )
    parameter = processor.parts.root.get_parameter(NAME)
    (expected,) = torch.autograd.grad(loss / 6, [parameter])
    torch.testing.assert_close(found[NAME], expected, atol=1e-6, rtol=1e-4)
    assert parameter.grad is None


def test_adam_scales_it(make_processor, sequences):
    processor = make_processor()
    model = processor.parts.root
    optimizer = torch.optim.Adam([model.get_parameter(NAME)], lr=1e-4, betas=(0.9, 0.99))
    squares = []
    for seed in (0, 1):
        gradient = torch.randn(model.get_parameter(NAME).shape, generator=torch.Generator().manual_seed(seed))
        model.get_parameter(NAME).grad = gradient
        squares.append(gradient**2)
        optimizer.step()
    moments = adam_second_moments(optimizer, model)
    mean = (0.99 * 0.01 * squares[0] + 0.01 * squares[1]) / (1 - 0.99**2)
    torch.testing.assert_close(moments[NAME], mean)
    model.get_parameter(NAME).grad = None
    plain = update_direction(processor, sequences, ADVANTAGES, names=[NAME])
    scaled = update_direction(processor, sequences, ADVANTAGES, names=[NAME], second_moments=moments)
    torch.testing.assert_close(scaled[NAME], plain[NAME] / (mean.sqrt() + 1e-8))


def test_amsgrad_scales_by_the_largest_moment(make_processor):
    model = make_processor().parts.root
    parameter = model.get_parameter(NAME)
    optimizer = torch.optim.AdamW([parameter], lr=0.0, betas=(0.9, 0.5), amsgrad=True)
    for size in (4.0, 0.0):
        parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    moments = adam_second_moments(optimizer, model)  # 0.5 · 16, which the second step's 0.25 · 16 does not reach
    torch.testing.assert_close(moments[NAME], torch.full_like(parameter, 8 / (1 - 0.5**2)).detach())


def test_bad_input_is_named(make_processor, sequences):
    processor = make_processor()
    with pytest.raises(InputError, match=r"one finite number per response, \(2, 3\)"):
        update_direction(processor, sequences, [[1.0, 2.0]])
    with pytest.raises(InputError, match="no second moment of 'a'"):
        preconditioned({"a": torch.ones(1)}, {})
    vector = sl.SteeringVector.from_tensor(torch.ones(processor.parts.config.hidden_size), layer=1)
    for plans in (1, 3):
        with pytest.raises(PlanError, match=f"got {plans} plans for 2 prompts"):
            update_direction(processor, sequences, ADVANTAGES, plan=[sl.Plan(sl.add(vector, coef=1.0))] * plans)
    with pytest.raises(InputError, match="SGD holds no second moments"):
        adam_second_moments(torch.optim.SGD(processor.parts.root.parameters()), processor.parts.root)
    adafactor = Adafactor(processor.parts.root.parameters(), lr=0.0, relative_step=False, scale_parameter=False)
    for parameter in processor.parts.root.parameters():
        parameter.grad = torch.ones_like(parameter)
    adafactor.step()  # it keeps `exp_avg_sq` of vectors, and scales otherwise
    with pytest.raises(InputError, match="Adafactor holds no second moments"):
        adam_second_moments(adafactor, processor.parts.root)
