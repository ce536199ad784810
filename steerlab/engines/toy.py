"""A whole engine in one short file: a tiny random model in plain torch, for tests and as a pattern for one's own.

It needs no model files and no other library, runs one row at a time without a cache, and does all that the engine
protocol asks for: plans with every operator and position, receipts, exact scores, measures, activations, doses.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from steerlab._runtime.encoding import Encoder
from steerlab._runtime.reference_norm import reference_windows
from steerlab._runtime.teacher_forcing import as_values
from steerlab.core._hook_points import HookPoint, check_site, resolve_layer, resolve_layers
from steerlab.core._not_finite_errors import not_finite
from steerlab.core._numbers import check_integer
from steerlab.core._seeds import SeedLike, check_seed, draw_keys, row_key
from steerlab.core._spelling import Continuation
from steerlab.core._stopping import before_stop, find_stop, stop_strings
from steerlab.core._text import Boundary, EncodedPair, PromptLike
from steerlab.core.engine import DEFAULT_POLICY, EngineTraits, ModelInfo, engine_pieces
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt, Receipts, warn_if_idle
from steerlab.core.results import Activations, Completion, Generations, Measured, Score, Scores, check_pool
from steerlab.display import Piece, Shown
from steerlab.measures._token_draws import draw
from steerlab.measures.log_probs import chosen_log_probs, rows_not_finite
from steerlab.measures.nucleus import apply_repetition_penalty, policy_log_probs
from steerlab.measures.quantities import TokenLogProb, check_named
from steerlab.steering._plan_assignment import AssignedPlan, PlanArgument, assign_plans
from steerlab.steering._run import PlanRun
from steerlab.steering.positions import RowPositions
from steerlab.steering.positions._by_tokens import on_model
from steerlab.steering.positions._prompt_lookup import PromptContent, marks_for
from steerlab.steering.positions.where import WhereLike, as_where
from steerlab.steering.positions.where import all as all_positions
from steerlab.steering.positions.where import index as index_positions
from steerlab.steering.top_tokens import check_streams

_Result = TypeVar("_Result", Generations, Scores, Measured, Activations)


class ToyEngine(Shown):
    """The Engine protocol on a tiny random model.

    The model: token embeddings; per layer h ← h + tanh(A · mean of h over the positions so far + B · h), whose input
    and output are the sites resid_pre and resid_post; logits U · h. Its tokens are bytes.

    Attributes:
        tokenizer: a byte-level tokenizer with an EOS and no BOS.
        receipts: those of the last call's result.

    Args:
        seed: of the weights.
        n_layers: layers.
        d_model: width of the residual stream.
        context_length: the longest sequence, in tokens.

    Examples:
        >>> import steerlab as sl
        >>> engine = ToyEngine()
        >>> plan = sl.Plan(sl.ablate(sl.SteeringVector.from_tensor([1.0] * 32, layer=1)))
        >>> engine.score("abc", ["d"], plan=plan).receipts[0].edited
        1
    """

    def __init__(self, seed: int = 0, n_layers: int = 3, d_model: int = 32, context_length: int = 512) -> None:
        self.tokenizer = _byte_tokenizer()
        self.receipts: Sequence[Receipt] = Receipts()
        draws = torch.Generator().manual_seed(seed)
        d_vocab = len(self.tokenizer)
        self._embedding = torch.randn(d_vocab, d_model, generator=draws)
        self._layers = torch.randn(n_layers, 2, d_model, d_model, generator=draws) / d_model**0.5
        self._unembedding: Tensor | None = torch.randn(d_model, d_vocab, generator=draws) / d_model**0.5
        self._median_norms: dict[HookPoint, float] = {}
        self.info = ModelInfo(
            name=f"toy-{seed}",
            revision=None,
            weights_hash=f"toy-{seed}-{n_layers}-{d_model}",
            weight_processing="none",
            n_layers=n_layers,
            d_model=d_model,
            d_vocab=d_vocab,
            context_length=context_length,
            dtype="float32",
        )
        self.traits = EngineTraits("toy", "cpu", tuple(range(n_layers)), takes_functions=True)

    def _finding(self) -> str:
        return f"{self.info.name!r}, {self.info.n_layers} layers, {self.info.dtype}"

    def _pieces(self) -> Sequence[Piece]:
        return engine_pieces(self.info, self.traits, self.receipts)

    def close(self) -> None:
        """Frees the model. The engine cannot be used afterwards."""
        self._unembedding = None

    # --- the protocol's calls -------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        plan: PlanArgument = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 64,
        n: int = 1,
        seed: SeedLike = 0,
        stop: Sequence[str] | str = (),
        chat: bool = False,
    ) -> Generations:
        """Samples n continuations of each prompt."""
        n_new, n = check_integer(max_new_tokens, "max_new_tokens", least=0), check_integer(n, "n", least=1)
        policy, strings = SamplingPolicy.check(policy), stop_strings(stop)
        encoded = self._encoder.prompts(prompts, chat, n_new)
        seed = check_seed(seed, len(encoded))
        contents, plans = self._encoder.contents(encoded), self._assign(plan, len(encoded))
        rows, receipts = [], []
        for i, prompt in enumerate(encoded):
            for g in range(n):
                row = _Row(self._forward, plans[i], contents[i], prompt.token_ids)
                keys = torch.from_numpy(draw_keys(row_key(seed, i, g), n_new))
                rows.append(self._completion(row, policy, keys, strings, i, g))
                receipts.append(row.receipt(i, len(receipts), ran=row.n_new > 0))
        made = Generations(tuple(rows), tuple(p.token_ids for p in encoded), "toy", tuple(receipts))
        return self._noted(made, warn=n_new > 0)

    @torch.no_grad()
    def score(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        variants: Sequence[str] = ("",),
        score_eos: bool = False,
        chat: bool = False,
    ) -> Scores:
        """The exact log-probability of every target after its prompt, in nats."""
        pairs, contents = self._encoder.pairs(
            prompts, targets, boundary=boundary, variants=variants, score_eos=score_eos, chat=chat
        )
        found = self._forced(pairs, contents, plan, {"log_prob": TokenLogProb()})
        rows = [Score.of_pair(i, j, p, x["log_prob"].tolist()) for (i, j, p), x in zip(pairs, found, strict=True)]
        return self._noted(Scores(tuple(rows), self.info.dtype, found.receipts))

    @torch.no_grad()
    def measure(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Any],
        measures: dict[str, Callable[[Tensor, Tensor], Tensor]],
        *,
        plan: PlanArgument = None,
        boundary: Boundary = "joint",
        chat: bool = False,
    ) -> Measured:
        """Quantities, or functions of (logits [tokens, d_vocab], ids [tokens]), of every target token's prediction."""
        check_named(measures)
        pairs, contents = self._encoder.pairs(prompts, targets, boundary=boundary, chat=chat)
        return self._noted(self._forced(pairs, contents, plan, measures))

    @torch.no_grad()
    def capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        layers: Any,
        site: str = "resid_post",
        where: WhereLike = None,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
    ) -> Activations:
        """Activations at chosen layers and positions, as they are after the plan's edits."""
        return self._noted(self._capture(prompts, layers, site, where, pool, plan, chat))

    def unembed(self, streams: Tensor) -> Tensor:
        """Logits of streams [rows, d_model] as they are after the last layer: [rows, d_vocab]."""
        assert self._unembedding is not None
        return check_streams(streams, self.info).float() @ self._unembedding

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a hook point on the shipped reference text, position 0 left out."""
        point = HookPoint(resolve_layer(layer, self.info.n_layers), site)
        if point not in self._median_norms:
            windows = reference_windows(self.tokenizer, self.info.d_vocab, self.info.context_length)
            with torch.no_grad():
                found = self._capture(windows, point.layer, site, ~index_positions(0))
            self._median_norms[point] = float(found[point.layer].norm(dim=-1).median())
        return self._median_norms[point]

    # --- how they are done ----------------------------------------------------------------------------------------

    def _forward(self, ids: Sequence[int], edit: Callable[[HookPoint, Tensor], Tensor]) -> Float[Tensor, "pos d_vocab"]:
        """Logits at every position of one row; `edit` is given the stream [1, pos, d_model] at each hook point."""
        assert self._unembedding is not None
        h = self._embedding[torch.tensor(ids, dtype=torch.long)]
        so_far = torch.arange(1, len(h) + 1)[:, None]
        for layer, (mix, own) in enumerate(self._layers):
            h = edit(HookPoint(layer, "resid_pre"), h[None])[0]
            h = h + torch.tanh(h.cumsum(dim=0) / so_far @ mix + h @ own)
            h = edit(HookPoint(layer, "resid_post"), h[None])[0]
        return h @ self._unembedding

    def _completion(
        self, row: "_Row", policy: SamplingPolicy, keys: Tensor, strings: tuple[str, ...], prompt: int, sample: int
    ) -> Completion:
        """Draws a row's tokens until it ends."""
        after, reason = Continuation(self.tokenizer, row.prompt), "length"
        log_ps, log_qs, text = [], [], ""
        for key in keys:
            logits = row.logits()[-1:]
            self._check_finite(logits, f"The logits of prompt {prompt}", row)
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(1, torch.tensor(row.ids), True)
            adjusted = apply_repetition_penalty(logits, seen, policy)
            log_q = policy_log_probs(adjusted, policy)
            token = adjusted.argmax(dim=-1) if policy.is_greedy else draw(log_q, key[None])
            log_ps.append(float(chosen_log_probs(logits, token)))
            log_qs.append(0.0 if policy.is_greedy else float(log_q[0, token]))
            row.ids.append(int(token))
            text = after.text(row.ids[len(row.prompt) :])
            if int(token) == self.tokenizer.eos_token_id:
                reason = "eos"
            elif find_stop(text, strings) is not None:
                reason = "stop"
            if reason != "length":
                break
        return Completion(
            before_stop(text, strings), row.ids[len(row.prompt) :], reason, prompt, sample, log_ps, log_qs
        )

    def _forced(
        self,
        pairs: Sequence[tuple[int, int, EncodedPair]],
        contents: Sequence[PromptContent],
        plan: PlanArgument,
        measures: dict[str, Any],
    ) -> Measured:
        """Measures of every pair's target tokens; a target's last token drives nothing and is not run."""
        plans = self._assign(plan, len(contents))
        found, receipts = [], []
        for index, (i, _, pair) in enumerate(pairs):
            row = _Row(self._forward, plans[i], contents[i].before(pair.context_ids), pair.context_ids)
            row.ids += pair.target_ids[:-1]
            logits = row.logits()[len(pair.context_ids) - 1 :]
            self._check_finite(logits, f"The logits of prompt {i} (row {index})", row)
            tokens = torch.tensor(pair.target_ids)
            found.append({name: as_values(name, f(logits, tokens), len(tokens)) for name, f in measures.items()})
            receipts.append(row.receipt(i, index))
        return Measured(found, receipts)

    def _capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        layers: Any,
        site: str,
        where: WhereLike,
        pool: str | None = None,
        plan: PlanArgument = None,
        chat: bool = False,
    ) -> Activations:
        points = [HookPoint(layer, check_site(site)) for layer in resolve_layers(layers, self.info.n_layers)]
        chosen, pool = on_model(as_where(where, all_positions()), self.tokenizer, self.info), check_pool(pool)
        encoded = self._encoder.prompts(prompts, chat)
        contents, plans = self._encoder.contents(encoded), self._assign(plan, len(encoded))
        values: dict[HookPoint, list[Tensor]] = {point: [] for point in points}
        positions, receipts = [], []
        for i, prompt in enumerate(encoded):
            row = _Row(self._forward, plans[i], contents[i], prompt.token_ids)
            streams = row.streams(points)
            places = RowPositions.of_tokens([row.ids], [len(row.prompt)], marks_for([chosen], [contents[i]]))
            mask = chosen.resolve(places)[0]
            if not bool(mask.any()):
                raise InputError(f"{chosen} selects no token in prompt {i}; nothing can be read there.")
            positions.append(tuple(mask.nonzero()[:, 0].tolist()))
            for point in points:
                self._check_finite(streams[point], f"The activations of prompt {i} at {point.name}", row)
                values[point].append(_pooled(streams[point][mask], pool))
            receipts.append(row.receipt(i, i))
        join = torch.cat if pool is None else torch.stack
        return Activations(
            site=site,
            layers=tuple(point.layer for point in points),
            values=tuple(join(values[point]) for point in points),
            positions=tuple(positions),
            pool=pool,
            prompt_token_ids=tuple(p.token_ids for p in encoded),
            receipts=tuple(receipts),
        )

    def _check_finite(self, rows: Tensor, what: str, row: "_Row") -> None:
        if bool(rows_not_finite(rows).any()):
            raise not_finite(what, self.info.dtype, steered=bool(len(row.assigned.plan)))

    def _assign(self, plan: PlanArgument, n_prompts: int) -> list[AssignedPlan]:
        return assign_plans(plan, n_prompts, self.info, self.median_norm, self.tokenizer)

    def _noted(self, result: _Result, *, warn: bool = True) -> _Result:
        self.receipts = Receipts(result.receipts)
        if warn:
            warn_if_idle(self.receipts)
        return result

    @property
    def _encoder(self) -> Encoder:
        if self._unembedding is None:
            raise InputError("This engine is closed; make a new one.")
        return Encoder(self.tokenizer, self.info)


class _Row:
    """One row and the plan at work on it; every pass runs it whole, and counts what it edits once."""

    def __init__(
        self, forward: Callable[..., Tensor], assigned: AssignedPlan, content: PromptContent, prompt: Iterable[int]
    ) -> None:
        self.assigned, self.prompt, self.ids = assigned, tuple(prompt), list(prompt)
        self._forward, self._ran = forward, 0
        self._run = PlanRun(assigned.plan, 1, [content])

    @property
    def n_new(self) -> int:
        """Tokens after the prompt."""
        return len(self.ids) - len(self.prompt)

    def logits(self, read: Callable[[HookPoint, Tensor], None] = lambda point, h: None) -> Tensor:
        """Logits at every position so far, [pos, d_vocab]; `read` sees each stream after its edits."""
        rows = RowPositions.of_tokens([self.ids], [len(self.prompt)])
        self._run.begin(RowPositions(rows.positions, rows.prompt_lens, token_ids=rows.token_ids, fresh=self._fresh()))

        def edit(point: HookPoint, h: Tensor) -> Tensor:
            edited = self._run.edit(point, h)
            read(point, edited)
            return edited

        self._ran = len(self.ids)
        return self._forward(self.ids, edit)

    def streams(self, points: Sequence[HookPoint]) -> dict[HookPoint, Tensor]:
        """The stream at hook points, after the plan's edits, each [pos, d_model]."""
        found: dict[HookPoint, Tensor] = {}
        self.logits(lambda point, h: found.update({point: h[0]}) if point in points else None)
        missing = [point.name for point in points if point not in found]
        if missing:
            raise InputError(f"The toy model has the sites resid_pre and resid_post, not {missing[0]}.")
        return found

    def receipt(self, prompt_index: int, row_index: int, *, ran: bool = True) -> Receipt:
        """The checked receipt of what was run."""
        (made,) = self._run.receipts(
            token_ids=[self.ids[: self._ran] if ran else []],
            prompt_lens=[len(self.prompt)],
            prompt_indices=[prompt_index],
            row_indices=[row_index],
            plan_hash=self.assigned.given_hash,
        )
        return made

    def _fresh(self) -> Tensor:
        return (torch.arange(len(self.ids)) >= self._ran)[None]


def _pooled(rows: Tensor, pool: str | None) -> Tensor:
    if pool is None:
        return rows
    return rows.mean(dim=0) if pool == "mean" else rows[-1]


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and an EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
