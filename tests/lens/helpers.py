"""What the lens tests share: prompts of many lengths, vectors, and plain scores."""

import torch

import steerlab as sl
from steerlab._runtime.rows import Rows

PROMPTS = [
    "Hi",
    "The capital of France is",
    "Two plus two equals",
    "She opened the window because the room was warm and",
    "Once",
    "Nobody knew why the old clock had stopped, nor when it",
    "I really liked the soup; the bread was",
    "In the morning the ferry leaves the",
]


def random_vector(engine, layer=None, site="resid_post", seed=0):
    """A vector of norm √d_model at a middle layer."""
    values = torch.randn(engine.info.d_model, generator=torch.Generator().manual_seed(seed))
    return sl.SteeringVector.from_tensor(values, layer=engine.info.n_layers // 2 if layer is None else layer, site=site)


def strong_plan(engine, **options):
    """A plan that clearly changes what any of the models says."""
    vector = random_vector(engine)
    return sl.Plan(sl.add(vector, coef=engine.median_norm(vector.layer) * 0.5 / vector.norm, **options))


def plain_log_probs(model, context, target):
    """Log p of each target token from one uncached pass over the whole sequence."""
    ids = torch.tensor([[*context, *target]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double().log_softmax(-1)
    start = len(context) - 1
    return [logits[start + k, token].item() for k, token in enumerate(target)]


def passes(monkeypatch):
    """The shape of every block of tokens that is run from now on."""
    seen = []
    extend = Rows.extend

    def watched(self, ids, valid, *, keep=0):
        seen.append(tuple(ids.shape))
        return extend(self, ids, valid, keep=keep)

    monkeypatch.setattr(Rows, "extend", watched)
    return seen


def all_hooks(bridge):
    """Every forward hook on the bridge's hook points."""
    return {name: len(point.fwd_hooks) + len(point._forward_hooks) for name, point in bridge.hook_dict.items()}
