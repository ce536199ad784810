"""Small data for experiments on the tiny models, the same for all tests."""

import steerlab as sl

PAIRS = sl.ContrastPairs.from_lists(
    ["the cat ran home", "a dog sat down", "the bird flew off", "a fish swam by"],
    ["the cat ran away", "a dog stood up", "the bird came back", "a fish swam on"],
    ["x", "x", "y", "y"],
)
TEXTS = ["the cat ran home and the dog sat down", "a bird flew off"]
PROMPTS = ["the cat", "a dog"]


def targets_of(*prompts: str) -> sl.Targets:
    """Items with two positive targets and a negative one, each a group of its own."""
    return sl.Targets.from_records(
        [
            {"prompt": prompt, "target": target, "label": label}
            for prompt in prompts
            for target, label in [(" ran", 1), (" sat down", 1), (" flew off", -1)]
        ]
    )


TARGETS = targets_of("the cat", "a dog", "the bird", "a fish")
DEV = targets_of("the horse", "a cow", "the hen")
HELD_OUT = targets_of("the goat", "a pig", "the duck")
