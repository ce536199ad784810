"""A model as a judge of texts: the exact distribution over its ratings, without reading them out of what it writes."""

from steerlab.scoring.judging.agreement import JudgeAgreement
from steerlab.scoring.judging.comparing import PairJudgements
from steerlab.scoring.judging.judge import RubricJudge, judge
from steerlab.scoring.judging.rating import Judgements
from steerlab.scoring.judging.rubric import JudgeCard

__all__ = ["JudgeAgreement", "JudgeCard", "Judgements", "PairJudgements", "RubricJudge", "judge"]
