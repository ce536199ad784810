"""The judge itself: fills its rubrics, scores every label of the scale, and makes distributions of the scores."""

from collections.abc import Mapping, Sequence
from typing import Any

from steerlab.core._arguments import explains_arguments
from steerlab.core._numbers import check_flag, check_integer
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.core.results import Score
from steerlab.display import Facts, Piece, Shown
from steerlab.scoring.judging.agreement import JudgeAgreement, agreement_of, human_labels
from steerlab.scoring.judging.comparing import PairJudgements, pairs_of
from steerlab.scoring.judging.rating import Judgements, judgements_of
from steerlab.scoring.judging.rubric import COMPARED, RATED, JudgeCard, card_of, check_places, filled, texts_of


class RubricJudge(Shown):
    """Rates texts, or compares pairs of them, by what a model's probabilities say; made by `steerlab.judge`.

    Called with (prompt, text) it gives the rating as a number, so it serves wherever a function of these does.

    Attributes:
        engine: the engine that scores.
        card: model, rubrics and scale, with their hashes.
    """

    def __init__(self, engine: Engine, card: JudgeCard) -> None:
        self.engine, self.card = engine, card

    def _finding(self) -> str:
        rubrics = f"{len(self.card.rubrics)} rubric{'s' * (len(self.card.rubrics) > 1)}"
        return f"{rubrics} on {', '.join(self.card.labels)}, by {self.card.model}, {self.card.hash}"

    def _pieces(self) -> Sequence[Piece]:
        return [Facts(self.card.facts())]

    def __call__(self, prompt: str, text: str) -> float:
        """The rating of one text after one prompt."""
        return float(self.rate([text], prompts=[prompt]).ratings[0])

    def on(self, engine: Engine) -> "RubricJudge":
        """The same judge on another engine of the same model, e.g. one that keeps its scores."""
        return RubricJudge(engine, self.card)

    @explains_arguments
    def rate(self, texts: Sequence[str], *, prompts: Sequence[str] | None = None) -> Judgements:
        r"""The exact distribution over the ratings of every text under every rubric, in one call of the engine.

        Args:
            texts: what is rated; stands in a rubric's place `{text}`.
            prompts: what each is an answer to; stands in the place `{prompt}`, where a rubric has one.

        Returns:
            `Judgements`: `.ratings`, `.rows`, `.probs()`.

        Raises:
            InputError: for a rubric without the place, texts that are no strings, or labels that this tokenizer joins
                with the rubric's end.

        Examples:
            >>> judge = sl.judge(engine, "Text: {text}\nIs it kind? Rating from 0 to 2:")
            >>> judge.rate(["Thank you so much.", "Go away."]).probs().shape
            (2, 3)
        """
        found = texts_of(texts, "texts")
        given = self._prompts(prompts, len(found), RATED)
        asked = [{"text": text} | prompt for text, prompt in zip(found, given, strict=True)]
        return judgements_of(self.card, self._scores([filled(r, t) for t in asked for r in self._rubrics]))

    @explains_arguments
    def compare(self, a: Sequence[str], b: Sequence[str], *, prompts: Sequence[str] | None = None) -> PairJudgements:
        r"""Which of two texts is preferred, pair by pair, each asked in both orders and averaged.

        The scale's first label says that the text shown first is better, its last that the second is; labels between
        lie at equal steps. Of what stands in the places `{a}` and `{b}`, the second asking changes the order.

        Args:
            a: the first text of each pair.
            b: the second text of each pair.
            prompts: what both are answers to; stands in the place `{prompt}`, where a rubric has one.

        Returns:
            `PairJudgements`: `.rows.preference` (for `a`), `.position_bias`.

        Raises:
            InputError: as `rate`.

        Examples:
            >>> asked = "First: {a}\nSecond: {b}\nThe kinder one is text"
            >>> found = sl.judge(engine, asked, {"1": 1, "2": 0}).compare(["Thanks."], ["Go away."])
            >>> bool(0 <= found.rows.preference[0] <= 1)
            True
        """
        first = texts_of(a, "a")
        second = texts_of(b, "b", len(first))
        given = self._prompts(prompts, len(first), COMPARED)
        asked = [
            filled(rubric, {"a": x, "b": y} | prompt)
            for one, other, prompt in zip(first, second, given, strict=True)
            for rubric in self._rubrics
            for x, y in ((one, other), (other, one))
        ]
        return pairs_of(self.card, self._scores(asked))

    @explains_arguments
    def agreement(
        self,
        texts: Sequence[str],
        *,
        labels: Any = None,
        prompts: Sequence[str] | None = None,
        max_new_tokens: int = 8,
    ) -> JudgeAgreement:
        """How far the ratings agree with the model's own greedy replies, and with human labels.

        Args:
            texts: what is rated.
            labels: a label of the scale per text, or None where nobody gave one; by rubric if there are several.
            prompts: as in `rate`.
            max_new_tokens: tokens of each reply at most; the first label in it counts.

        Returns:
            `JudgeAgreement`: `.table`, `.unparseable`.

        Raises:
            InputError: as `rate`, and for labels that are not of the scale.
        """
        found = texts_of(texts, "texts")
        known = human_labels(labels, self.card, len(found))
        length = check_integer(max_new_tokens, "max_new_tokens", least=1)
        given = self._prompts(prompts, len(found), RATED)
        judged = self.rate(found, prompts=prompts)
        asked = [filled(r, {"text": t} | p) for t, p in zip(found, given, strict=True) for r in self._rubrics]
        greedy = SamplingPolicy.greedy()
        replies = self.engine.generate(asked, policy=greedy, max_new_tokens=length, chat=self.card.chat).texts
        return agreement_of(self.card, judged.rows, replies, known)

    @property
    def _rubrics(self) -> list[str]:
        return list(self.card.rubrics.values())

    def _prompts(self, prompts: Any, n: int, needed: Sequence[str]) -> list[dict[str, str]]:
        check_places(self.card.rubrics, needed, prompts)
        if prompts is None:
            return [{}] * n
        return [{"prompt": prompt} for prompt in texts_of(prompts, "prompts", n)]

    def _scores(self, asked: Sequence[str]) -> list[list[Score]]:
        targets = self.card.targets
        scores = self.engine.score(list(asked), [targets] * len(asked), chat=self.card.chat)
        found: list[list[Score]] = [[] for _ in asked]
        for score in scores:
            found[score.prompt_index].append(score)
        return found


@explains_arguments
def judge(
    engine: Engine,
    rubric: str | Mapping[str, str],
    scale: Sequence[str] | Mapping[str, float] = ("0", "1", "2"),
    *,
    aggregate: str = "harmonic_mean",
    chat: bool = False,
    lead: str | None = None,
) -> RubricJudge:
    r"""A model as a judge of texts, whose answers are probabilities: none is lost because it cannot be parsed.

    After the filled rubric every label of the scale is scored as a whole, also where it takes several tokens; the
    distribution over the labels is exact, and its mean is the rating. `mass` beside it says how likely the model was to
    answer with a label at all: where that is small, the rubric does not lead to an answer, and the ratings mean little.

    Args:
        engine: any engine; its model is the judge.
        rubric: the question, with a place `{text}` for what is rated, or `{a}` and `{b}` for a pair, and `{prompt}`
            where the prompt matters; or several rubrics by name.
        scale: the labels, in order; numbers as texts, or a dictionary that says what each label counts.
        aggregate: how ratings of several rubrics become one: `harmonic_mean` (0 if any part is 0) or `mean`.
        chat: ask in a turn of a chat; the label is then how the reply begins.
        lead: text between rubric and label; by default a space after plain text that ends in none, else nothing.

    Returns:
        A `RubricJudge`: `rate(texts)`, `compare(a, b)`, `agreement(texts, labels=…)`; also the `judge=` of
        `Experiment.generate`.

    Raises:
        InputError: for a rubric without a place, or a scale that is none.

    Source:
        Liu et al. 2023 (G-Eval), section 2, weight ratings by the probabilities of their tokens. Zheng et al. 2023
        (MT-Bench), section 3.4, ask for pairs in both orders.

    Examples:
        >>> judge = sl.judge(engine, "Text: {text}\nIs it kind? Rating from 0 to 2:")
        >>> bool(0 <= judge.rate(["Thank you so much."]).ratings[0] <= 2)
        True
    """
    if not isinstance(engine, Engine):
        raise InputError(f"The judge is an engine, e.g. sl.load('smollm2-135m'), got {type(engine).__name__}.")
    options = {"aggregate": aggregate, "chat": check_flag(chat, "chat"), "lead": lead}
    return RubricJudge(engine, card_of(engine.info, engine.traits.backend, rubric, scale, **options))
