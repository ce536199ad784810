"""What the plots of an effect draw: data, labels and limits, not pixels."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from steerlab.core.errors import DataError
from steerlab.experiment import plots
from steerlab.experiment.measurements.effect._section import verdict_sentence
from steerlab.experiment.measurements.effect.result import Effect
from steerlab.experiment.plots._palette import AGAINST, RANDOM, REAL
from tests.experiment.frames import DOSES, make_effect

SLOPES = [2.0, 4.0, -1.0, 3.0]
NULLS = {"random": [0.5, -0.5, 1.0], "shuffled": [0.2, -0.8], "wrong_layer": [1.5]}
COSTLY = {-0.2: 1.8, -0.1: 1.1, 0.0: 1.0, 0.1: 1.2, 0.2: 1.4}


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def effect() -> Effect:
    return make_effect(SLOPES, nulls=NULLS, ratios=COSTLY)


def lines(ax: Axes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {str(line.get_label()): (line.get_xdata(), line.get_ydata()) for line in ax.get_lines()}


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


# --- dose-response ------------------------------------------------------------------------------------------------


def test_the_line_is_the_mean_over_items(effect: Effect) -> None:
    doses, means = lines(plots.plot_dose_response(effect))["vector"]
    np.testing.assert_allclose(doses, DOSES)
    np.testing.assert_allclose(means, 1.0 + np.mean(SLOPES) * np.array(DOSES))


def test_doses_past_the_bound_are_hollow(effect: Effect) -> None:
    ax = plots.plot_dose_response(effect)
    doses, _ = lines(ax)["past the cost bound"]
    assert doses.tolist() == [-0.2]
    hollow = next(line for line in ax.get_lines() if line.get_label() == "past the cost bound")
    assert hollow.get_markerfacecolor() == "white"


def test_one_group_has_no_interval_anywhere() -> None:
    effect = make_effect(SLOPES, groups=["a"] * 4, nulls=NULLS, ratios=COSTLY)
    ax = plots.plot_dose_response(effect)
    assert ax.get_title("left") == "Slope +2.00"
    assert "vector" in words(ax)
    assert "no interval: one group" in verdict_sentence(effect)
    assert "+2.00 per unit dose (no interval), " in str(effect)
    described = plots.describe_dose_response(effect)
    said = [ax.get_title("left"), *words(ax), verdict_sentence(effect), str(effect), described]
    assert [text for text in said if "nan" in text] == []
    assert "nan" not in effect._repr_html_()


def test_null_bands_span_the_draws(effect: Effect) -> None:
    band = plots.null_band(effect, "random")
    assert band.dose.tolist() == DOSES
    np.testing.assert_allclose(band.high - 1.0, [0.1, 0.05, 0, 0.1, 0.2])
    np.testing.assert_allclose(band.low - 1.0, [-0.2, -0.1, 0, -0.05, -0.1])
    ax = plots.plot_dose_response(effect)
    assert {"3 random\ndirections", "2 label flips", "vector, with\n95 % interval"} <= set(words(ax))
    filled = next(c for c in ax.collections if c.get_label() == "random directions")
    assert filled.get_paths()[0].get_extents().ymax == pytest.approx(1.2)


def test_a_band_gets_the_unsteered_mean_at_zero() -> None:
    made = make_effect(SLOPES, nulls={"random": [1.0]})
    rows = made.rows[(made.rows.family == "vector") | (made.rows.dose.abs() == 0.2)]
    outer = Effect(rows.reset_index(drop=True), made.cost, "hash", "plan", made.settings)
    assert plots.null_band(outer, "random").dose.tolist() == [-0.2, 0.0, 0.2]
    assert plots.null_band(outer, "shuffled").empty


def test_the_title_states_slope_and_interval(effect: Effect) -> None:
    low, high = effect.ci
    title = plots.plot_dose_response(effect).get_title(loc="left")
    assert title == f"Slope {effect.slope:+.2f} [{low:+.2f}, {high:+.2f}]".replace("-", "−")


def test_axes_have_units(effect: Effect) -> None:
    ax = plots.plot_dose_response(effect)
    assert ax.get_xlabel() == "dose (median residual norms)"
    assert ax.get_ylabel() == "log-prob margin (nats)"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["−0.2", "−0.1", "0", "0.1", "0.2"]


# --- items --------------------------------------------------------------------------------------------------------


def test_items_are_sorted_and_the_wrong_way_stands_out(effect: Effect) -> None:
    ax = plots.plot_item_slopes(effect)
    place, slopes = lines(ax)["steered"]
    assert place.tolist() == [2, 3, 4]
    np.testing.assert_allclose(slopes, [2, 3, 4])
    place, slopes = lines(ax)["anti-steerable"]
    assert place.tolist() == [1]
    np.testing.assert_allclose(slopes, [-1])
    assert ax.get_title(loc="left") == "25 % of 4 items are anti-steerable"
    low, high = ax.get_ylim()
    assert low < -1 < 4 < high
    against = next(line for line in ax.get_lines() if line.get_label() == "anti-steerable")
    assert (against.get_color(), against.get_markerfacecolor()) == (AGAINST, "white")


def test_without_slopes_the_reason_is_written() -> None:
    collapsed = make_effect(SLOPES, ratios=dict.fromkeys(DOSES, 9.0))
    for draw in (plots.plot_item_slopes, plots.plot_null_slopes):
        ax = draw(collapsed)
        assert "cost bound" in ax.texts[0].get_text()
        assert not ax.get_lines()
    assert "No slope" in plots.plot_dose_response(collapsed).get_title(loc="left")
    assert "cost bound" in plots.describe_item_slopes(collapsed)
    assert "too few doses" in plots.describe_dose_response(collapsed)


# --- nulls --------------------------------------------------------------------------------------------------------


def test_every_draw_is_a_dot(effect: Effect) -> None:
    ax = plots.plot_null_slopes(effect)
    dots = {line.get_color(): line for line in ax.get_lines() if line.get_linestyle() == "None"}
    assert sorted(dots[RANDOM].get_xdata()) == pytest.approx(sorted(NULLS["random"]))
    assert dots[REAL].get_xdata()[0] == pytest.approx(effect.rank_slope)
    dashed = sorted(line.get_xdata()[0] for line in ax.get_lines() if line.get_linestyle() == "--")
    assert dashed == pytest.approx([-abs(effect.rank_slope), abs(effect.rank_slope)])


def test_rows_name_the_draws_and_their_rank(effect: Effect) -> None:
    labels = [label.get_text() for label in plots.plot_null_slopes(effect).get_yticklabels()]
    assert labels[:3] == ["3 random directions\nrank 0.250", "2 label flips\nrank 0.333", "wrong layer\nnot ranked"]
    assert labels[3].startswith("vector")


def test_no_controls_is_said() -> None:
    assert plots.plot_null_slopes(make_effect(SLOPES)).texts[0].get_text() == "No control arm was run."
    assert "no control arm was run" in plots.describe_null_slopes(make_effect(SLOPES))


# --- cost ---------------------------------------------------------------------------------------------------------


def test_cost_is_drawn_with_its_bound(effect: Effect) -> None:
    ax = plots.plot_cost(effect)
    np.testing.assert_allclose(ax.get_lines()[0].get_ydata(), list(COSTLY.values()))
    bound = next(line for line in ax.get_lines() if line.get_color() == AGAINST)
    assert bound.get_ydata()[0] == 1.5
    assert ax.texts[0].get_text() == "bound ×1.5"
    assert not ax.collections


def test_cost_intervals_are_drawn_if_known(effect: Effect) -> None:
    cost = effect.cost.assign(ppl_ratio_low=effect.cost.ppl_ratio - 0.05, ppl_ratio_high=effect.cost.ppl_ratio + 0.1)
    ax = plots.plot_cost(Effect(effect.rows, cost, "hash", "plan", effect.settings))
    segments = ax.collections[0].get_segments()
    np.testing.assert_allclose(segments[0][:, 1], [1.75, 1.9])


def test_the_frontier_joins_cost_and_change(effect: Effect) -> None:
    ax = plots.plot_cost_frontier(effect.by_dose(), bound=1.5)
    curve = ax.get_lines()[0]
    np.testing.assert_allclose(curve.get_xdata(), list(COSTLY.values()))
    np.testing.assert_allclose(curve.get_ydata(), np.mean(SLOPES) * np.array(DOSES))
    assert words(ax) == ["−0.2", "−0.1", "0", "0.1", "0.2", "bound ×1.5"]
    assert "×1.5" in [label.get_text() for label in ax.get_xticklabels()]
    hollow = next(line for line in ax.get_lines() if line.get_markerfacecolor() == "white")
    assert hollow.get_xdata().tolist() == [1.8]


def test_a_frontier_without_dose_zero_shows_values_as_they_are() -> None:
    frame = pd.DataFrame({"dose": [0.2, 0.1], "gain": [3.0, 1.0], "ppl_ratio": [1.3, 1.1]})
    points = plots.frontier_points(frame, "gain")
    assert points.change.tolist() == [1.0, 3.0]
    assert points.dose.tolist() == [0.1, 0.2]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(DataError, match=r"missing: ppl_ratio.*has dose, value"):
        plots.plot_cost_frontier(pd.DataFrame({"dose": [0.0], "value": [1.0]}))


# --- in words -----------------------------------------------------------------------------------------------------


def test_findings_in_words(effect: Effect) -> None:
    assert "over 4 items goes from 0.60 at dose −0.2 to 1.40 at 0.2" in plots.describe_dose_response(effect)
    assert "25 % are below 0" in plots.describe_item_slopes(effect)
    assert "random directions, 3 draws, at most 1.00, rank 0.250" in plots.describe_null_slopes(effect)
    assert "at most 1.8 times" in plots.describe_cost(effect)
    assert "4 of 5 doses stay within the bound of 1.5" in plots.describe_cost(effect)
    frontier = plots.describe_cost_frontier(effect.by_dose(), bound=1.5)
    assert "within the cost bound is +0.40, at dose 0.2" in frontier
    assert plots.describe_cost_frontier(effect.by_dose(), bound=0.5) == "No dose stays within the cost bound."
