"""Two families of reasoning-gym, small enough for a model of 135 million parameters."""

from envs.datasets.reasoning_gym import ReasoningGym

_NEEDLES = ReasoningGym("needle_haystack", num_tasks=3000, seed=1, min_num_statements=4, max_num_statements=8)
_REVERSALS = ReasoningGym("word_sequence_reversal", num_tasks=3000, seed=1, min_words=2, max_words=4)

needle_tasks, needle_score = _NEEDLES.tasks, _NEEDLES.score
reversal_tasks, reversal_score = _REVERSALS.tasks, _REVERSALS.score
